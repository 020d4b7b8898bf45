// Which experts each row takes, and the places of the experts that are taken: bitmaps, warp reductions and population counts.
// The warps of a block call one of choose_experts and take_choices for every row, then, behind a barrier of theirs, place_experts;
// behind another barrier the Routing may be read. kernels/nvidia/bitmap_routing/DESIGN.md has the rules of choice and the reasons.
#pragma once
#include "sgl_lowlatency/abi/bitmap_routing.hpp"
#include "sgl_lowlatency/stages/rank_key.hpp"
#include "sgl_lowlatency/sync/fault.hpp"

namespace sgl_lowlatency::stages {

// A RoutingLayout at `base`, in shared memory.
struct Routing {
  const abi::RoutingLayout& at;
  char* base;
  SGL_DEVICE abi::ActiveExperts* active() const { return reinterpret_cast<abi::ActiveExperts*>(base + at.active); }
  SGL_DEVICE uint32_t* row_bits() const { return reinterpret_cast<uint32_t*>(base + at.row_bits); }
  SGL_DEVICE int32_t* experts() const { return reinterpret_cast<int32_t*>(base + at.experts); }
  SGL_DEVICE int32_t* ids() const { return reinterpret_cast<int32_t*>(base + at.ids); }
  SGL_DEVICE int32_t* places() const { return reinterpret_cast<int32_t*>(base + at.places); }
  SGL_DEVICE float* weights() const { return reinterpret_cast<float*>(base + at.weights); }
  SGL_DEVICE uint32_t* chosen(int32_t row) const { return reinterpret_cast<uint32_t*>(base + at.chosen) + row * abi::kChosenPitch; }
};

// Of the 32 lanes, in one order: results repeat bit by bit. Entry: all lanes.
SGL_DEVICE float warp_sum(float value) {
SGL_UNROLL
  for (int32_t mask = 16; mask > 0; mask /= 2) value += dialect::shuffle_xor(value, mask);
  return value;
}

// Stores what the row has chosen: of lane k its choice of rank k, of lane w word w of its set. Entry: all lanes.
SGL_DEVICE void keep_choices(const Routing& r, int32_t row, int32_t top_k, int32_t id, float weight, uint32_t word) {
  const int32_t lane = dialect::thread_idx() % 32;
  if (lane < top_k) {
    r.ids()[row * top_k + lane] = id;
    r.weights()[row * top_k + lane] = weight;
  }
  if (lane < abi::kExpertWords) r.chosen(row)[lane] = word;
}

// Row `row` chooses nothing. Entry: all lanes of the row's warp.
SGL_DEVICE void choose_nothing(const Routing& r, int32_t row, int32_t top_k) { keep_choices(r, row, top_k, -1, 0.0f, 0u); }

// Row `row` chooses top_k of num_experts <= 32 kWords experts: by logit, descending, equal ones by id, ascending. Weights are softmax
// probabilities over all experts. Lane l of the warp has the experts l, l + 32, ..; logit(w): fp32, of the lane's expert w * 32 + l, called once for
// each that there is, w a constant (an index into the caller's registers). kIsBf16: all of them are bf16, and one reduction finds a choice.
// Entry: all lanes of the row's warp.
template <int32_t kWords, bool kIsBf16 = false, class Logit>
SGL_DEVICE void choose_experts(const Routing& r, int32_t row, int32_t num_experts, int32_t top_k, bool renormalizes, const Logit& logit) {
  constexpr float kLog2OfE = 1.4426950408889634f;
  const int32_t lane = dialect::thread_idx() % 32;
  float score[kWords];
  uint32_t key[kWords], largest = 0;
SGL_UNROLL
  for (int32_t w = 0; w < kWords; ++w) {
    score[w] = w * 32 + lane < num_experts ? logit(w) : 0.0f;
  }
SGL_UNROLL
  for (int32_t w = 0; w < kWords; ++w) {
    key[w] = w * 32 + lane < num_experts ? rank_key(score[w]) : 0u;  // 0: there is none, or it is chosen
    largest = key[w] > largest ? key[w] : largest;
  }
  const float maximum = ranked_logit(dialect::reduce_max(largest));
  float sum = 0.0f;
SGL_UNROLL
  for (int32_t w = 0; w < kWords; ++w) {
    score[w] = w * 32 + lane < num_experts ? dialect::exp2((score[w] - maximum) * kLog2OfE) : 0.0f;
    sum += score[w];
  }
  sum = warp_sum(sum);

  int32_t id = -1;
  float weight = 0.0f;
  uint32_t word = 0;
  if constexpr (kIsBf16) {
SGL_UNROLL
    for (int32_t w = 0; w < kWords; ++w) key[w] = key[w] == 0 ? 0u : expert_key(key[w], w * 32 + lane);
SGL_NO_UNROLL
    for (int32_t k = 0; k < top_k; ++k) {
      uint32_t best = key[0];
SGL_UNROLL
      for (int32_t w = 1; w < kWords; ++w) best = key[w] > best ? key[w] : best;
      best = dialect::reduce_max(best);
      const int32_t winner = ranked_expert(best);
      if (lane == k) id = winner;
      if (lane == winner / 32) word |= 1u << winner % 32;
SGL_UNROLL
      for (int32_t w = 0; w < kWords; ++w) key[w] = key[w] == best ? 0u : key[w];
    }
SGL_UNROLL
    for (int32_t w = 0; w < kWords; ++w) {
      const float winner_score = dialect::shuffle(score[w], id & 31);
      weight = static_cast<uint32_t>(id) / 32 == static_cast<uint32_t>(w) ? winner_score : weight;
    }
  }
SGL_NO_UNROLL
  for (int32_t k = 0; !kIsBf16 && k < top_k; ++k) {
    uint32_t best = 0, best_word = 0;
    float best_score = 0.0f;
SGL_UNROLL
    for (int32_t w = 0; w < kWords; ++w) {
      const bool is_better = dialect::planted(dialect::Planted::kTieToHigherId) ? key[w] != 0 && key[w] >= best : key[w] > best;
      best = is_better ? key[w] : best;
      best_word = is_better ? w : best_word;
      best_score = is_better ? score[w] : best_score;
    }
    const uint32_t candidate = best == dialect::reduce_max(best) ? best_word * 32 + lane : kNoExpert;  // top_k <= num_experts: best is not 0
    const uint32_t winner = dialect::planted(dialect::Planted::kTieToHigherId) ? dialect::reduce_max(candidate == kNoExpert ? 0u : candidate)
                                                                               : dialect::reduce_min(candidate);
    const float winner_score = dialect::shuffle(best_score, winner % 32);
    if (lane == k) {
      id = static_cast<int32_t>(winner);
      weight = winner_score;
    }
    if (static_cast<uint32_t>(lane) == winner / 32) word |= 1u << winner % 32;
SGL_UNROLL
    for (int32_t w = 0; w < kWords; ++w) key[w] = winner - lane == static_cast<uint32_t>(w * 32) ? 0u : key[w];
  }
  weight = dialect::divide(weight, sum);
  if (renormalizes) {
    const float total = warp_sum(weight);
    if (total > 0.0f) weight = dialect::divide(weight, total);
  }
  keep_choices(r, row, top_k, id, weight, word);
}

// Row `row` has chosen already: ids and weights [top_k], in global memory that the launch in front of this one may have written. An id
// outside -1..num_experts - 1 ends the launch. A row that is not live has chosen nothing, whatever its ids. Entry: all lanes of the row's warp.
SGL_DEVICE void take_choices(const Routing& r, int32_t row, int32_t num_experts, int32_t top_k, bool is_live, const int32_t* ids,
                             const float* weights, const sync::FaultSink& sink, int32_t layer) {
  const int32_t lane = dialect::thread_idx() % 32;
  int32_t id = -1;
  float weight = 0.0f;
  if (is_live && lane < top_k) {
    id = dialect::load_plain(ids + lane);
    if (id < -1 || id >= num_experts) {
      sync::raise_fault(sink.record, sink.rank, abi::kFaultBadExpertId, layer, row, static_cast<uint32_t>(num_experts), static_cast<uint32_t>(id),
                        static_cast<uint64_t>(static_cast<int64_t>(id)));
    }
    if (id >= 0) weight = dialect::load_plain(weights + lane);
  }
  uint32_t word = 0;
SGL_NO_UNROLL
  for (int32_t k = 0; k < top_k; ++k) {
    const uint32_t chosen = dialect::shuffle(static_cast<uint32_t>(id), k);  // -1 is above every word
    if (chosen / 32 == static_cast<uint32_t>(lane)) word |= 1u << chosen % 32;
  }
  keep_choices(r, row, top_k, id, weight, word);
}

// Lane l has row l of a matrix of bits, and gets its column l. Entry: all lanes.
SGL_DEVICE uint32_t transpose_32x32(uint32_t bits) {
  const int32_t lane = dialect::thread_idx() % 32;
  uint32_t kept = 0x0000ffffu;  // bits whose index has not the bit `span`
SGL_UNROLL
  for (int32_t span = 16; span > 0; span /= 2) {
    const uint32_t other = dialect::shuffle(bits, lane ^ span);
    bits = (lane & span) == 0 ? (bits & kept) | (other & kept) << span : (bits & ~kept) | (other & ~kept) >> span;
    kept ^= kept << span / 2;
  }
  return bits;
}

// Experts of the set below `expert`.
template <int32_t kWords>
SGL_DEVICE int32_t count_below(const uint32_t (&set)[kWords], int32_t expert) {
  uint32_t below = (1u << expert % 32) - 1u;
  if (dialect::planted(dialect::Planted::kPlaceCountsItself)) below = below << 1 | 1u;
  int32_t count = 0;
SGL_UNROLL
  for (int32_t w = 0; w < kWords; ++w) count += w > expert / 32 ? 0 : dialect::popcount(w < expert / 32 ? set[w] : set[w] & below);
  return count;
}

// From the rows' choices to everything else of the Routing. num_experts <= 32 kWords.
// Entry: all threads of num_warps warps, of which this is number `warp`, behind a barrier that follows the choices of all rows.
template <int32_t kWords>
SGL_DEVICE void place_experts(const Routing& r, int32_t rows, int32_t num_experts, int32_t top_k, int32_t warp, int32_t num_warps) {
  const int32_t lane = dialect::thread_idx() % 32;
  const auto row_word = [&](int32_t w) { return lane < rows ? r.chosen(lane)[w] : 0u; };
  uint32_t active[kWords];
  int32_t num_active = 0;
SGL_UNROLL
  for (int32_t w = 0; w < kWords; ++w) {
    active[w] = dialect::reduce_or(row_word(w));
    num_active += dialect::popcount(active[w]);
  }
SGL_NO_UNROLL
  for (int32_t w = warp; w < kWords; w += num_warps) {
    uint32_t bits = transpose_32x32(row_word(w));
    const int32_t expert = w * 32 + lane;
    if (expert < num_experts) {
      const int32_t place = count_below(active, expert);
      r.experts()[bits != 0 ? place : num_active + expert - place] = bits != 0 ? expert : -1;
      if (dialect::planted(dialect::Planted::kShiftedRowBits) && expert % 7 == 0) bits <<= 1;
      r.row_bits()[expert] = bits;
    }
  }
SGL_NO_UNROLL
  for (int32_t i = warp * 32 + lane; i < rows * top_k; i += num_warps * 32) {
    const int32_t id = r.ids()[i];
    r.places()[i] = id < 0 ? -1 : count_below(active, id);
  }
  if (warp != 0) return;
  uint32_t word = 0;
SGL_UNROLL
  for (int32_t w = 0; w < kWords; ++w) word = lane == w ? active[w] : word;
  if (lane < abi::kExpertWords) r.active()->words[lane] = word;
  if (lane == 0) r.active()->count = num_active;
  if (lane < 3) r.active()->reserved[lane] = 0;
}

}  // namespace sgl_lowlatency::stages
