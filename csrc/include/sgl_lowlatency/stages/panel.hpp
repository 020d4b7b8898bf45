// The activation panel: the B operand [rows, k1 - k0] bf16 in shared memory, read by every tile of an operation.
#pragma once
#include "sgl_lowlatency/stages/generations.hpp"
#include "sgl_lowlatency/stages/weight_ring.hpp"

namespace sgl_lowlatency::stages {

SGL_DEVICE float low_float(uint32_t pair) { return dialect::to_float(bf16{static_cast<uint16_t>(pair & 0xffffu)}); }
SGL_DEVICE float high_float(uint32_t pair) { return dialect::to_float(bf16{static_cast<uint16_t>(pair >> 16)}); }
SGL_DEVICE uint32_t pack_bf16(float low, float high) {
  return static_cast<uint32_t>(dialect::to_bf16(low).bits) | static_cast<uint32_t>(dialect::to_bf16(high).bits) << 16;
}

// Warps that share one row of the panel: 8, 4, 2, 1 for 1, 2, 3..4, 5 and more rows.
SGL_DEVICE int32_t warps_per_row(int32_t rows) { return rows == 1 ? 8 : rows == 2 ? 4 : rows <= 4 ? 2 : 1; }

// Vectors of 8 bf16 of one row that a thread loads at a time: numbers first, first + stride, ... below num_vecs.
constexpr int32_t kPanelUnroll = 8;
constexpr int32_t kPanelLead = 2;  // vectors that a thread polls while it waits; the rest follows once these are there
struct PanelBatch {
  uint32_t v[kPanelUnroll][4];
};

// is_lead: the producers may still be at work. Few polls a thread then: thousands of threads poll, while others stream weights.
SGL_DEVICE void await_batch(const DecodeStepParams& p, const sync::Awaited& of, int64_t row_begin, int32_t first, int32_t stride, int32_t num_vecs,
                            bool is_lead, PanelBatch& batch) {
  const uint32_t* const words = of.buffer + row_begin;
  const sync::FaultSink sink = fault_sink(p);
  const bool skips_wait = dialect::planted(dialect::Planted::kMissingAwait);
  const int32_t count = (num_vecs - first + stride - 1) / stride;
SGL_UNROLL
  for (int32_t u = 0; u < kPanelUnroll; ++u) batch.v[u][0] = batch.v[u][1] = batch.v[u][2] = batch.v[u][3] = 0u;
  const auto load = [&](int32_t u) {
    if (u < count) dialect::load_words(batch.v[u], words + (first + u * stride) * 4);
  };
  if (is_lead) {
    sync::wait_until(
        sink, abi::kFaultEdgeDeadline, of.layer, of.edge, static_cast<uint32_t>(row_begin + first * 4),
        [&] {
          uint32_t largest = 0;
SGL_UNROLL
          for (int32_t u = 0; u < kPanelLead; ++u) load(u);
SGL_UNROLL
          for (int32_t u = 0; u < kPanelLead; ++u) largest = sync::max_word(largest, sync::largest_word(batch.v[u]));
          return largest != abi::kUnwritten || skips_wait;
        },
        [] { return abi::kUnwritten; });
  }
SGL_UNROLL
  for (int32_t u = 0; u < kPanelUnroll; ++u) {
    if (u >= kPanelLead || !is_lead) load(u);  // the lead is there
  }
  sync::wait_until(
      sink, abi::kFaultEdgeDeadline, of.layer, of.edge, static_cast<uint32_t>(row_begin + first * 4),
      [&] {
        uint32_t largest = 0;
SGL_UNROLL
        for (int32_t u = 0; u < kPanelUnroll; ++u) {
          const uint32_t of_vector = sync::largest_word(batch.v[u]);
          if (of_vector == abi::kUnwritten) load(u);
          largest = sync::max_word(largest, of_vector);
        }
        return largest != abi::kUnwritten || skips_wait;
      },
      [] { return abi::kUnwritten; });
}

// Copies columns [k0, k1) of each row of `source`, as they arrive. row_words: words from one row to the next.
// Entry: all consumer threads; the panel is free. A consumer barrier must follow.
SGL_DEVICE void load_panel(const DecodeStepParams& p, const Shared& s, const sync::Awaited& source, int32_t row_words, int32_t k_panel, int32_t k0,
                           int32_t k1) {
  constexpr int32_t kVec = 8;
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32;
  const int32_t segments = warps_per_row(p.rows), segment = warp % segments;
  const int32_t pitch = abi::panel_row_bytes(k_panel), stride = segments * 32, num_vecs = (k1 - k0) / kVec;
  bool is_lead = true;
  for (int32_t row = warp / segments; row < p.rows; row += abi::kNumConsumerWarps / segments) {
    Vec16* const out = reinterpret_cast<Vec16*>(s.panel() + row * pitch);
    for (int32_t first = segment * 32 + lane; first < num_vecs; first += stride * kPanelUnroll) {
      PanelBatch x;
      await_batch(p, source, static_cast<int64_t>(row) * row_words + k0 / 2, first, stride, num_vecs, is_lead, x);
      is_lead = false;
SGL_UNROLL
      for (int32_t u = 0; u < kPanelUnroll; ++u) {
        if (first + u * stride < num_vecs) out[first + u * stride] = Vec16{{x.v[u][0], x.v[u][1], x.v[u][2], x.v[u][3]}};
      }
    }
  }
}

}  // namespace sgl_lowlatency::stages
