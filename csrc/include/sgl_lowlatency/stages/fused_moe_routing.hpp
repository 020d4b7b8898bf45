// The router warp of a fused_moe block: choices of the rows it owns, then all rows' choices, and from their bitmaps the jobs that weights are
// streamed for. kernels/nvidia/fused_moe/DESIGN.md has the rule of choice.
//
// One warp walks through this code once a launch, while everybody waits for it: instructions that are fetched from memory for the first time would
// be most of its time. So it rehearses: while the first logits are on their way, it runs all of it on what happens to be there, and hands over
// nothing.
#pragma once
#include "sgl_lowlatency/stages/bitmap_routing.hpp"
#include "sgl_lowlatency/stages/fused_moe_state.hpp"

namespace sgl_lowlatency::stages {

constexpr float kMoeSumEpsilon = 1e-20f;  // beside the sum of a row's scores
constexpr int32_t kLogitSplits = 5;       // partial sums of a logit at most
constexpr int32_t kLogitVectors = 3;      // four logits each: of a lane
constexpr int32_t kScoreBatch = 3;        // experts of a lane that are scored side by side
static_assert(abi::kMoeMaxHidden <= kLogitSplits * abi::kMoeSplitK && abi::kMaxExperts <= kLogitVectors * 128, "all of a row at a time");
constexpr int32_t kChoiceBatch = 4;       // choices that a lane asks for at a time

// sqrt(softplus(logit)), as SGLang's router has it for this family.
SGL_DEVICE float moe_score(float logit) {
  return dialect::square_root(logit > 20.0f ? logit : dialect::log1p(dialect::exp(logit)));
}

// Orders biased scores: NaN as +infinity; never 0.
SGL_DEVICE uint32_t moe_rank(float biased) {
  return rank_key(biased != biased ? dialect::bits_to_float(0x7f800000u) : biased);
}

// A row's logits, in s.scores(), and in p.out_logits where it is there; partial sums are added in the order of K. Lane l has experts 4 l .. 4 l + 3
// of each 128. Entry: all lanes. Ends with a warp barrier.
SGL_DEVICE void await_moe_logits(const FusedMoeParams& p, const MoeShared& s, const MoeWords& words, int32_t row, bool is_rehearsal) {
  const int32_t lane = dialect::thread_idx() % 32, num_experts = p.geometry.num_experts, splits = abi::moe_splits(p.geometry);
  const uint32_t* const begin = words.logits() + row * num_experts + lane * 4;
  uint32_t word[kLogitSplits][kLogitVectors][4];
  sync::wait_until(
      fault_sink(p), abi::kFaultEdgeDeadline, 0, abi::kMoeEdgeLogits, static_cast<uint32_t>(row * num_experts + lane * 4),
      [&] {
        uint32_t largest = 0;
SGL_UNROLL
        for (int32_t i = 0; i < kLogitSplits; ++i) {
SGL_UNROLL
          for (int32_t v = 0; v < kLogitVectors; ++v) {
            word[i][v][0] = word[i][v][1] = word[i][v][2] = word[i][v][3] = 0u;
            if (i < splits && v * 128 + lane * 4 < num_experts) dialect::load_words(word[i][v], begin + i * p.rows * num_experts + v * 128);
          }
        }
SGL_UNROLL
        for (int32_t i = 0; i < kLogitSplits; ++i) {
SGL_UNROLL
          for (int32_t v = 0; v < kLogitVectors; ++v) largest = sync::max_word(largest, sync::largest_word(word[i][v]));
        }
        return largest != abi::kUnwritten || is_rehearsal || dialect::planted(dialect::Planted::kMissingAwait);
      },
      [] { return abi::kUnwritten; });
SGL_UNROLL
  for (int32_t v = 0; v < kLogitVectors; ++v) {
SGL_UNROLL
    for (int32_t j = 0; j < 4; ++j) {
      const int32_t expert = v * 128 + lane * 4 + j;
      float sum = 0.0f;
SGL_UNROLL
      for (int32_t i = 0; i < kLogitSplits; ++i) sum += dialect::bits_to_float(word[i][v][j]);
      if (expert >= num_experts) continue;
      s.scores()[expert] = sum;
      if (p.out_logits != nullptr && !is_rehearsal) dialect::store_plain(p.out_logits + row * num_experts + expert, sum);
    }
  }
  dialect::sync_warp();
}

// Row `row` chooses top_k experts by score + bias, descending, equal ones by id, ascending; weights are scores over their sum, scaled.
// Hands the choices to all blocks. Entry: all lanes of the router warp.
SGL_DEVICE void choose_moe_row(const FusedMoeParams& p, const MoeShared& s, const MoeWords& words, int32_t row, bool is_rehearsal) {
  const int32_t lane = dialect::thread_idx() % 32, num_experts = p.geometry.num_experts, top_k = p.geometry.top_k;
  const bool is_live = p.num_live_rows == nullptr || row < dialect::load_plain(p.num_live_rows);
  const bool is_alt = p.bias_alt != nullptr && dialect::load_plain(reinterpret_cast<const uint64_t*>(p.token_ids) + row) ==
                                                   static_cast<uint64_t>(p.alt_token_id);
  const float* const bias = is_alt ? p.bias_alt : p.bias;
  // By expert, while nobody needs the row bits: biases, asked for before the logits are there, and then keys.
  uint32_t* const keys = s.row_bits();
SGL_UNROLL
  for (int32_t w = 0; w < abi::kExpertWords; ++w) {
    if (w * 32 + lane < num_experts) keys[w * 32 + lane] = dialect::float_to_bits(dialect::load_constant(bias + w * 32 + lane));
  }
  await_moe_logits(p, s, words, row, is_rehearsal);
SGL_NO_UNROLL
  for (int32_t first = lane; first < num_experts; first += kScoreBatch * 32) {
    float score[kScoreBatch];
SGL_UNROLL
    for (int32_t w = 0; w < kScoreBatch; ++w) score[w] = moe_score(first + w * 32 < num_experts ? s.scores()[first + w * 32] : 0.0f);
SGL_UNROLL
    for (int32_t w = 0; w < kScoreBatch; ++w) {
      const int32_t expert = first + w * 32;
      if (expert >= num_experts) continue;
      s.scores()[expert] = score[w];
      keys[expert] = moe_rank(dialect::add_rounded(score[w], dialect::bits_to_float(keys[expert])));
    }
  }
  uint32_t key[abi::kExpertWords];  // of expert w * 32 + lane; 0: there is none, or it is chosen
SGL_UNROLL
  for (int32_t w = 0; w < abi::kExpertWords; ++w) key[w] = w * 32 + lane < num_experts ? keys[w * 32 + lane] : 0u;
  dialect::sync_warp();
  uint32_t id = abi::kMoeNoExpert;
  float weight = 0.0f;
SGL_NO_UNROLL
  for (int32_t k = 0; k < top_k; ++k) {
    uint32_t best = 0;
SGL_UNROLL
    for (int32_t w = 0; w < abi::kExpertWords; ++w) best = sync::max_word(best, key[w]);
    best = dialect::reduce_max(best);  // top_k <= num_experts: not 0
    uint32_t lowest = kNoExpert, highest = 0;
SGL_UNROLL
    for (int32_t w = abi::kExpertWords - 1; w >= 0; --w) {
      lowest = key[w] == best ? static_cast<uint32_t>(w * 32) + lane : lowest;
      if (dialect::planted(dialect::Planted::kTieToHigherId) && key[w] == best) highest = sync::max_word(highest, w * 32 + lane);
    }
    const uint32_t winner = dialect::planted(dialect::Planted::kTieToHigherId) ? dialect::reduce_max(highest) : dialect::reduce_min(lowest);
    if (lane == k) {
      id = winner;
      weight = s.scores()[winner];
    }
SGL_UNROLL
    for (int32_t w = 0; w < abi::kExpertWords; ++w) key[w] = winner - lane == static_cast<uint32_t>(w * 32) ? 0u : key[w];
  }
  const float sum = warp_sum(weight);  // of lanes without a choice 0
  if (top_k > 1) weight = dialect::divide_full(weight, dialect::add_rounded(sum, kMoeSumEpsilon));
  weight = dialect::multiply_rounded(weight, p.routed_scaling);
  if (lane >= top_k || is_rehearsal) return;
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

// ids and weights of all rows, from the blocks that chose; in a rehearsal nobody chooses. Entry: all lanes of the router warp. Ends with a warp
// barrier.
SGL_DEVICE void await_moe_choices(const FusedMoeParams& p, const MoeShared& s, const MoeWords& words, bool is_rehearsal) {
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
          return is_complete || is_rehearsal;
        },
        [] { return abi::kUnwritten; });
SGL_UNROLL
    for (int32_t u = 0; u < kChoiceBatch; ++u) {
      if (first + u * 32 < count) {
        s.ids()[first + u * 32] = is_rehearsal ? abi::kMoeNoExpert : choice[u][0];
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

// Jobs and pairs in the order of experts, an expert's pairs in the order of rows. Each lane has consecutive experts, then every 32nd choice. Entry:
// all lanes of the router warp. Ends with a warp barrier.
SGL_DEVICE void make_moe_jobs(const FusedMoeParams& p, const MoeShared& s) {
  constexpr uint32_t kJob = 1u << 16;  // sums of jobs above, of pairs below
  const int32_t lane = dialect::thread_idx() % 32, num_experts = p.geometry.num_experts, top_k = p.geometry.top_k;
  const int32_t share = abi::moe_ceil_div(num_experts, 32), begin = lane * share;
  const int32_t end = begin + share < num_experts ? begin + share : num_experts;
  const auto count_of = [&](int32_t expert) {
    return dialect::popcount(s.row_bits()[expert]) + dialect::popcount(s.row_bits()[num_experts + expert]);
  };
  static_assert(abi::kMoeRowWords == 2, "count_of");
  uint32_t own = 0;
  for (int32_t expert = begin; expert < end; ++expert) {
    const int32_t count = count_of(expert);
    own += static_cast<uint32_t>(abi::moe_ceil_div(count, abi::kMoeColumns)) * kJob + static_cast<uint32_t>(count);
  }
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
    s.bases()[expert] = pair;
SGL_NO_UNROLL
    for (int32_t done = 0; done < count; done += abi::kMoeColumns) {
      s.job_expert()[job] = expert;
      s.job_first()[job] = pair + done;
      s.job_count()[job] = count - done < abi::kMoeColumns ? count - done : abi::kMoeColumns;
      ++job;
    }
    pair += count;
  }
  dialect::sync_warp();
SGL_NO_UNROLL
  for (int32_t i = lane; i < p.rows * top_k; i += 32) {
    const uint32_t id = s.ids()[i];
    int32_t own_pair = -1;
    if (id != abi::kMoeNoExpert) {
      const int32_t row = i / top_k, expert = static_cast<int32_t>(id);
      const uint32_t below = (1u << row % 32) - 1u, low = s.row_bits()[expert], high = s.row_bits()[num_experts + expert];
      own_pair = s.bases()[expert] + dialect::popcount(row < 32 ? low & below : low) + (row < 32 ? 0 : dialect::popcount(high & below));
      s.pair_rows()[own_pair] = row;
    }
    s.pairs()[i] = own_pair;
  }
  if (lane < 2) {
    const int32_t op = lane == 0 ? abi::kMoeGateUp : abi::kMoeDown;
    s.state()->units[op] = moe_unit_range(p, op, s.state()->num_jobs);
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
  for (int32_t pass = 0; pass < 2; ++pass) {
    const bool is_rehearsal = pass == 0;
SGL_NO_UNROLL
    for (int32_t row = dialect::grid_dim() - 1 - dialect::block_idx(); row < p.rows; row += dialect::grid_dim()) {
      choose_moe_row(p, s, words, row, is_rehearsal);
      dialect::sync_warp();
      if (is_rehearsal) break;
    }
    await_moe_choices(p, s, words, is_rehearsal);
    make_moe_row_bits(p, s);
    make_moe_jobs(p, s);
  }
  // Pairs with the waits of the producer and of the consumers: all that the warp has written, which sync_warp has handed to this lane.
  if (dialect::thread_idx() % 32 == 0) dialect::mbarrier_arrive(s.routed());
  clear_moe_words(p, s);
}

}  // namespace sgl_lowlatency::stages
