// The router warp of a fused_moe block: choices of the rows it owns, then all rows' choices, and from their bitmaps the jobs that weights are
// streamed for; behind that, where the launch has streams, their mix. kernels/nvidia/fused_moe/DESIGN.md has the rule of choice.
#pragma once
#include "sgl_lowlatency/stages/bitmap_routing.hpp"
#include "sgl_lowlatency/stages/fused_moe_post.hpp"
#include "sgl_lowlatency/stages/hyper_mix.hpp"

namespace sgl_lowlatency::stages {

constexpr float kMoeSumEpsilon = 1e-20f;  // beside the sum of a row's scores
constexpr int32_t kLogitBatch = 6;        // experts of a lane whose logits it asks for at a time
constexpr int32_t kLogitSplits = 5;       // partial sums of each at a time: all of 5,120 columns
constexpr int32_t kChoiceBatch = 4;       // choices that a lane asks for at a time

// sqrt(softplus(logit)), as SGLang's router has it for this family.
SGL_DEVICE float moe_score(float logit) {
  return dialect::square_root(logit > 20.0f ? logit : dialect::log1p(dialect::exp(logit)));
}

// Orders biased scores: NaN as +infinity; never 0.
SGL_DEVICE uint32_t moe_rank(float biased) {
  return rank_key(biased != biased ? dialect::bits_to_float(0x7f800000u) : biased);
}

// A row's logits: of lane l the experts l, l + 32, ..; partial sums are added in the order of K. kLogitBatch experts of a lane at a time, all of
// their splits together. Entry: all lanes. Ends with a warp barrier.
SGL_DEVICE void await_moe_logits(const FusedMoeParams& p, const MoeWords& words, int32_t row, float (&logits)[abi::kExpertWords]) {
  static_assert(abi::kExpertWords % kLogitBatch == 0, "whole batches");
  const int32_t lane = dialect::thread_idx() % 32, num_experts = p.geometry.num_experts, splits = abi::moe_splits(p.geometry);
SGL_UNROLL
  for (int32_t begin = 0; begin < abi::kExpertWords; begin += kLogitBatch) {
    float sum[kLogitBatch] = {};
SGL_NO_UNROLL
    for (int32_t first = 0; first < splits; first += kLogitSplits) {
      uint32_t word[kLogitSplits][kLogitBatch];
      const auto is_there = [&](int32_t i, int32_t w) { return first + i < splits && (begin + w) * 32 + lane < num_experts; };
      const auto index = [&](int32_t i, int32_t w) { return ((first + i) * p.rows + row) * num_experts + (begin + w) * 32 + lane; };
SGL_UNROLL
      for (int32_t i = 0; i < kLogitSplits; ++i) {
SGL_UNROLL
        for (int32_t w = 0; w < kLogitBatch; ++w) word[i][w] = is_there(i, w) ? abi::kUnwritten : 0u;
      }
      sync::wait_until(
          fault_sink(p), abi::kFaultEdgeDeadline, 0, abi::kMoeEdgeLogits, static_cast<uint32_t>(index(0, 0)),
          [&] {
            uint32_t largest = 0;
SGL_UNROLL
            for (int32_t i = 0; i < kLogitSplits; ++i) {
SGL_UNROLL
              for (int32_t w = 0; w < kLogitBatch; ++w) {
                if (word[i][w] == abi::kUnwritten) {
                  uint32_t one[1];
                  dialect::load_words(one, words.logits() + index(i, w));
                  word[i][w] = one[0];
                }
              }
            }
SGL_UNROLL
            for (int32_t i = 0; i < kLogitSplits; ++i) {
SGL_UNROLL
              for (int32_t w = 0; w < kLogitBatch; ++w) largest = sync::max_word(largest, word[i][w]);
            }
            return largest != abi::kUnwritten || dialect::planted(dialect::Planted::kMissingAwait);
          },
          [] { return abi::kUnwritten; });
SGL_UNROLL
      for (int32_t i = 0; i < kLogitSplits; ++i) {
SGL_UNROLL
        for (int32_t w = 0; w < kLogitBatch; ++w) sum[w] += dialect::bits_to_float(word[i][w]);
      }
    }
SGL_UNROLL
    for (int32_t w = 0; w < kLogitBatch; ++w) logits[begin + w] = sum[w];
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

// Row bits of every expert. A row's experts are different, so its lanes do not meet; rows come one after the other. Entry: all lanes of the router
// warp. Ends with a warp barrier.
SGL_DEVICE void make_moe_row_bits(const FusedMoeParams& p, const MoeShared& s) {
  const int32_t lane = dialect::thread_idx() % 32, num_experts = p.geometry.num_experts, top_k = p.geometry.top_k;
  for (int32_t i = lane; i < abi::kMoeRowWords * num_experts; i += 32) s.row_bits()[i] = 0u;
  dialect::sync_warp();
SGL_NO_UNROLL
  for (int32_t row = 0; row < p.rows; ++row) {
    if (lane < top_k) {
      const uint32_t id = s.ids()[row * top_k + lane];
      if (id != abi::kMoeNoExpert) s.row_bits()[row / 32 * num_experts + id] |= 1u << row % 32;
    }
    dialect::sync_warp();
  }
}

// Jobs and pairs in the order of experts, an expert's pairs in the order of rows. Each lane has consecutive experts. Entry: all lanes of the router
// warp. Ends with a warp barrier.
SGL_DEVICE void make_moe_jobs(const FusedMoeParams& p, const MoeShared& s) {
  constexpr uint32_t kJob = 1u << 16;  // sums of jobs above, of pairs below
  const int32_t lane = dialect::thread_idx() % 32, num_experts = p.geometry.num_experts, top_k = p.geometry.top_k;
  const int32_t share = abi::moe_ceil_div(num_experts, 32), begin = lane * share;
  const int32_t end = begin + share < num_experts ? begin + share : num_experts;
  const auto count_of = [&](int32_t expert) {
    return dialect::popcount(s.row_bits()[expert]) + dialect::popcount(s.row_bits()[num_experts + expert]);
  };
  static_assert(abi::kMoeRowWords == 2, "count_of");
  for (int32_t i = lane; i < p.rows * top_k; i += 32) s.pairs()[i] = -1;
  uint32_t own = 0;
SGL_NO_UNROLL
  for (int32_t expert = begin; expert < end; ++expert) {
    const int32_t count = count_of(expert);
    own += static_cast<uint32_t>(abi::moe_ceil_div(count, abi::kMoeColumns)) * kJob + static_cast<uint32_t>(count);
  }
  dialect::sync_warp();  // pairs are cleared
  uint32_t sum = own;
SGL_UNROLL
  for (int32_t span = 1; span < 32; span *= 2) {
    const uint32_t lower = dialect::shuffle(sum, lane >= span ? lane - span : lane);
    if (lane >= span) sum += lower;
  }
  if (lane == 31) s.state()->num_jobs = static_cast<int32_t>(sum / kJob);
  int32_t job = static_cast<int32_t>((sum - own) / kJob), pair = static_cast<int32_t>((sum - own) % kJob);
SGL_NO_UNROLL
  for (int32_t expert = begin; expert < end; ++expert) {
    const int32_t count = count_of(expert);
SGL_NO_UNROLL
    for (int32_t done = 0; done < count; done += abi::kMoeColumns) {
      s.job_expert()[job] = expert;
      s.job_first()[job] = pair + done;
      s.job_count()[job] = count - done < abi::kMoeColumns ? count - done : abi::kMoeColumns;
      ++job;
    }
SGL_NO_UNROLL
    for (int32_t word = 0; word < abi::kMoeRowWords && count > 0; ++word) {
SGL_NO_UNROLL
      for (uint32_t bits = s.row_bits()[word * num_experts + expert]; bits != 0; bits &= bits - 1u) {
        const int32_t row = word * 32 + dialect::popcount((bits & (0u - bits)) - 1u);
        s.pair_rows()[pair] = row;
SGL_NO_UNROLL
        for (int32_t k = 0; k < top_k; ++k) {
          if (s.ids()[row * top_k + k] == static_cast<uint32_t>(expert)) s.pairs()[row * top_k + k] = pair;
        }
        ++pair;
      }
    }
  }
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
  if (has_post(p)) mix_streams(moe_hyper(p, words));
  clear_moe_words(p, s);
}

}  // namespace sgl_lowlatency::stages
