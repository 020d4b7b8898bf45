// The activation panel: the B operand [rows, k1 - k0] bf16 in shared memory, read by every tile of an operation.
#pragma once
#include "sgl_lowlatency/stages/generations.hpp"
#include "sgl_lowlatency/stages/weight_ring.hpp"

namespace sgl_lowlatency::stages {

// Warps that share one row of the panel: 8, 4, 2, 1 for 1, 2, 3..4, 5 and more rows.
SGL_DEVICE int32_t warps_per_row(int32_t rows) { return rows == 1 ? 8 : rows == 2 ? 4 : rows <= 4 ? 2 : 1; }

// A vector is 8 bf16. kPanelLead of them a thread are polled first: thousands of threads poll, while others stream weights; when these are
// there, the rest is asked for in batches, each of which is one trip through L2.
constexpr int32_t kPanelLead = 2;
constexpr int32_t kPanelBatch = 8;  // more would spill registers

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

// Copies a thread's vectors first, first + stride, ... of one row or of several, kPerRow of each at most and below num_vecs, once all
// of their words are there. Of row r, 0 <= r < min(kRows, num_rows): words from row_begin + r * row_step on of `of`, to out + r * out_step.
template <int32_t kElementBytes, int32_t kRows, int32_t kPerRow>
SGL_DEVICE void copy_vectors(const DecodeStepParams& p, const sync::Awaited& of, int64_t row_begin, int32_t row_step, int32_t num_rows, int32_t first,
                             int32_t stride, int32_t num_vecs, char* out, int32_t out_step) {
  constexpr int32_t kCount = kRows * kPerRow;
  uint32_t v[kCount][4];
  const auto is_live = [&](int32_t u) { return first + u % kPerRow * stride < num_vecs && (kRows == 1 || u / kPerRow < num_rows); };
SGL_UNROLL
  for (int32_t u = 0; u < kCount; ++u) v[u][0] = v[u][1] = v[u][2] = v[u][3] = abi::kUnwritten;
  sync::wait_until(
      fault_sink(p), abi::kFaultEdgeDeadline, of.layer, of.edge, static_cast<uint32_t>(row_begin + first * 4),
      [&] {
        uint32_t largest = 0;
        const uint32_t* const begin = of.buffer + row_begin + first * 4;
SGL_UNROLL
        for (int32_t u = 0; u < kCount; ++u) {
          if (is_live(u) && sync::largest_word(v[u]) == abi::kUnwritten) dialect::load_words(v[u], begin + u / kPerRow * row_step + u % kPerRow * stride * 4);
        }
SGL_UNROLL
        for (int32_t u = 0; u < kCount; ++u) {
          if (is_live(u)) largest = sync::max_word(largest, sync::largest_word(v[u]));
        }
        return largest != abi::kUnwritten || dialect::planted(dialect::Planted::kMissingAwait);
      },
      [] { return abi::kUnwritten; });
SGL_UNROLL
  for (int32_t u = 0; u < kCount; ++u) {
    if (is_live(u)) store_panel_vector<kElementBytes>(out + u / kPerRow * out_step, first + u % kPerRow * stride, v[u]);
  }
}

// Copies columns [k0, k1) of each row of `source`, as they arrive. row_words: words from one row to the next.
// Entry: all consumer threads; the panel is free. A consumer barrier must follow.
template <int32_t kElementBytes>
SGL_DEVICE void load_panel(const DecodeStepParams& p, const Shared& s, const sync::Awaited& source, int32_t row_words, int32_t k_panel, int32_t k0,
                           int32_t k1) {
  constexpr int32_t kVec = 8;
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32;
  const int32_t segments = warps_per_row(p.rows), segment = warp % segments;
  const int32_t pitch = abi::panel_row_bytes(k_panel), stride = segments * 32, num_vecs = (k1 - k0) / kVec;
  const int32_t row_step = abi::kNumConsumerWarps / segments;
  const bool has_pairs = p.rows > abi::kNumConsumerWarps && num_vecs <= kPanelBatch / 2 * 32;  // two short rows in one batch
  bool is_lead = k0 == 0 && p.rows > 1;  // later columns have been there since the first ones were; one row is few polls
  for (int32_t row = warp / segments; row < p.rows; row += row_step * (has_pairs ? 2 : 1)) {
    char* const out = s.panel() + row * pitch;
    const int64_t row_begin = static_cast<int64_t>(row) * row_words + k0 / 2;
    int32_t first = segment * 32 + lane;
    if (is_lead) {
      if (first < num_vecs) copy_vectors<kElementBytes, 1, kPanelLead>(p, source, row_begin, 0, 1, first, stride, num_vecs, out, 0);
      if (!has_pairs) first += kPanelLead * stride;
      is_lead = false;
    }
    if (has_pairs) {
      const int32_t num_rows = row + row_step < p.rows ? 2 : 1;
      if (first < num_vecs) {
        copy_vectors<kElementBytes, 2, kPanelBatch / 2>(p, source, row_begin, row_step * row_words, num_rows, first, stride, num_vecs, out, row_step * pitch);
      }
      continue;
    }
    for (; first < num_vecs; first += kPanelBatch * stride) {
      copy_vectors<kElementBytes, 1, kPanelBatch>(p, source, row_begin, 0, 1, first, stride, num_vecs, out, 0);
    }
  }
}

}  // namespace sgl_lowlatency::stages
