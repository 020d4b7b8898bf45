// The routing of a MoE layer, made by every block for itself from the router's logits: the same words, the same arithmetic, the same choices.
// What follows from it is index arithmetic on shared memory, and nobody is told anything but the producer warp.
#pragma once
#include "sgl_lowlatency/stages/bitmap_routing.hpp"
#include "sgl_lowlatency/stages/generations.hpp"

namespace sgl_lowlatency::stages {

// A MoeLayout in the block's shared memory. Entry: behind route_rows; of the producer, behind the layer's phase of Shared::routed.
struct MoeWork {
  const abi::MoeLayout& at;
  char* base;
  SGL_DEVICE Routing routing() const { return {at.routing, base}; }
  SGL_DEVICE int32_t* first_pairs() const { return reinterpret_cast<int32_t*>(base + at.first_pairs); }
  SGL_DEVICE float* pair_weights() const { return reinterpret_cast<float*>(base + at.pair_weights); }
  SGL_DEVICE int32_t num_active() const { return routing().active()->count; }
  SGL_DEVICE int32_t expert(int32_t place) const { return routing().experts()[place]; }
};
SGL_DEVICE MoeWork moe_work(const DecodeStepParams& p, const Shared& s) { return {p.moe, s.panel() - p.moe.total_bytes}; }

// Rows of a set below `row`: the index of a row among those of its expert.
SGL_DEVICE int32_t rows_below(uint32_t row_bits, int32_t row) { return dialect::popcount(row_bits & ((1u << row) - 1u)); }

// first_pairs: the active experts' numbers of rows, summed up. Entry: one warp, the places are there.
SGL_DEVICE void count_pairs(const MoeWork& work) {
  const int32_t lane = dialect::thread_idx() % 32, num_active = work.num_active();
  uint32_t before = 0;
  if (lane == 0) work.first_pairs()[0] = 0;
SGL_NO_UNROLL
  for (int32_t begin = 0; begin < num_active; begin += 32) {
    const int32_t place = begin + lane;
    uint32_t sum = place < num_active ? static_cast<uint32_t>(dialect::popcount(work.routing().row_bits()[work.expert(place)])) : 0u;
SGL_UNROLL
    for (int32_t span = 1; span < 32; span *= 2) {
      const uint32_t lower = dialect::shuffle(sum, lane >= span ? lane - span : lane);
      if (lane >= span) sum += lower;
    }
    sum += before;
    if (place < num_active) work.first_pairs()[place + 1] = static_cast<int32_t>(sum);
    before = dialect::shuffle(sum, 31);
  }
}

// Hands out what a row was given and what it chose, plainly, since nobody reads it before the launch ends. pairs: words of two logits, as in
// route_rows. Entry: all lanes of the row's warp, behind choose_experts.
template <int32_t kWords>
SGL_DEVICE void keep_row(const DecodeStepParams& p, const Routing& r, int32_t layer, int32_t row, const uint32_t (&pairs)[kWords]) {
  if (p.routed_ids == nullptr || dialect::block_idx() != 0) return;
  const int32_t lane = dialect::thread_idx() % 32, num_experts = p.geometry.num_experts, top_k = p.geometry.top_k;
  const int64_t number = static_cast<int64_t>(layer) * p.rows + row;
  if (lane < top_k) dialect::store_plain(p.routed_ids + number * top_k + lane, r.ids()[row * top_k + lane]);
  uint32_t* const logits = reinterpret_cast<uint32_t*>(p.routed_logits + number * num_experts);
SGL_UNROLL
  for (int32_t w = 0; w < kWords; ++w) {
    if (lane % 2 == 0 && w * 32 + lane < num_experts) dialect::store_plain(logits + w * 16 + lane / 2, pairs[w]);
  }
}

// Rows that pad the step choose nothing: no expert is read for their sake, and the MLP half leaves their stream as it is.
// num_experts <= 32 kWords. Waits for the logits of every router tile: of all that a layer hands over, the one thing that each block needs whole.
// Entry: all consumer threads; the block's reads of the last layer's routing are done. Ends with a consumer barrier.
template <int32_t kWords>
SGL_DEVICE void route_rows(const DecodeStepParams& p, const Shared& s, int32_t layer) {
  const MoeWork work = moe_work(p, s);
  const Routing r = work.routing();
  const int32_t thread = dialect::thread_idx(), warp = thread / 32, lane = thread % 32;
  const int32_t num_experts = p.geometry.num_experts, top_k = p.geometry.top_k;
  const sync::Awaited logits = awaited(p, s, layer, abi::router_logits_at(p.geometry, p.at, p.rows), abi::kEdgeRouter);
SGL_NO_UNROLL
  for (int32_t row = warp; row < p.rows; row += abi::kNumConsumerWarps) {
    // Lane l has the experts l, l + 32, ..; a word has two experts. All of a lane's words are under way at a time.
    uint32_t pairs[kWords];
    const int32_t first = row * (num_experts / 2) + lane / 2;
SGL_UNROLL
    for (int32_t w = 0; w < kWords; ++w) pairs[w] = w * 32 + lane < num_experts ? abi::kUnwritten : 0u;
    sync::wait_until(
        fault_sink(p), abi::kFaultEdgeDeadline, logits.layer, logits.edge, static_cast<uint32_t>(first),
        [&] {
          uint32_t largest = 0;
SGL_UNROLL
          for (int32_t w = 0; w < kWords; ++w) {
            if (pairs[w] == abi::kUnwritten) {
              uint32_t word[1];
              dialect::load_words(word, logits.buffer + first + w * 16);
              pairs[w] = word[0];
            }
            largest = sync::max_word(largest, pairs[w]);
          }
          return largest != abi::kUnwritten || dialect::planted(dialect::Planted::kMissingAwait);
        },
        [] { return abi::kUnwritten; });
    if (s.rows()->row[row].slot == abi::kPaddingSlot) {
      choose_nothing(r, row, top_k);
    } else {
      choose_experts<kWords, true>(r, row, num_experts, top_k, p.geometry.norm_topk_prob != 0, [&](int32_t w) {
        return lane % 2 == 0 ? low_float(pairs[w]) : high_float(pairs[w]);
      });
    }
    keep_row(p, r, layer, row, pairs);
  }
  sync_consumers();  // the choices of all rows
  place_experts<kWords>(r, p.rows, num_experts, top_k, warp, abi::kNumConsumerWarps);
  sync_consumers();  // places
  // Pairs with the producer's wait (produce_moe_weights): the active experts are there. With the last stage of the layer, which it fills after
  // its last look at them and which this block waits for, they are the consumers' again.
  if (thread == 0) dialect::mbarrier_arrive(s.routed());
  if (warp == 0) count_pairs(work);
  sync_consumers();  // first_pairs
SGL_NO_UNROLL
  for (int32_t row = warp; row < p.rows; row += abi::kNumConsumerWarps) {
    const int32_t i = row * top_k + lane;
    if (lane < top_k && r.ids()[i] >= 0) work.pair_weights()[work.first_pairs()[r.places()[i]] + rows_below(r.row_bits()[r.ids()[i]], row)] = r.weights()[i];
  }
  sync_consumers();  // pair_weights
}

}  // namespace sgl_lowlatency::stages
