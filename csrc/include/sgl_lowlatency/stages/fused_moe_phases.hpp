// The consumers of a fused_moe block: its units of every op, from panel to hand-over words, and its share of the rows' sums.
#pragma once
#include "sgl_lowlatency/stages/fused_moe_tile.hpp"

namespace sgl_lowlatency::stages {

constexpr int32_t kMoePanelBatch = 4;  // 16 columns each of x, that a thread asks for at a time
constexpr int32_t kMoeAwaitBatch = 3;  // the same of activations
constexpr int32_t kNoPanel = -1;

// What a consumer keeps from unit to unit.
struct MoeConsumer {
  MoeCursor at;
  MoeScales scales;
  int32_t panel = kNoPanel;  // what the panel holds (moe_panel_key)
  int32_t half = 0;          // of scratch, that the next finish writes
};

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

// The warps' tiles into scratch: of slot `slot` and part `part`, [16][8]. A consumer barrier must follow.
SGL_DEVICE void keep_moe_tile(float* scratch, int32_t slot, int32_t part, const MoeTile& tile) {
  const int32_t lane = dialect::thread_idx() % 32;
  float* const at = scratch + (slot * 2 + part) * 128 + lane / 4 * 8 + lane % 4 * 2;
  at[0] = tile.sum(0);
  at[1] = tile.sum(1);
  at[64] = tile.sum(2);
  at[65] = tile.sum(3);
}

// Sum of kSlots slots from `first` on, in their order.
SGL_DEVICE float moe_scratch_sum(const float* scratch, int32_t first, int32_t slots, int32_t part, int32_t element) {
  float sum = 0.0f;
  for (int32_t slot = first; slot < first + slots; ++slot) sum += scratch[(slot * 2 + part) * 128 + element];
  return sum;
}

SGL_DEVICE float clamped_swiglu(float gate, float up, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return swiglu(gate, up);
}

// Activations of 16 channels of every column. Entry: all consumer threads, behind the barrier that follows keep_moe_tile.
SGL_DEVICE void finish_gate_up(const FusedMoeParams& p, const float* scratch, int32_t tile, int32_t vector, int32_t count,
                               const MoeWords& words) {
  const int32_t thread = dialect::thread_idx(), part = thread % 2, is_second = thread / 2 % 2, column = thread / 4 % 8, pair = thread / 32;
  const int32_t element = (pair * 2 + is_second) * 8 + column;  // of 16 channels; a warp has two of them, so that they meet in shuffles
  float gate = moe_scratch_sum(scratch, part * 4, 4, 0, element);
  float up = moe_scratch_sum(scratch, part * 4, 4, 1, element);
  gate += dialect::shuffle_xor(gate, 1);
  up += dialect::shuffle_xor(up, 1);
  const float own = clamped_swiglu(gate, up, p.swiglu_limit), next = dialect::shuffle_xor(own, 2);
  if (part != 0 || is_second != 0 || column >= count) return;
  if (dialect::planted(dialect::Planted::kWithheldSignal) && tile == 0 && vector < p.rows) return;
  uint32_t word[1] = {pack_bf16(own, next)};
  sync::publish(words.activation() + static_cast<int64_t>(vector + column) * (p.geometry.intermediate / 2) + tile * 8 + pair, word);
}

// 64 channels of every column. Entry: as finish_gate_up.
SGL_DEVICE void finish_down(const FusedMoeParams& p, const float* scratch, int32_t tile, int32_t vector, int32_t count, const MoeWords& words) {
  const int32_t thread = dialect::thread_idx(), column = thread / 32, part = thread % 32 / 8, row = thread % 8 * 2;
  if (column >= count) return;
  uint32_t word[2];
SGL_UNROLL
  for (int32_t i = 0; i < 2; ++i) {  // tile `part` is the one of number part / 2 of warps 0..3 or 4..7
    word[i] = dialect::float_to_bits(moe_scratch_sum(scratch, part % 2 * 4, 4, part / 2, (row + i) * 8 + column));
  }
  sync::publish(words.output() + static_cast<int64_t>(vector + column) * p.geometry.hidden + tile * 64 + part * 16 + row, word);
}

SGL_DEVICE void finish_router(const FusedMoeParams& p, const float* scratch, int32_t item, int32_t row, int32_t count, const MoeWords& words) {
  const int32_t thread = dialect::thread_idx(), expert = thread % 16, column = thread / 16, splits = abi::moe_splits(p.geometry);
  if (column >= count) return;
  uint32_t word[1] = {dialect::float_to_bits(moe_scratch_sum(scratch, 0, 8, 0, expert * 8 + column))};
  sync::publish(words.logits() + (item % splits * p.rows + row + column) * p.geometry.num_experts + item / splits * 16 + expert, word);
}

// Entry: all consumer threads.
template <MoeOp kOp>
SGL_DEVICE void run_moe_op(const FusedMoeParams& p, const MoeShared& s, const MoeWords& words, MoeConsumer& state) {
  constexpr bool kIsRouted = kOp == abi::kMoeGateUp || kOp == abi::kMoeDown, kReadsX = kOp != abi::kMoeSharedDown && kOp != abi::kMoeDown;
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32;
  const abi::TileRange share = moe_share(p, s, kOp);
SGL_NO_UNROLL
  for (int32_t i = share.begin; i < share.begin + share.count; ++i) {
    const MoeUnit unit = moe_unit(p, kOp, i);
    const MoeSpan span = moe_span(p, s, kOp, unit.job);
    const int32_t vector = (kIsRouted ? p.rows : 0) + span.first;  // of activation and output
    const int32_t key = moe_panel_key(p, kOp, unit.job);
    if (key != state.panel) {
      sync_consumers();  // everybody has read what the panel holds
      if (kReadsX) {
        load_x_panel(p, s, kOp, span);
      } else {
        load_activation_panel(p, s, words, vector, span.count);
      }
      state.panel = key;
    }
    // Columns beyond the span repeat its last one; nobody takes their sums.
    const int32_t column = lane / 4 < span.count ? lane / 4 : span.count - 1;
    const int32_t panel_row = kOp == abi::kMoeGateUp && keeps_x(p) ? s.pair_rows()[span.first + column] : column;
    const char* const row = s.panel() + panel_row * abi::moe_panel_pitch(kReadsX ? p.geometry.hidden : p.geometry.intermediate) + lane % 4 * 16;
    const int32_t num_stages = moe_num_stages(p, kOp, unit.tile);
    state.scales.begin_unit(kOp, i == share.begin, unit.tile);
    MoeTile tiles[2];
SGL_NO_UNROLL
    for (int32_t stage = 0; stage < num_stages; ++stage) {
      const MoePiece piece = moe_piece(p, kOp, unit.tile, stage);
      if (!dialect::planted(dialect::Planted::kRingNoWait)) {
        sync::wait_mbarrier(fault_sink(p), abi::kFaultRingFull, kOp, state.at.stage, s.full(state.at.stage), state.at.parity);
      }
      const char* const at = s.stage(state.at.stage);
      if (piece.part == 0) {
        multiply_moe_stage<kOp>(p, s, tiles[0], at, piece, stage, unit, state.scales, row, warp);
      } else {
        multiply_moe_stage<kOp>(p, s, tiles[1], at, piece, stage, unit, state.scales, row, warp);
      }
      dialect::sync_warp();
      // Pairs with the producer's wait for `empty`: the warp has read the stage.
      if (lane == 0) dialect::mbarrier_arrive(s.empty(state.at.stage));
      state.at.advance();
    }
    float* const scratch = s.scratch(state.half);
    keep_moe_tile(scratch, warp, 0, tiles[0]);
    if (kOp != abi::kMoeRouter) keep_moe_tile(scratch, warp, 1, tiles[1]);
    // The finish before last read the half that the next one will write: it was done before this barrier.
    if (!dialect::planted(dialect::Planted::kPartialNoWait)) sync_consumers();
    if (kOp == abi::kMoeRouter) finish_router(p, scratch, unit.tile, span.first, span.count, words);
    if (kOp == abi::kMoeSharedGateUp || kOp == abi::kMoeGateUp) finish_gate_up(p, scratch, unit.tile, vector, span.count, words);
    if (kOp == abi::kMoeSharedDown || kOp == abi::kMoeDown) finish_down(p, scratch, unit.tile, vector, span.count, words);
    state.half ^= 1;
  }
}

// The shared expert's row + sum over k of weight * its pair's row, in the order of k: finish(row, column, sum) gets four columns from `column` on,
// fp32, and begin(row, column) is called in front of the wait for them. A warp takes 128 columns of a row; whose they are does not depend on the
// number of rows. Entry: all consumer threads.
template <class Begin, class Finish>
SGL_DEVICE void combine_moe(const FusedMoeParams& p, const MoeShared& s, const MoeWords& words, Begin begin, Finish finish) {
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32, hidden = p.geometry.hidden, top_k = p.geometry.top_k;
  const int32_t chunks = hidden / 128;
SGL_NO_UNROLL
  for (int32_t i = dialect::block_idx() + warp * dialect::grid_dim(); i < p.rows * chunks; i += dialect::grid_dim() * abi::kNumConsumerWarps) {
    const int32_t row = i / chunks, column = i % chunks * 128 + lane * 4;
    begin(row, column);
    uint32_t part[1 + abi::kMoeMaxTopK][4];
    const auto vector = [&](int32_t k) {  // of output; -1: none
      if (k == 0) return row;
      const int32_t pair = k <= top_k ? s.pairs()[row * top_k + k - 1] : -1;
      return pair < 0 ? -1 : p.rows + pair;
    };
SGL_UNROLL
    for (int32_t k = 0; k <= abi::kMoeMaxTopK; ++k) part[k][0] = part[k][1] = part[k][2] = part[k][3] = vector(k) < 0 ? 0u : abi::kUnwritten;
    sync::wait_until(
        fault_sink(p), abi::kFaultEdgeDeadline, 0, abi::kMoeEdgeOutput, static_cast<uint32_t>(row * hidden + column),
        [&] {
          bool is_complete = true;
SGL_UNROLL
          for (int32_t k = 0; k <= abi::kMoeMaxTopK; ++k) {
            if (!sync::is_written(part[k])) dialect::load_words(part[k], words.output() + static_cast<int64_t>(vector(k)) * hidden + column);
          }
SGL_UNROLL
          for (int32_t k = 0; k <= abi::kMoeMaxTopK; ++k) is_complete = is_complete && sync::is_written(part[k]);
          return is_complete || dialect::planted(dialect::Planted::kMissingAwait);
        },
        [] { return abi::kUnwritten; });
    float sum[4];
SGL_UNROLL
    for (int32_t j = 0; j < 4; ++j) sum[j] = 0.0f;
SGL_UNROLL
    for (int32_t k = 1; k <= abi::kMoeMaxTopK; ++k) {
      if (vector(k) < 0) continue;
      const float weight = dialect::planted(dialect::Planted::kUnweightedExpert) ? 1.0f : s.weights()[row * top_k + k - 1];
SGL_UNROLL
      for (int32_t j = 0; j < 4; ++j) sum[j] += weight * dialect::bits_to_float(part[k][j]);
    }
SGL_UNROLL
    for (int32_t j = 0; j < 4; ++j) sum[j] += dialect::bits_to_float(part[0][j]);
    finish(row, column, sum);
  }
}

}  // namespace sgl_lowlatency::stages
