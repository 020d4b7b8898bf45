// A fused_moe block's panel: rows of x, or activations, as the B operand of a run of units.
#pragma once
#include "sgl_lowlatency/stages/fused_moe_state.hpp"

namespace sgl_lowlatency::stages {

constexpr int32_t kMoePanelBatch = 4;  // 16 columns each of x, that a thread asks for at a time
constexpr int32_t kMoeAwaitBatch = 3;  // the same of activations
constexpr int32_t kNoPanel = -1;

// The rows or pairs that a unit's columns are: `count` from `first` on.
struct MoeSpan {
  int32_t first;
  int32_t count;
};
SGL_DEVICE MoeSpan moe_span(const FusedMoeParams& p, const MoeShared& s, MoeOp op, int32_t job) {
  if (op == abi::kMoeGateUp || op == abi::kMoeDown) return {s.job_first()[job], s.job_count()[job]};
  const int32_t first = job * abi::kMoeColumns;
  return {first, p.rows - first < abi::kMoeColumns ? p.rows - first : abi::kMoeColumns};
}

// Up to kMoeColumns rows all of x stays in the panel, a row in its place.
SGL_DEVICE bool keeps_x(const FusedMoeParams& p) { return p.rows <= abi::kMoeColumns; }
SGL_DEVICE int32_t moe_panel_key(const FusedMoeParams& p, MoeOp op, int32_t job) {
  if (op == abi::kMoeRouter || op == abi::kMoeSharedGateUp) return keeps_x(p) ? 0 : job;
  return op == abi::kMoeGateUp && keeps_x(p) ? 0 : op << 16 | job;
}

// Stores columns 16u .. 16u + 15 of a panel row (abi::moe_panel_pitch): of each word its first eight columns beside the one eight further on.
SGL_DEVICE void store_moe_columns(char* row, int32_t u, const uint32_t (&low)[4], const uint32_t (&high)[4]) {
  char* const at = row + u / 8 * 256 + u % 2 * 128 + u % 8 / 2 * 16;
  *reinterpret_cast<Vec16*>(at) = Vec16{{low[0], high[0], low[1], high[1]}};
  *reinterpret_cast<Vec16*>(at + 64) = Vec16{{low[2], high[2], low[3], high[3]}};
}

// Entry: all consumer threads. Ends with a consumer barrier.
SGL_DEVICE void load_x_panel(const FusedMoeParams& p, const MoeShared& s, MoeOp op, const MoeSpan& span) {
  const int32_t units = p.geometry.hidden / 16, pitch = abi::moe_panel_pitch(p.geometry.hidden);
  const bool is_all = keeps_x(p);
  const int32_t total = (is_all ? p.rows : span.count) * units;
SGL_NO_UNROLL
  for (int32_t first = dialect::thread_idx(); first < total; first += kMoePanelBatch * kConsumerThreads) {
    Vec16 low[kMoePanelBatch], high[kMoePanelBatch];
SGL_UNROLL
    for (int32_t i = 0; i < kMoePanelBatch; ++i) {
      const int32_t unit = first + i * kConsumerThreads, j = unit / units;
      if (unit >= total) continue;
      const int32_t row = is_all ? j : op == abi::kMoeGateUp ? s.pair_rows()[span.first + j] : span.first + j;
      const bf16* const from = p.x + static_cast<int64_t>(row) * p.geometry.hidden + unit % units * 16;
      low[i] = dialect::load_plain(reinterpret_cast<const Vec16*>(from));
      high[i] = dialect::load_plain(reinterpret_cast<const Vec16*>(from + 8));
    }
SGL_UNROLL
    for (int32_t i = 0; i < kMoePanelBatch; ++i) {
      const int32_t unit = first + i * kConsumerThreads;
      if (unit < total) store_moe_columns(s.panel() + unit / units * pitch, unit % units, low[i].w, high[i].w);
    }
  }
  sync_consumers();
}

// Activations of the span's vectors, as soon as they are there. Entry: all consumer threads. Ends with a consumer barrier.
SGL_DEVICE void load_activation_panel(const FusedMoeParams& p, const MoeShared& s, const MoeWords& words, int32_t first_vector, int32_t count) {
  const int32_t units = p.geometry.intermediate / 16, pitch = abi::moe_panel_pitch(p.geometry.intermediate), total = count * units;
  const int32_t begin = first_vector * units * 8;
SGL_NO_UNROLL
  for (int32_t first = dialect::thread_idx(); first < total; first += kMoeAwaitBatch * kConsumerThreads) {
    uint32_t half[2 * kMoeAwaitBatch][4];  // of unit i, its first eight columns at 2i, the others behind
    const auto unit = [&](int32_t i) { return first + i / 2 * kConsumerThreads; };
SGL_UNROLL
    for (int32_t i = 0; i < 2 * kMoeAwaitBatch; ++i) half[i][0] = half[i][1] = half[i][2] = half[i][3] = unit(i) < total ? abi::kUnwritten : 0u;
    sync::wait_until(
        fault_sink(p), abi::kFaultEdgeDeadline, 0, abi::kMoeEdgeActivation, static_cast<uint32_t>(begin + first * 8),
        [&] {
          bool is_complete = true;
SGL_UNROLL
          for (int32_t i = 0; i < 2 * kMoeAwaitBatch; ++i) {
            if (!sync::is_written(half[i])) dialect::load_words(half[i], words.activation() + begin + unit(i) * 8 + i % 2 * 4);
          }
SGL_UNROLL
          for (int32_t i = 0; i < 2 * kMoeAwaitBatch; ++i) is_complete = is_complete && sync::is_written(half[i]);
          return is_complete || dialect::planted(dialect::Planted::kMissingAwait);
        },
        [] { return abi::kUnwritten; });
SGL_UNROLL
    for (int32_t i = 0; i < kMoeAwaitBatch; ++i) {
      if (unit(2 * i) < total) store_moe_columns(s.panel() + unit(2 * i) / units * pitch, unit(2 * i) % units, half[2 * i], half[2 * i + 1]);
    }
  }
  sync_consumers();
}

}  // namespace sgl_lowlatency::stages
