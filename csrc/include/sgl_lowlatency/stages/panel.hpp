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

// A vector is 8 bf16. The first ones of a thread are polled: thousands of threads poll, while others stream weights, so they are few. When
// they are there, all others are asked for at once, straight into shared memory, and looked at once they have landed.
constexpr int32_t kPanelLead = 2;
constexpr int32_t kPanelLeadOneRow = 6;  // of a step of one row, which has few

// Vector number v of a panel's row, eight columns. For FP8 weights the columns of each 16 are stored as 0 2, 4 6, 8 10, 12 14, then
// 1 3, 5 7, 9 11, 13 15: as the weights' bytes come out of ldmatrix (WarpTile).
struct alignas(8) Word2 {
  uint32_t x;
  uint32_t y;
};
template <int32_t kElementBytes>
SGL_DEVICE void store_panel_vector(char* row, int32_t v, const uint32_t (&w)[4]) {
  if (kElementBytes == 2) {
    reinterpret_cast<Vec16*>(row)[v] = Vec16{{w[0], w[1], w[2], w[3]}};
    return;
  }
  const auto low = [](uint32_t a, uint32_t b) { return (a & 0xffffu) | b << 16; };
  const auto high = [](uint32_t a, uint32_t b) { return a >> 16 | (b & 0xffff0000u); };
  Word2* const at = reinterpret_cast<Word2*>(row + v / 2 * 32 + v % 2 * 8);
  at[0] = {low(w[0], w[1]), low(w[2], w[3])};
  at[2] = {high(w[0], w[1]), high(w[2], w[3])};
}

// Copies a thread's vectors first, first + stride, ... of one row, kCount at most and below num_vecs, once all of their words are there.
// row_begin: the first word of the row in `of`.
template <int32_t kElementBytes, int32_t kCount>
SGL_DEVICE void copy_vectors(const DecodeStepParams& p, const sync::Awaited& of, int64_t row_begin, int32_t first, int32_t stride, int32_t num_vecs,
                             char* out) {
  uint32_t v[kCount][4];
SGL_UNROLL
  for (int32_t u = 0; u < kCount; ++u) v[u][0] = v[u][1] = v[u][2] = v[u][3] = abi::kUnwritten;
  sync::wait_until(
      fault_sink(p), abi::kFaultEdgeDeadline, of.layer, of.edge, static_cast<uint32_t>(row_begin + first * 4),
      [&] {
        uint32_t largest = 0;
        const uint32_t* at = of.buffer + row_begin + first * 4;
SGL_UNROLL
        for (int32_t u = 0; u < kCount; ++u, at += stride * 4) {
          if (first + u * stride < num_vecs && sync::largest_word(v[u]) == abi::kUnwritten) dialect::load_words(v[u], at);
        }
SGL_UNROLL
        for (int32_t u = 0; u < kCount; ++u) {
          if (first + u * stride < num_vecs) largest = sync::max_word(largest, sync::largest_word(v[u]));
        }
        return largest != abi::kUnwritten || dialect::planted(dialect::Planted::kMissingAwait);
      },
      [] { return abi::kUnwritten; });
SGL_UNROLL
  for (int32_t u = 0; u < kCount; ++u) {
    if (first + u * stride < num_vecs) store_panel_vector<kElementBytes>(out, first + u * stride, v[u]);
  }
}

// Columns [k0, k1) of the rows of an operand, and where they go.
struct PanelPart {
  sync::Awaited source;
  int32_t row_words;  // from one row of the source to the next
  int32_t k0;
  int32_t k1;
  char* panel;
  int32_t pitch;  // bytes from one row of the panel to the next
  int32_t lead;   // vectors that a thread's first row polls for
};

