// The router warp of a fused_moe block: choices of the rows it owns, then all rows' choices, and from their bitmaps the jobs that weights are
// streamed for; behind that, where the launch has streams, their mix. kernels/nvidia/fused_moe/DESIGN.md has the rule of choice.
#pragma once
#include "sgl_lowlatency/stages/bitmap_routing.hpp"
#include "sgl_lowlatency/stages/await_vectors.hpp"
#include "sgl_lowlatency/stages/fused_moe_post.hpp"
#include "sgl_lowlatency/stages/hyper_mix.hpp"

namespace sgl_lowlatency::stages {

constexpr float kMoeSumEpsilon = 1e-20f;  // beside the sum of a row's scores
constexpr int32_t kLogitSplits = 5;       // partial sums of a row's logits that a lane asks for at a time: all of 5,120 columns
constexpr int32_t kChoiceBatch = 4;       // choices that a lane asks for at a time

// sqrt(softplus(logit)), as SGLang's router has it for this family, within 5e-7; in few instructions, since every row's experts wait for one warp.
// log(1 + e^x) is max(x, 0) + log(1 + e) with e = e^-|x|: of a small e the begin of its series, which 1 + e would round away.
SGL_DEVICE float moe_score(float logit) {
  const float e = dialect::exp2((logit < 0.0f ? logit : -logit) * kLog2e);
  const float small = e * (1.0f + e * (-1.0f / 2 + e * (1.0f / 3 + e * (-1.0f / 4 + e * (1.0f / 5)))));
  const float rest = e < 1.0f / 16 ? small : dialect::log2(1.0f + e) * (1.0f / kLog2e);
  return dialect::square_root((logit > 0.0f ? logit : 0.0f) + rest);
}

// Orders biased scores: NaN as +infinity; never 0.
SGL_DEVICE uint32_t moe_rank(float biased) {
  return rank_key(biased != biased ? dialect::bits_to_float(0x7f800000u) : biased);
}

// A lane's experts come in fours: word 4 v + j of it is expert (32 v + lane) 4 + j.
SGL_DEVICE int32_t moe_expert(int32_t word) { return (word / 4 * 32 + dialect::thread_idx() % 32) * 4 + word % 4; }

// A row's logits, of each lane its experts'; partial sums are added in the order of K. kLogitSplits of them are asked for at a time, for all experts.
// Entry: all lanes. Ends with a warp barrier.
SGL_DEVICE void await_moe_logits(const FusedMoeParams& p, const MoeWords& words, int32_t row, float (&logits)[abi::kExpertWords]) {
  constexpr int32_t kVectors = abi::kExpertWords / 4;
  static_assert(abi::kExpertWords % 4 == 0, "whole vectors");
  const int32_t num_experts = p.geometry.num_experts, splits = abi::moe_splits(p.geometry);
SGL_UNROLL
  for (int32_t w = 0; w < abi::kExpertWords; ++w) logits[w] = 0.0f;
SGL_NO_UNROLL
  for (int32_t first = 0; first < splits; first += kLogitSplits) {
    uint32_t part[kLogitSplits * kVectors][4];
    const auto is_there = [&](int32_t i) { return first + i / kVectors < splits && moe_expert(i % kVectors * 4) < num_experts; };
    await_vectors(fault_sink(p), abi::kMoeEdgeLogits, words.logits(), is_there,
                  [&](int32_t i) { return ((first + i / kVectors) * p.rows + row) * num_experts + moe_expert(i % kVectors * 4); }, part);
SGL_UNROLL
    for (int32_t i = 0; i < kLogitSplits * kVectors; ++i) {
SGL_UNROLL
      for (int32_t j = 0; j < 4; ++j) logits[i % kVectors * 4 + j] += dialect::bits_to_float(part[i][j]);
    }
  }
  dialect::sync_warp();
}

// Nobody has chosen an expert. Entry: all lanes of the router warp. Ends with a warp barrier.
SGL_DEVICE void clear_moe_row_bits(const FusedMoeParams& p, const MoeShared& s) {
  Vec16* const bits = reinterpret_cast<Vec16*>(s.row_bits());
  for (int32_t i = dialect::thread_idx() % 32; i < abi::kMoeRowWords * p.geometry.num_experts / 4; i += 32) bits[i] = Vec16{};
  dialect::sync_warp();
}

// Row `row` chooses top_k experts by score + bias, descending, equal ones by id, ascending; weights are scores over their sum, scaled.
// Hands the choices to all blocks. Entry: all lanes of the router warp; row_bits hold nothing, and hold nothing behind it: meanwhile each lane keeps
// its experts' biases and scores there, so that one short loop makes them, whose code is fetched once.
SGL_DEVICE void choose_moe_row(const FusedMoeParams& p, const MoeShared& s, const MoeWords& words, int32_t row) {
  constexpr int32_t kVectors = abi::kExpertWords / 4;
  const int32_t lane = dialect::thread_idx() % 32, num_experts = p.geometry.num_experts, top_k = p.geometry.top_k;
  const bool is_live = p.num_live_rows == nullptr || row < dialect::load_plain(p.num_live_rows);
  const bool is_alt = p.bias_alt != nullptr && dialect::load_plain(reinterpret_cast<const uint64_t*>(p.token_ids) + row) ==
                                                   static_cast<uint64_t>(p.alt_token_id);
  const float* const bias = is_alt ? p.bias_alt : p.bias;
  uint32_t* const scores = s.row_bits();
  uint32_t* const biases = scores + num_experts;
  uint32_t key[abi::kExpertWords];
SGL_UNROLL
  for (int32_t w = 0; w < abi::kExpertWords; ++w) {  // asked for in front of the wait
    if (moe_expert(w) < num_experts) biases[moe_expert(w)] = dialect::float_to_bits(dialect::load_constant(bias + moe_expert(w)));
  }
  {
    float logits[abi::kExpertWords];
    await_moe_logits(p, words, row, logits);
SGL_UNROLL
    for (int32_t w = 0; w < abi::kExpertWords; ++w) {
      if (moe_expert(w) >= num_experts) continue;
      if (p.out_logits != nullptr) dialect::store_plain(p.out_logits + row * num_experts + moe_expert(w), logits[w]);
      scores[moe_expert(w)] = dialect::float_to_bits(logits[w]);
    }
  }
SGL_NO_UNROLL
  for (int32_t v = 0; v < kVectors; ++v) {  // of the lane's own words
SGL_UNROLL
    for (int32_t j = 0; j < 4; ++j) {
      const int32_t expert = (v * 32 + lane) * 4 + j;
      if (expert >= num_experts) continue;
      const float score = moe_score(dialect::bits_to_float(scores[expert]));
      biases[expert] = moe_rank(dialect::add_rounded(score, dialect::bits_to_float(biases[expert])));
      scores[expert] = dialect::float_to_bits(score);
    }
  }
SGL_UNROLL
  for (int32_t w = 0; w < abi::kExpertWords; ++w) {
    key[w] = moe_expert(w) < num_experts ? biases[moe_expert(w)] : 0u;  // 0: there is none, or it is chosen
  }
  dialect::sync_warp();  // scores are read by others
  uint32_t id = abi::kMoeNoExpert;
SGL_NO_UNROLL
  for (int32_t k = 0; k < top_k; ++k) {
    uint32_t best = key[0];
SGL_UNROLL
    for (int32_t w = 1; w < abi::kExpertWords; ++w) best = sync::max_word(best, key[w]);
    best = dialect::reduce_max(best);  // top_k <= num_experts: not 0
    uint32_t candidate = kNoExpert;
SGL_UNROLL
    for (int32_t w = abi::kExpertWords - 1; w >= 0; --w) {
      if (key[w] != best) continue;
      if (dialect::planted(dialect::Planted::kTieToHigherId) && candidate != kNoExpert) continue;
      candidate = static_cast<uint32_t>(w / 4 * 128 + w % 4 + lane * 4);
    }
    const uint32_t winner = dialect::planted(dialect::Planted::kTieToHigherId) ? dialect::reduce_max(candidate == kNoExpert ? 0u : candidate)
                                                                               : dialect::reduce_min(candidate);
    if (lane == k) id = winner;
SGL_UNROLL
    for (int32_t w = 0; w < abi::kExpertWords; ++w) key[w] = winner - lane * 4 == static_cast<uint32_t>(w / 4 * 128 + w % 4) ? 0u : key[w];
  }
  float weight = lane < top_k ? dialect::bits_to_float(scores[id]) : 0.0f;
  const float sum = warp_sum(weight);
  if (top_k > 1) weight = dialect::divide_full(weight, dialect::add_rounded(sum, kMoeSumEpsilon));
  weight = dialect::multiply_rounded(weight, p.routed_scaling);
  if (!is_live) {
    id = abi::kMoeNoExpert;
    weight = 0.0f;
  }
  if (lane < top_k) {
    uint32_t choice[2] = {id, dialect::float_to_bits(weight)};
    sync::publish(words.choices() + (row * top_k + lane) * 2, choice);
    if (p.out_ids != nullptr) {
      dialect::store_plain(p.out_ids + row * top_k + lane, id == abi::kMoeNoExpert ? -1 : static_cast<int32_t>(id));
      dialect::store_plain(p.out_weights + row * top_k + lane, weight);
    }
  }
  dialect::sync_warp();
  clear_moe_row_bits(p, s);
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
SGL_NO_UNROLL
  for (int32_t row = 0; row < p.rows; ++row) {
    if (lane < top_k) {
      const uint32_t id = s.ids()[row * top_k + lane];
      if (id != abi::kMoeNoExpert) s.row_bits()[row / 32 * num_experts + id] |= 1u << row % 32;
    }
    dialect::sync_warp();
  }
}

// Jobs and pairs in the order of experts, an expert's pairs in the order of rows. Each lane has consecutive experts, and then choices. Entry: all
// lanes of the router warp. Ends with a warp barrier.
SGL_DEVICE void make_moe_jobs(const FusedMoeParams& p, const MoeShared& s) {
  constexpr uint32_t kJob = 1u << 16;  // sums of jobs above, of pairs below
  const int32_t lane = dialect::thread_idx() % 32, num_experts = p.geometry.num_experts, top_k = p.geometry.top_k;
  const int32_t share = abi::moe_ceil_div(num_experts, 32), begin = lane * share;
  static_assert(abi::kMoeRowWords == 2, "two words of an expert's rows");
  int32_t count[abi::kExpertWords];  // of the lane's experts
  uint32_t own = 0;
SGL_UNROLL
  for (int32_t i = 0; i < abi::kExpertWords; ++i) {
    const int32_t expert = begin + i;
    count[i] = 0;
    if (i < share && expert < num_experts) {
      count[i] = dialect::popcount(s.row_bits()[expert]) + dialect::popcount(s.row_bits()[num_experts + expert]);
    }
    own += static_cast<uint32_t>(abi::moe_ceil_div(count[i], abi::kMoeColumns)) * kJob + static_cast<uint32_t>(count[i]);
  }
  uint32_t sum = own;
SGL_UNROLL
  for (int32_t span = 1; span < 32; span *= 2) {
    const uint32_t lower = dialect::shuffle(sum, lane >= span ? lane - span : lane);
    if (lane >= span) sum += lower;
  }
  if (lane == 31) s.state()->num_jobs = static_cast<int32_t>(sum / kJob);
  int32_t job = static_cast<int32_t>((sum - own) / kJob), pair = static_cast<int32_t>((sum - own) % kJob);
SGL_UNROLL
  for (int32_t i = 0; i < abi::kExpertWords; ++i) {
    if (count[i] == 0) continue;
    s.first_pairs()[begin + i] = pair;
SGL_NO_UNROLL
    for (int32_t done = 0; done < count[i]; done += abi::kMoeColumns) {
      s.job_expert()[job] = begin + i;
      s.job_first()[job] = pair + done;
      s.job_count()[job] = count[i] - done < abi::kMoeColumns ? count[i] - done : abi::kMoeColumns;
      ++job;
    }
    pair += count[i];
  }
  dialect::sync_warp();
SGL_NO_UNROLL
  for (int32_t choice = lane; choice < p.rows * top_k; choice += 32) {
    const uint32_t expert = s.ids()[choice];
    const int32_t row = choice / top_k, word = row / 32;
    int32_t own_pair = -1;
    if (expert != abi::kMoeNoExpert) {
      own_pair = s.first_pairs()[expert] + dialect::popcount(s.row_bits()[word * num_experts + expert] & ((1u << row % 32) - 1u));
      if (word > 0) own_pair += dialect::popcount(s.row_bits()[expert]);
      s.pair_rows()[own_pair] = row;
    }
    s.pairs()[choice] = own_pair;
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
  clear_moe_row_bits(p, s);
SGL_NO_UNROLL
  for (int32_t row = dialect::grid_dim() - 1 - dialect::block_idx(); row < p.rows; row += dialect::grid_dim()) choose_moe_row(p, s, words, row);
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
