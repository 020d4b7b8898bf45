// The consumers of a fused_moe block: its units of every op, from panel to hand-over words, and its share of the rows' sums.
#pragma once
#include "sgl_lowlatency/stages/fused_moe_tile.hpp"

namespace sgl_lowlatency::stages {

constexpr int32_t kMoePanelBatch = 4;  // 16 columns each of x, that a thread asks for at a time
constexpr int32_t kMoeAwaitBatch = 3;  // the same of activations
constexpr int32_t kNoPanel = -1;

// What a consumer keeps from unit to unit.
struct MoeConsumer {
  MoeScales scales;
  MoeCursor at;
  int32_t turn = 0;          // the warp that has the first item of the unit's next stage
  int32_t panel = kNoPanel;  // what the panel holds (moe_panel_key)
  int32_t half = 0;          // of scratch, that the next unit's parts go to
  uint32_t parities = 0;     // of s.partials(half), bit by half: of the next wait
  int32_t finisher = 0;      // the warp that begins to finish the next unit
};

// The rows or pairs that a unit's columns are: `count` from `first` on.
struct MoeSpan {
  int32_t first;
  int32_t count;
};
SGL_DEVICE MoeSpan moe_span(const FusedMoeParams& p, const MoeShared& s, int32_t op, int32_t job) {
  if (is_routed_op(op)) return {s.job_first()[job], s.job_count()[job]};
  const int32_t first = job * abi::kMoeColumns;
  return {first, p.rows - first < abi::kMoeColumns ? p.rows - first : abi::kMoeColumns};
}

// Up to kMoeColumns rows all of x stays in the panel, a row in its place.
SGL_DEVICE bool keeps_x(const FusedMoeParams& p) { return p.rows <= abi::kMoeColumns; }
SGL_DEVICE int32_t moe_panel_key(const FusedMoeParams& p, int32_t op, int32_t job) {
  if (op == abi::kMoeRouter || op == abi::kMoeSharedGateUp) return keeps_x(p) ? 0 : job;
  return op == abi::kMoeGateUp && keeps_x(p) ? 0 : op << 16 | job;
}

// Stores columns 16u .. 16u + 15 of a panel row (abi::moe_panel_pitch): of each word its first eight columns beside the one eight further on.
SGL_DEVICE void store_moe_columns(char* row, int32_t u, const uint32_t (&low)[4], const uint32_t (&high)[4]) {
  char* const at = row + u / 8 * 256 + u % 2 * 128 + u % 8 / 2 * 16;
  *reinterpret_cast<Vec16*>(at) = Vec16{{low[0], high[0], low[1], high[1]}};
  *reinterpret_cast<Vec16*>(at + 64) = Vec16{{low[2], high[2], low[3], high[3]}};
}

// A thread's way through the panel's units, 16 columns of a row each: every kConsumerThreads-th one, with one division in the beginning.
struct MoePanelWalk {
  int32_t units;  // of a row
  int32_t row;
  int32_t unit;
  int32_t row_stride;
  int32_t unit_stride;
  SGL_DEVICE void advance() {
    row += row_stride;
    unit += unit_stride;
    if (unit < units) return;
    unit -= units;
    ++row;
  }
};
SGL_DEVICE MoePanelWalk moe_panel_walk(int32_t columns) {
  const int32_t units = columns / 16, thread = dialect::thread_idx();
  return {units, thread / units, thread % units, kConsumerThreads / units, kConsumerThreads % units};
}

// Entry: all consumer threads. Ends with a consumer barrier.
SGL_DEVICE void load_x_panel(const FusedMoeParams& p, const MoeShared& s, int32_t op, const MoeSpan& span) {
  const int32_t pitch = abi::moe_panel_pitch(p.geometry.hidden);
  const bool is_all = keeps_x(p);
  const int32_t rows = is_all ? p.rows : span.count;
  MoePanelWalk at = moe_panel_walk(p.geometry.hidden);
SGL_NO_UNROLL
  while (at.row < rows) {
    Vec16 low[kMoePanelBatch], high[kMoePanelBatch];
    MoePanelWalk ahead = at;
SGL_UNROLL
    for (int32_t i = 0; i < kMoePanelBatch; ++i, ahead.advance()) {
      if (ahead.row >= rows) continue;
      const int32_t row = is_all ? ahead.row : op == abi::kMoeGateUp ? s.pair_rows()[span.first + ahead.row] : span.first + ahead.row;
      const bf16* const from = p.x + static_cast<int64_t>(row) * p.geometry.hidden + ahead.unit * 16;
      low[i] = dialect::load_plain(reinterpret_cast<const Vec16*>(from));
      high[i] = dialect::load_plain(reinterpret_cast<const Vec16*>(from + 8));
    }
SGL_UNROLL
    for (int32_t i = 0; i < kMoePanelBatch; ++i, at.advance()) {
      if (at.row < rows) store_moe_columns(s.panel() + at.row * pitch, at.unit, low[i].w, high[i].w);
    }
  }
  sync_consumers();
}

// Activations of the span's vectors, as soon as they are there. Entry: all consumer threads. Ends with a consumer barrier.
SGL_DEVICE void load_activation_panel(const FusedMoeParams& p, const MoeShared& s, const MoeWords& words, int32_t first_vector, int32_t count) {
  const int32_t pitch = abi::moe_panel_pitch(p.geometry.intermediate);
  MoePanelWalk at = moe_panel_walk(p.geometry.intermediate);
  const int32_t begin = first_vector * at.units * 8;
SGL_NO_UNROLL
  while (at.row < count) {
    uint32_t half[2 * kMoeAwaitBatch][4];  // of the batch's unit i, its first eight columns at 2i, the others behind
    int32_t first[kMoeAwaitBatch];         // word of the span
    MoePanelWalk ahead = at;
SGL_UNROLL
    for (int32_t i = 0; i < kMoeAwaitBatch; ++i, ahead.advance()) first[i] = ahead.row < count ? (ahead.row * at.units + ahead.unit) * 8 : -1;
SGL_UNROLL
    for (int32_t i = 0; i < 2 * kMoeAwaitBatch; ++i) half[i][0] = half[i][1] = half[i][2] = half[i][3] = first[i / 2] >= 0 ? abi::kUnwritten : 0u;
    sync::wait_until(
        fault_sink(p), abi::kFaultEdgeDeadline, 0, abi::kMoeEdgeActivation, static_cast<uint32_t>(begin + first[0]),
        [&] {
          bool is_complete = true;
SGL_UNROLL
          for (int32_t i = 0; i < 2 * kMoeAwaitBatch; ++i) {
            if (!sync::is_written(half[i])) dialect::load_words(half[i], words.activation() + begin + first[i / 2] + i % 2 * 4);
          }
SGL_UNROLL
          for (int32_t i = 0; i < 2 * kMoeAwaitBatch; ++i) is_complete = is_complete && sync::is_written(half[i]);
          return is_complete || dialect::planted(dialect::Planted::kMissingAwait);
        },
        [] { return abi::kUnwritten; });
SGL_UNROLL
    for (int32_t i = 0; i < kMoeAwaitBatch; ++i, at.advance()) {
      if (at.row < count) store_moe_columns(s.panel() + at.row * pitch, at.unit, half[2 * i], half[2 * i + 1]);
    }
  }
  sync_consumers();
}

// The warps' tiles into scratch: of slot `slot` and part `part`, [16][8]. row: the lane's first one.
SGL_DEVICE void keep_moe_tile(float* scratch, int32_t slot, int32_t part, int32_t row, int32_t lane, const MoeTile& tile) {
  float* const at = scratch + (slot * 2 + part) * 128 + row * 8 + lane % 4 * 2;
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

// A unit whose parts are in scratch: of the op's tile `tile`, `count` columns, which are the vectors (router: rows) from `vector` on.
struct MoeSums {
  int32_t tile;
  int32_t vector;
  int32_t count;
};
// Warps that finish it: a column each, of the router two.
SGL_DEVICE int32_t moe_finishers(int32_t op, int32_t count) { return op == abi::kMoeRouter ? (count + 1) / 2 : count; }

// Activations of 16 channels of column `column`. Entry: all lanes of a warp.
SGL_DEVICE void finish_gate_up(const FusedMoeParams& p, const float* scratch, const MoeSums& of, int32_t column, int32_t lane,
                               const MoeWords& words) {
  const int32_t part = lane % 2, row = lane / 2;  // lanes 2r and 2r + 1 have row r's first and last four slots
  float gate = moe_scratch_sum(scratch, part * 4, 4, 0, row * 8 + column);
  float up = moe_scratch_sum(scratch, part * 4, 4, 1, row * 8 + column);
  gate += dialect::shuffle_xor(gate, 1);
  up += dialect::shuffle_xor(up, 1);
  const float own = clamped_swiglu(gate, up, p.swiglu_limit), next = dialect::shuffle_xor(own, 2);
  if (lane % 4 != 0) return;
  if (dialect::planted(dialect::Planted::kWithheldSignal) && of.tile == 0 && of.vector < p.rows) return;
  uint32_t word[1] = {pack_bf16(own, next)};
  sync::publish(words.activation() + static_cast<int64_t>(of.vector + column) * (p.geometry.intermediate / 2) + of.tile * 8 + lane / 4, word);
}

// 32 channels of a column. Entry: all lanes of a warp.
SGL_DEVICE void finish_down(const FusedMoeParams& p, const float* scratch, const MoeSums& of, int32_t column, int32_t lane, const MoeWords& words) {
  uint32_t word[1] = {dialect::float_to_bits(moe_scratch_sum(scratch, 0, 8, lane / 16, lane % 16 * 8 + column))};
  sync::publish(words.output() + static_cast<int64_t>(of.vector + column) * p.geometry.hidden + of.tile * 32 + lane, word);
}

// 16 experts of two columns. Entry: all lanes of a warp.
SGL_DEVICE void finish_router(const FusedMoeParams& p, const float* scratch, const MoeSums& of, int32_t nth, int32_t lane, const MoeWords& words) {
  const int32_t expert = lane % 16, column = nth * 2 + lane / 16, splits = abi::moe_splits(p.geometry);
  if (column >= of.count) return;
  uint32_t word[1] = {dialect::float_to_bits(moe_scratch_sum(scratch, 0, 8, 0, expert * 8 + column))};
  sync::publish(words.logits() + (of.tile % splits * p.rows + of.vector + column) * p.geometry.num_experts + of.tile / splits * 16 + expert, word);
}

// The unit whose parts are in half `half` of scratch, by warps in turn. Entry: all lanes of every consumer warp.
SGL_DEVICE void finish_moe_unit(const FusedMoeParams& p, const MoeShared& s, const MoeWords& words, int32_t op, int32_t half, const MoeSums& of,
                                int32_t warp, int32_t lane, MoeConsumer& state) {
  // Pairs with the arrivals in run_moe_op: every warp's parts of the unit, and what its finishers read of the one before.
  if (!dialect::planted(dialect::Planted::kPartialNoWait)) {
    sync::wait_mbarrier(fault_sink(p), abi::kFaultPartial, op, half, s.partials(half), state.parities >> half & 1u);
  }
  state.parities ^= 1u << half;
  const int32_t finishers = moe_finishers(op, of.count), nth = (warp - state.finisher) & (abi::kNumConsumerWarps - 1);
  state.finisher = (state.finisher + finishers) & (abi::kNumConsumerWarps - 1);
  if (nth >= finishers) return;
  if (op == abi::kMoeRouter) {
    finish_router(p, s.scratch(half), of, nth, lane, words);
  } else if (reads_x(op)) {
    finish_gate_up(p, s.scratch(half), of, nth, lane, words);
  } else {
    finish_down(p, s.scratch(half), of, nth, lane, words);
  }
}

// Byte offsets of a lane in every stage of an op: of its words at step 0, and of its scales (FP4: in a tile's; FP8: in the stage's).
struct MoeLane {
  int32_t words;
  int32_t scales;
};
SGL_DEVICE MoeLane moe_lane(int32_t op, const MoeWork& work, int32_t lane) {
  const int32_t g = lane / 4, t = lane % 4;
  const int32_t scale_lane = dialect::planted(dialect::Planted::kWrongScaleBlock) ? (t + 1) % 4 : t;  // of the next block of K
  if (is_routed_op(op)) {
    const int32_t row = fp4_row_of(g);
    return {abi::moe_fp4_row(row, work.steps * (abi::kMoeStepK / 2)) + t * 16, row * 16 + scale_lane};
  }
  const int32_t pitch = abi::moe_stage(static_cast<MoeOp>(op)).pitch;
  return {g * pitch + t * (op == abi::kMoeRouter ? 64 : 32), 16 * pitch + scale_lane * 4};
}

// The warp's items of the stage at `at`, added to `tile`: of a unit of `op`, its part `part` and run `run`, `steps` steps from `begin` on. row: the
// lane's panel row, at its first piece.
SGL_DEVICE void multiply_moe_stage(const FusedMoeParams& p, const MoeShared& s, MoeTile& tile, const char* at, int32_t op, const MoeLane& own,
                                   int32_t unit_tile, int32_t part, int32_t run, int32_t begin, int32_t steps, const char* row, int32_t warp,
                                   MoeConsumer& state) {
  const bool is_gate_up = op == abi::kMoeGateUp;
  const MoeItems items{(warp - state.turn) & (abi::kNumConsumerWarps - 1), is_gate_up ? steps : 2 * steps};
  state.turn = (state.turn + items.count) & (abi::kNumConsumerWarps - 1);
  if (dialect::planted(dialect::Planted::kNoProducts) && op != abi::kMoeRouter) return;
  at += own.words;
  if (is_routed_op(op)) {
    const int32_t scale_tile = is_gate_up ? unit_tile % 4 : unit_tile % 2 * 2 + part;
    const int32_t which = is_gate_up && !dialect::planted(dialect::Planted::kGateScaleForUp) ? part : 0;
    const char* const scales = s.scales(state.scales.slot_of(which), p.geometry) + scale_tile * 4 + own.scales;
    int32_t first = items.first, half = is_gate_up ? run : 0;  // of each 32 columns
SGL_NO_UNROLL
    for (;;) {
      first = multiply_fp4_steps(tile, first, steps, at, scales, row + half * 128);
      if (is_gate_up || half == 1) return;
      at += abi::moe_fp4_row(8, steps * (abi::kMoeStepK / 2));
      half = 1;
    }
  }
  const int32_t pitch = abi::moe_stage(static_cast<MoeOp>(op)).pitch;
  row += begin * 256;
  if (op == abi::kMoeRouter) {
    multiply_bf16_items(tile, items, at, pitch, row);
  } else {
    multiply_fp8_items(tile, items, at, pitch, reinterpret_cast<const float*>(at + (own.scales - own.words)), row);
  }
}

// The block's units of an op. One piece of code for all of them, so that it stays in the instruction cache. Entry: all consumer threads.
//
// A unit is finished while the next one is under way, by warps in turn: no warp waits for a sum. A warp that is through a unit's first part awaits
// that all have delivered the unit before, finishes it if it is its turn, and only then stores parts: the half of scratch that takes them is free,
// since who delivered the unit before had finished the one before that. An op's last unit is finished at its end.
SGL_DEVICE void run_moe_op(const FusedMoeParams& p, const MoeShared& s, const MoeWords& words, int32_t op, MoeConsumer& state) {
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32;
  const MoeWork work = moe_work(p, op);
  const MoeLane own = moe_lane(op, work, lane);
  MoeSums before{0, 0, -1};  // count -1: none
SGL_NO_UNROLL
  for (MoeUnits unit = moe_units(s, op); unit.left > 0 || before.count >= 0; unit.advance(work.tiles)) {
    const bool is_unit = unit.left > 0;
    const char* row = nullptr;
    MoeSums sums{unit.tile, 0, -1};
    if (is_unit) {
      const MoeSpan span = moe_span(p, s, op, unit.job);
      sums.vector = (is_routed_op(op) ? p.rows : 0) + span.first;
      sums.count = span.count;
      const int32_t key = moe_panel_key(p, op, unit.job);
      if (key != state.panel) {
        sync_consumers();  // everybody has read what the panel holds
        if (reads_x(op)) {
          load_x_panel(p, s, op, span);
        } else {
          load_activation_panel(p, s, words, sums.vector, span.count);
        }
        state.panel = key;
      }
      // Columns beyond the span repeat its last one; nobody takes their sums.
      const int32_t column = lane / 4 < span.count ? lane / 4 : span.count - 1;
      const int32_t panel_row = op == abi::kMoeGateUp && keeps_x(p) ? s.pair_rows()[span.first + column] : column;
      row = s.panel() + panel_row * abi::moe_panel_pitch(reads_x(op) ? p.geometry.hidden : p.geometry.intermediate) + lane % 4 * 16;
      state.scales.begin_unit(op, unit.is_first, unit.tile);
      state.turn = 0;  // what a block did before does not decide in which order it adds
    }
    const MoeSplit extent = moe_extent(p, op, work, unit.tile);
SGL_NO_UNROLL
    for (int32_t part = 0; part < work.parts; ++part) {
      MoeTile tile;
SGL_NO_UNROLL
      for (int32_t run = 0; run < extent.runs && is_unit; ++run) {
        const int32_t begin = is_routed_op(op) ? 0 : run * work.most, left = extent.steps - begin;
        const int32_t steps = is_routed_op(op) || left < work.most ? left : work.most;
        if (!dialect::planted(dialect::Planted::kRingNoWait)) {
          sync::wait_mbarrier(fault_sink(p), abi::kFaultRingFull, op, state.at.stage, s.full(state.at.stage), state.at.parity);
        }
        multiply_moe_stage(p, s, tile, s.stage(state.at.stage), op, own, unit.tile, part, run, extent.begin + begin, steps, row, warp, state);
        dialect::sync_warp();
        // Pairs with the producer's wait for `empty`: the warp has read the stage.
        if (lane == 0) dialect::mbarrier_arrive(s.empty(state.at.stage));
        state.at.advance(s.at.num_stages);
      }
      if (part == 0 && before.count >= 0) finish_moe_unit(p, s, words, op, state.half ^ 1, before, warp, lane, state);
      if (!is_unit) break;
      keep_moe_tile(s.scratch(state.half), warp, part, is_routed_op(op) ? fp4_row_of(lane / 4) : lane / 4, lane, tile);
    }
    before = sums;
    if (!is_unit) break;
    dialect::sync_warp();
    // Pairs with the wait in finish_moe_unit: this warp's parts are stored, and what it finished is read.
    if (lane == 0) dialect::mbarrier_arrive(s.partials(state.half));
    state.half ^= 1;
  }
}

// out = the shared expert's row + sum over k of weight * its pair's row, in the order of k; rounded once. A warp takes 128 columns of a row.
// Entry: all consumer threads.
SGL_DEVICE void combine_moe(const FusedMoeParams& p, const MoeShared& s, const MoeWords& words) {
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32, hidden = p.geometry.hidden, top_k = p.geometry.top_k;
  const int32_t chunks = hidden / 128;
SGL_NO_UNROLL
  for (int32_t i = dialect::block_idx() + warp * dialect::grid_dim(); i < p.rows * chunks; i += dialect::grid_dim() * abi::kNumConsumerWarps) {
    const int32_t row = i / chunks, column = i % chunks * 128 + lane * 4;
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
    uint32_t* const out = reinterpret_cast<uint32_t*>(p.out + static_cast<int64_t>(row) * hidden + column);
    dialect::store_plain(out, pack_bf16(sum[0], sum[1]));
    dialect::store_plain(out + 1, pack_bf16(sum[2], sum[3]));
  }
}

}  // namespace sgl_lowlatency::stages