// Calls vector(row, base, is_lead) for every vector number base + lane of the calling warp's rows. All lanes take the same steps.
template <class Vector>
SGL_DEVICE void each_panel_vector(const DecodeStepParams& p, const PanelPart& part, Vector vector) {
  const int32_t warp = dialect::thread_idx() / 32, segments = warps_per_row(p.rows), stride = segments * 32;
  int32_t lead = part.lead;
  for (int32_t row = warp / segments; row < p.rows; row += abi::kNumConsumerWarps / segments) {
    for (int32_t base = warp % segments * 32; base < (part.k1 - part.k0) / 8; base += stride) vector(row, base, lead-- > 0);
    lead = 0;
  }
}

SGL_DEVICE int64_t panel_word(const PanelPart& part, int32_t row, int32_t v) {
  return static_cast<int64_t>(row) * part.row_words + part.k0 / 2 + v * 4;
}

// Waits for the lead and asks for everything else. Entry: all consumer threads; the panel is free.
template <int32_t kElementBytes>
SGL_DEVICE void request_panel(const DecodeStepParams& p, const PanelPart& part) {
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32;
  const int32_t segments = warps_per_row(p.rows), first = warp % segments * 32 + lane, num_vecs = (part.k1 - part.k0) / 8, row = warp / segments;
  if (part.lead > 0 && row < p.rows && first < num_vecs) {
    char* const out = part.panel + row * part.pitch;
    if (part.lead == kPanelLeadOneRow) {
      copy_vectors<kElementBytes, kPanelLeadOneRow>(p, part.source, panel_word(part, row, 0), first, segments * 32, num_vecs, out);
    } else {
      copy_vectors<kElementBytes, kPanelLead>(p, part.source, panel_word(part, row, 0), first, segments * 32, num_vecs, out);
    }
  }
  each_panel_vector(p, part, [&](int32_t of_row, int32_t base, bool is_lead) {
    const int32_t v = base + lane;
    if (is_lead || v >= num_vecs) return;
    dialect::copy_words_async(part.panel + of_row * part.pitch + v * 16, part.source.buffer + panel_word(part, of_row, v));
  });
  dialect::copy_async_commit();
}

// Waits for what request_panel asked for: for the copies, and for the words that they came too early for.
// Entry: all consumer threads. A consumer barrier must follow.
template <int32_t kElementBytes>
SGL_DEVICE void settle_panel(const DecodeStepParams& p, const PanelPart& part) {
  const int32_t lane = dialect::thread_idx() % 32, num_vecs = (part.k1 - part.k0) / 8;
  dialect::copy_async_wait<0>();
  each_panel_vector(p, part, [&](int32_t row, int32_t base, bool is_lead) {
    if (is_lead) return;
    const int32_t v = base + lane;
    char* const out = part.panel + row * part.pitch;
    uint32_t w[4] = {};
    if (v < num_vecs) {
      const Vec16 landed = reinterpret_cast<const Vec16*>(out)[v];
SGL_UNROLL
      for (int32_t i = 0; i < 4; ++i) w[i] = landed.w[i];
      if (!sync::is_written(w)) {
        sync::await_words(fault_sink(p), part.source, panel_word(part, row, v), w);
        // The thread's later ones have most likely arrived meanwhile: one more trip for all that were too early.
        for (int32_t later = v + warps_per_row(p.rows) * 32; later < num_vecs; later += warps_per_row(p.rows) * 32) {
          const Vec16 other = reinterpret_cast<const Vec16*>(out)[later];
          if (!sync::is_written(other.w)) dialect::copy_words_async(out + later * 16, part.source.buffer + panel_word(part, row, later));
        }
        dialect::copy_async_commit();
        dialect::copy_async_wait<0>();
        if (kElementBytes == 2) store_panel_vector<kElementBytes>(out, v, w);
      }
    }
    if (kElementBytes == 1) {
      dialect::sync_warp();  // two lanes' vectors are stored over each other
      if (v < num_vecs) store_panel_vector<kElementBytes>(out, v, w);
    }
  });
}

}  // namespace sgl_lowlatency::stages
