// The router warp of a fused_moe block: choices of the rows it owns, then all rows' choices, and from their bitmaps the jobs that weights are
// streamed for. kernels/nvidia/fused_moe/DESIGN.md has the rule of choice.
#pragma once
#include "sgl_lowlatency/stages/bitmap_routing.hpp"
#include "sgl_lowlatency/stages/fused_moe_state.hpp"

namespace sgl_lowlatency::stages {

constexpr float kMoeSumEpsilon = 1e-20f;  // beside the sum of a row's scores
constexpr int32_t kChoiceBatch = 4;       // choices that a lane asks for at a time

// sqrt(softplus(logit)), as SGLang's router has it for this family.
SGL_DEVICE float moe_score(float logit) {
  return dialect::square_root(logit > 20.0f ? logit : dialect::log1p(dialect::exp(logit)));
}

// Orders biased scores: NaN as +infinity; never 0.
SGL_DEVICE uint32_t moe_rank(float biased) {
  return rank_key(biased != biased ? dialect::bits_to_float(0x7f800000u) : biased);
}

// A row's logits: of lane l the experts l, l + 32, ..; partial sums are added in the order of K. Entry: all lanes.
SGL_DEVICE void await_moe_logits(const FusedMoeParams& p, const MoeWords& words, int32_t row, float (&logits)[abi::kExpertWords]) {
  const int32_t lane = dialect::thread_idx() % 32, num_experts = p.geometry.num_experts, splits = abi::moe_splits(p.geometry);
SGL_UNROLL
  for (int32_t w = 0; w < abi::kExpertWords; ++w) logits[w] = 0.0f;
SGL_NO_UNROLL
  for (int32_t split = 0; split < splits; ++split) {
    const uint32_t* const from = words.logits() + (split * p.rows + row) * num_experts + lane;
    uint32_t word[abi::kExpertWords];
SGL_UNROLL
    for (int32_t w = 0; w < abi::kExpertWords; ++w) word[w] = w * 32 + lane < num_experts ? abi::kUnwritten : 0u;
    sync::wait_until(
        fault_sink(p), abi::kFaultEdgeDeadline, 0, abi::kMoeEdgeLogits, static_cast<uint32_t>((split * p.rows + row) * num_experts),
        [&] {
          uint32_t largest = 0;
SGL_UNROLL
          for (int32_t w = 0; w < abi::kExpertWords; ++w) {
            if (word[w] == abi::kUnwritten) {
              uint32_t one[1];
              dialect::load_words(one, from + w * 32);
              word[w] = one[0];
            }
            largest = sync::max_word(largest, word[w]);
          }
          return largest != abi::kUnwritten || dialect::planted(dialect::Planted::kMissingAwait);
        },
        [] { return abi::kUnwritten; });
SGL_UNROLL
    for (int32_t w = 0; w < abi::kExpertWords; ++w) logits[w] += dialect::bits_to_float(word[w]);
  }
  dialect::sync_warp();
}

// Row `row` chooses top_k experts by score + bias, descending, equal ones by id, ascending; weights are scores over their sum, scaled.
// Hands the choices to all blocks. Entry: all lanes of the router warp.
SGL_DEVICE void choose_moe_row(const FusedMoeParams& p, const MoeWords& words, int32_t row) {
  const int32_t lane = dialect::thread_idx() % 32, num_experts = p.geometry.num_experts, top_k = p.geometry.top_k;
  const bool is_live = p.num_live_rows == nullptr || row < dialect::load_plain(p.num_live_rows);
  float score[abi::kExpertWords];
  await_moe_logits(p, words, row, score);
  if (p.out_logits != nullptr) {
SGL_UNROLL
    for (int32_t w = 0; w < abi::kExpertWords; ++w) {
      if (w * 32 + lane < num_experts) dialect::store_plain(p.out_logits + row * num_experts + w * 32 + lane, score[w]);
    }
  }
  const bool is_alt = p.bias_alt != nullptr && dialect::load_plain(reinterpret_cast<const uint64_t*>(p.token_ids) + row) ==
                                                   static_cast<uint64_t>(p.alt_token_id);
  const float* const bias = is_alt ? p.bias_alt : p.bias;
  uint32_t key[abi::kExpertWords];
SGL_UNROLL
  for (int32_t w = 0; w < abi::kExpertWords; ++w) {
    key[w] = 0u;  // there is none, or it is chosen
    if (w * 32 + lane < num_experts) {
      score[w] = moe_score(score[w]);
      key[w] = moe_rank(dialect::add_rounded(score[w], dialect::load_constant(bias + w * 32 + lane)));
    }
  }
  uint32_t id = abi::kMoeNoExpert;
  float weight = 0.0f;
SGL_NO_UNROLL
  for (int32_t k = 0; k < top_k; ++k) {
    uint32_t best = 0, best_word = 0;
    float best_score = 0.0f;
SGL_UNROLL
    for (int32_t w = 0; w < abi::kExpertWords; ++w) {
      const bool is_better = dialect::planted(dialect::Planted::kTieToHigherId) ? key[w] != 0 && key[w] >= best : key[w] > best;
      best = is_better ? key[w] : best;
      best_word = is_better ? w : best_word;
      best_score = is_better ? score[w] : best_score;
    }
    const uint32_t candidate = best == dialect::reduce_max(best) ? best_word * 32 + lane : kNoExpert;  // top_k <= num_experts: best is not 0
    const uint32_t winner = dialect::planted(dialect::Planted::kTieToHigherId) ? dialect::reduce_max(candidate == kNoExpert ? 0u : candidate)
                                                                               : dialect::reduce_min(candidate);
    const float winner_score = dialect::shuffle(best_score, static_cast<int>(winner % 32));
    if (lane == k) {
      id = winner;
      weight = winner_score;
    }
SGL_UNROLL
    for (int32_t w = 0; w < abi::kExpertWords; ++w) key[w] = winner - lane == static_cast<uint32_t>(w * 32) ? 0u : key[w];
  }
  const float sum = warp_sum(weight);  // of lanes without a choice 0
  if (top_k > 1) weight = dialect::divide_full(weight, dialect::add_rounded(sum, kMoeSumEpsilon));
  weight = dialect::multiply_rounded(weight, p.routed_scaling);
  if (lane >= top_k) return;
  if (!is_live) {
    id = abi::kMoeNoExpert;
    weight = 0.0f;
  }
  if (p.out_ids != nullptr) {
    dialect::store_plain(p.out_ids + row * top_k + lane, id == abi::kMoeNoExpert ? -1 : static_cast<int32_t>(id));
    dialect::store_plain(p.out_weights + row * top_k + lane, weight);
  }
  uint32_t choice[2] = {id, dialect::float_to_bits(weight)};
  sync::publish(words.choices() + (row * top_k + lane) * 2, choice);
}

// ids and weights of all rows, from the blocks that chose. Entry: all lanes of the router warp. Ends with a warp barrier.
SGL_DEVICE void await_moe_choices(const FusedMoeParams& p, const MoeShared& s, const MoeWords& words) {
  const int32_t lane = dialect::thread_idx() % 32, count = p.rows * p.geometry.top_k;
SGL_NO_UNROLL
  for (int32_t first = lane; first < count; first += kChoiceBatch * 32) {
    uint32_t choice[kChoiceBatch][2];
SGL_UNROLL
    for (int32_t u = 0; u < kChoiceBatch; ++u) choice[u][0] = choice[u][1] = first + u * 32 < count ? abi::kUnwritten : 0u;
    sync::wait_until(
        fault_sink(p), abi::kFaultEdgeDeadline, 0, abi::kMoeEdgeChoices, static_cast<uint32_t>(first * 2),
        [&] {
          bool is_complete = true;
SGL_UNROLL
          for (int32_t u = 0; u < kChoiceBatch; ++u) {
            if (!sync::is_written(choice[u])) dialect::load_words(choice[u], words.choices() + (first + u * 32) * 2);
            is_complete = is_complete && sync::is_written(choice[u]);
          }
          return is_complete;
        },
        [] { return abi::kUnwritten; });
SGL_UNROLL
    for (int32_t u = 0; u < kChoiceBatch; ++u) {
      if (first + u * 32 < count) {
        s.ids()[first + u * 32] = choice[u][0];
        s.weights()[first + u * 32] = dialect::bits_to_float(choice[u][1]);
      }
    }
  }
  dialect::sync_warp();
}

// Row bits of every expert, from the rows' sets. Entry: all lanes of the router warp. Ends with a warp barrier.
SGL_DEVICE void make_moe_row_bits(const FusedMoeParams& p, const MoeShared& s) {
  const int32_t lane = dialect::thread_idx() % 32, num_experts = p.geometry.num_experts, top_k = p.geometry.top_k;
SGL_NO_UNROLL
  for (int32_t row = 0; row < p.rows; ++row) {
    uint32_t word = 0;
SGL_NO_UNROLL
    for (int32_t k = 0; k < top_k; ++k) {
      const uint32_t id = s.ids()[row * top_k + k];
      if (id / 32 == static_cast<uint32_t>(lane)) word |= 1u << id % 32;
    }
    if (lane < abi::kExpertWords) s.chosen(row)[lane] = word;
  }
  dialect::sync_warp();
SGL_NO_UNROLL
  for (int32_t i = 0; i < abi::kMoeRowWords * abi::kExpertWords; ++i) {
    const int32_t w = i / abi::kMoeRowWords, half = i % abi::kMoeRowWords, row = half * 32 + lane;
    const uint32_t bits = transpose_32x32(row < p.rows ? s.chosen(row)[w] : 0u);
    if (w * 32 + lane < num_experts) s.row_bits()[half * num_experts + w * 32 + lane] = bits;
  }
  dialect::sync_warp();
}

// Jobs and pairs in the order of experts, an expert's pairs in the order of rows. Entry: all lanes of the router warp. Ends with a warp barrier.
SGL_DEVICE void make_moe_jobs(const FusedMoeParams& p, const MoeShared& s) {
  constexpr uint32_t kJob = 1u << 16;  // sums of jobs above, of pairs below
  const int32_t lane = dialect::thread_idx() % 32, num_experts = p.geometry.num_experts, top_k = p.geometry.top_k;
  for (int32_t i = lane; i < p.rows * top_k; i += 32) s.pairs()[i] = -1;
  dialect::sync_warp();
  uint32_t before = 0;
SGL_NO_UNROLL
  for (int32_t w = 0; w * 32 < num_experts; ++w) {
    const int32_t expert = w * 32 + lane;
    uint32_t bits[abi::kMoeRowWords] = {};
    int32_t count = 0;
SGL_UNROLL
    for (int32_t half = 0; half < abi::kMoeRowWords; ++half) {
      if (expert < num_experts) bits[half] = s.row_bits()[half * num_experts + expert];
      count += dialect::popcount(bits[half]);
    }
    const uint32_t own = static_cast<uint32_t>(abi::moe_ceil_div(count, abi::kMoeColumns)) * kJob + static_cast<uint32_t>(count);
    uint32_t sum = own;
SGL_UNROLL
    for (int32_t span = 1; span < 32; span *= 2) {
      const uint32_t lower = dialect::shuffle(sum, lane >= span ? lane - span : lane);
      if (lane >= span) sum += lower;
    }
    const uint32_t begin = before + sum - own;
    before += dialect::shuffle(sum, 31);
    const int32_t first_job = static_cast<int32_t>(begin / kJob), first_pair = static_cast<int32_t>(begin % kJob);
SGL_NO_UNROLL
    for (int32_t done = 0; done < count; done += abi::kMoeColumns) {
      const int32_t job = first_job + done / abi::kMoeColumns;
      s.job_expert()[job] = expert;
      s.job_first()[job] = first_pair + done;
      s.job_count()[job] = count - done < abi::kMoeColumns ? count - done : abi::kMoeColumns;
    }
    int32_t pair = first_pair;
SGL_NO_UNROLL
    for (int32_t row = 0; row < p.rows && count > 0; ++row) {
      if ((bits[row / 32] >> row % 32 & 1u) == 0) continue;
      s.pair_rows()[pair] = row;
SGL_NO_UNROLL
      for (int32_t k = 0; k < top_k; ++k) {
        if (s.ids()[row * top_k + k] == static_cast<uint32_t>(expert)) s.pairs()[row * top_k + k] = pair;
      }
      ++pair;
    }
  }
  if (lane == 0) s.state()->num_jobs = static_cast<int32_t>(before / kJob);
  dialect::sync_warp();
}

// Clears the block's share of what the launch before has used: nobody reads it, and the launch behind this one uses it again.
SGL_DEVICE void clear_moe_words(const FusedMoeParams& p, const MoeShared& s) {
  const int32_t lane = dialect::thread_idx() % 32;
  uint32_t* const other = p.workspace + static_cast<int64_t>(1 - s.state()->generation) * p.generation_words;
SGL_NO_UNROLL
  for (int32_t v = dialect::block_idx() * 32 + lane; v < s.state()->words_to_clear / 4; v += dialect::grid_dim() * 32) {
    dialect::clear_words(other + static_cast<int64_t>(v) * 4);
  }
}

// Entry: all lanes of the router warp. Rows belong to the last blocks, the first ones have more of the shared expert.
SGL_DEVICE void route_moe(const FusedMoeParams& p, const MoeShared& s) {
  const MoeWords words = moe_words(p, s);
SGL_NO_UNROLL
  for (int32_t row = dialect::grid_dim() - 1 - dialect::block_idx(); row < p.rows; row += dialect::grid_dim()) choose_moe_row(p, words, row);
  dialect::sync_warp();
  await_moe_choices(p, s, words);
  make_moe_row_bits(p, s);
  make_moe_jobs(p, s);
  // Pairs with the waits of the producer and of the consumers: all that the warp has written, which sync_warp has handed to this lane.
  if (dialect::thread_idx() % 32 == 0) dialect::mbarrier_arrive(s.routed());
  clear_moe_words(p, s);
}

}  // namespace sgl_lowlatency::stages
