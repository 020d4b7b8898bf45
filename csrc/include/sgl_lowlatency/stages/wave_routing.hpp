// Which experts each row takes, by waves of 64: what bitmap_routing does with warps of 32 (the same rule of choice), and the order of the experts'
// work. Every workgroup routes all rows for itself.
#pragma once
#include "sgl_lowlatency/stages/rank_key.hpp"
#include "sgl_lowlatency/stages/wave_rows.hpp"

namespace sgl_lowlatency::stages {

constexpr int32_t kExpertSets = abi::kMaxMonoExperts / abi::kWaveSize;  // of 64 experts: expert e is bit e % 64 of set e / 64

// An expert's place is its index among the active ones, ascending. A pair is a row and one of its experts; pairs are numbered by place, those of one
// expert by row: pair = first_pairs[place] + population count of the expert's row_bits below the row.
struct MonoRouting {
  uint64_t chosen[abi::kMaxMonoRows][kExpertSets];  // each row's set of experts
  int32_t ids[abi::kMaxMonoRows][abi::kMaxMonoTopK];      // by rank
  float weights[abi::kMaxMonoRows][abi::kMaxMonoTopK];
  uint32_t sums[kExpertSets];  // of a set: active experts, and their pairs in the upper half
  int32_t experts[abi::kMaxMonoExperts];    // by place: the expert's id
  uint32_t row_bits[abi::kMaxMonoExperts];  // by place: bit r: row r has chosen the expert
  int32_t first_pairs[abi::kMaxMonoExperts + 1];  // by place: the pairs of the experts before
  int32_t num_active;
};
static_assert(sizeof(MonoRouting) <= abi::kMonoRoutingBytes, "mono_smem reserves as much");

template <abi::Isa kIsa>
SGL_DEVICE MonoRouting* routing_of(const MonoShared<kIsa>& s) { return reinterpret_cast<MonoRouting*>(s.routing()); }

// Number of the row among those of an expert.
SGL_DEVICE int32_t rows_below(uint32_t row_bits, int32_t row) { return dialect::popcount(row_bits & ((1u << row) - 1u)); }

template <class Combine>
SGL_DEVICE uint32_t wave_reduce(uint32_t value, const Combine& combine) {
SGL_UNROLL
  for (int32_t mask = 32; mask > 0; mask /= 2) value = combine(value, dialect::shuffle(value, lane_idx() ^ mask));
  return value;
}
// In one order: results repeat bit by bit.
SGL_DEVICE float wave_sum(float value) {
SGL_UNROLL
  for (int32_t mask = 32; mask > 0; mask /= 2) value += dialect::shuffle_xor(value, mask);
  return value;
}

// Row `row` chooses top_k experts: by logit, descending, equal ones by id, ascending; weights are softmax probabilities over all experts. Lane l has
// the experts l, l + 64, ... Entry: all lanes of the row's wave.
SGL_DEVICE void choose_row(const MonoLaunch& l, MonoRouting* r, int32_t row) {
  const abi::Geometry& g = l.geometry;
  const int32_t lane = lane_idx();
  const sync::Awaited source = awaited(l, l.at.logits, abi::kEdgeRouter);
  float score[kExpertSets];
  uint32_t key[kExpertSets], largest = 0;
SGL_UNROLL
  for (int32_t w = 0; w < kExpertSets; ++w) {
    const int32_t expert = w * abi::kWaveSize + lane;
    score[w] = 0.0f;
    key[w] = 0;  // there is none, or it is chosen
    if (expert < g.num_experts) {
      uint32_t pair[1];
      sync::await_words(edge_sink(l), source, (static_cast<int64_t>(row) * g.num_experts + expert) / 2, pair);
      score[w] = lane % 2 == 0 ? low_float(pair[0]) : high_float(pair[0]);
      key[w] = rank_key(score[w]);
    }
    largest = key[w] > largest ? key[w] : largest;
  }
  const auto larger = [](uint32_t a, uint32_t b) { return a > b ? a : b; };
  const auto smaller = [](uint32_t a, uint32_t b) { return a < b ? a : b; };
  const float maximum = ranked_logit(wave_reduce(largest, larger));
  float sum = 0.0f;
SGL_UNROLL
  for (int32_t w = 0; w < kExpertSets; ++w) {
    score[w] = key[w] != 0 ? dialect::exp2((score[w] - maximum) * kLog2e) : 0.0f;
    sum += score[w];
  }
  sum = wave_sum(sum);
  int32_t id = -1;
  float weight = 0.0f;
  uint32_t taken = 0;  // bit w: the lane's expert of set w
SGL_NO_UNROLL
  for (int32_t k = 0; k < g.top_k; ++k) {
    uint32_t best = 0, best_set = 0;
    float best_score = 0.0f;
SGL_UNROLL
    for (int32_t w = 0; w < kExpertSets; ++w) {
      const bool is_better = dialect::planted(dialect::Planted::kTieToHigherId) ? key[w] != 0 && key[w] >= best : key[w] > best;
      best = is_better ? key[w] : best;
      best_set = is_better ? w : best_set;
      best_score = is_better ? score[w] : best_score;
    }
    const uint32_t candidate = best == wave_reduce(best, larger) ? best_set * abi::kWaveSize + lane : kNoExpert;
    const uint32_t winner = dialect::planted(dialect::Planted::kTieToHigherId)
                                ? wave_reduce(candidate == kNoExpert ? 0u : candidate, larger)
                                : wave_reduce(candidate, smaller);
    const float winner_score = dialect::shuffle(best_score, static_cast<int32_t>(winner % abi::kWaveSize));
    if (lane == k) {
      id = static_cast<int32_t>(winner);
      weight = winner_score;
    }
SGL_UNROLL
    for (int32_t w = 0; w < kExpertSets; ++w) {
      if (winner != static_cast<uint32_t>(w * abi::kWaveSize + lane)) continue;
      key[w] = 0;
      taken |= 1u << w;
    }
  }
  weight = dialect::divide(weight, sum);
  if (g.norm_topk_prob != 0) {
    const float total = wave_sum(weight);
    if (total > 0.0f) weight = dialect::divide(weight, total);
  }
  if (lane < g.top_k) {
    r->ids[row][lane] = id;
    r->weights[row][lane] = weight;
  }
SGL_UNROLL
  for (int32_t w = 0; w < kExpertSets; ++w) {
    const uint64_t set = dialect::ballot((taken >> w & 1u) != 0);
    if (lane == 0) r->chosen[row][w] = set;
  }
}

// The routing of a step. routed_ids: [rows, top_k], gets the experts, or null. Entry: all threads. Ends with a barrier.
template <abi::Isa kIsa>
SGL_DEVICE void route_step(const MonoLaunch& l, const MonoShared<kIsa>& s, int32_t* routed_ids) {
  MonoRouting* const r = routing_of(s);
  const int32_t wave = wave_idx(), lane = lane_idx(), thread = dialect::thread_idx(), top_k = l.geometry.top_k;
SGL_NO_UNROLL
  for (int32_t row = wave; row < l.rows; row += abi::kMonoWaves) choose_row(l, r, row);
  if (!dialect::planted(dialect::Planted::kUnsyncedChoices)) dialect::sync_shared();  // the choices of all rows
  if (routed_ids != nullptr && dialect::block_idx() == 0 && thread < l.rows * top_k) {
    dialect::store_plain(routed_ids + thread, r->ids[thread / top_k][thread % top_k]);
  }
  // A wave places the experts of one set.
  uint32_t bits = 0, own = 0, upto = 0;
  if (wave < kExpertSets) {
SGL_NO_UNROLL
    for (int32_t row = 0; row < l.rows; ++row) bits |= static_cast<uint32_t>(r->chosen[row][wave] >> lane & 1u) << row;
    own = bits == 0 ? 0u : 1u | static_cast<uint32_t>(dialect::popcount(bits)) << 16;
    upto = own;
SGL_UNROLL
    for (int32_t step = 1; step < abi::kWaveSize; step *= 2) {
      const uint32_t before = dialect::shuffle(upto, lane >= step ? lane - step : lane);
      if (lane >= step) upto += before;
    }
    if (lane == abi::kWaveSize - 1) r->sums[wave] = upto;
  }
  dialect::sync_shared();  // sums
  if (wave < kExpertSets) {
    uint32_t begin = 0;
    for (int32_t w = 0; w < wave; ++w) begin += r->sums[w];
    begin += upto - own;
    if (bits != 0) {
      const uint32_t place = begin & 0xffffu;
      r->experts[place] = wave * abi::kWaveSize + lane;
      r->row_bits[place] = bits;
      r->first_pairs[place] = static_cast<int32_t>(begin >> 16);
    }
  }
  if (thread == 0) {
    uint32_t all = 0;
    for (int32_t w = 0; w < kExpertSets; ++w) all += r->sums[w];
    r->num_active = static_cast<int32_t>(all & 0xffffu);
    r->first_pairs[all & 0xffffu] = static_cast<int32_t>(all >> 16);
  }
  dialect::sync_shared();  // places
}

}  // namespace sgl_lowlatency::stages
