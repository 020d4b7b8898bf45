// out[n, m] = sum_k weight[m, k] * panel[n, k] for the block's tiles of one matrix: m16n8k16 MMAs, K split over the eight
// consumer warps, partial tiles added across warps in warp order (bitwise repeatable).
#pragma once
#include <type_traits>

#include "sgl_lowlatency/stages/warp_tile.hpp"

namespace sgl_lowlatency::stages {

// Two neighbouring columns of one row of a finished tile: out[n, m], out[n, m + 1]; for gate_up m is the neuron's gate row, and
// up[] holds the same two neurons of the up rows.
struct TilePair {
  int32_t tile;
  int32_t m;  // even
  int32_t n;
  float y[2];
  float up[2];
};

// Loads under way while the tile is computed; handed over as they came.
struct Early {
  uint32_t word;
  uint32_t weights;  // two bf16, of the norm that follows or of the bias
};

// Where a consumer warp stands among the partial tiles; the same in all of them.
struct PartialCursor {
  uint32_t half = 0;      // of scratch: the one that takes the next tile
  uint32_t parities = 0;  // bit h: of the phase of Shared::partials(h) that is awaited next
};

// Warps that finish a tile of so many pairs a row: 1, 2, 4 or 8.
SGL_DEVICE int32_t finisher_warps(int32_t rows, int32_t pairs) { return rows * pairs <= 32 ? 1 : rows * pairs <= 64 ? 2 : rows * pairs <= 128 ? 4 : 8; }

// Tiles `own` of one operation. Ops is the caller's table of what differs between operations:
//   ops.load(op, k0, k1)           fills the panel (load_panel)
//   ops.before(op, tile, m, n)     Early, of a finisher's pair: n < rows
//   ops.finish(op, pair, is_finisher, early)  called by all lanes of the warps that hold finishers
//   ops.behind(op, index)          called by all consumer threads behind tile number `index` of `own`
//
// Warps take turns as finishers of a tile: they add its partial tiles and do what follows. All but a panel's last tile are finished a
// tile late, their finishers multiply the next one first: no warp waits for a sum, and none is late more than once in a while. At the
// end of tile i a warp awaits that all have delivered i - 1, stores its part of i, finishes i - 1 if it is its turn, and delivers i.
// The half of scratch that takes i is free then: who delivered i - 1 had finished i - 2. The last tile, which others wait for, meets
// the barrier that the next panel needs anyway and is finished at once.
// is_in_order: so is every tile, and behind the last one a half of scratch is free.
//
// Entry: all consumer threads; panel and scratch are free. Some threads return while others still read scratch: the next barrier
// of the consumers comes before anyone writes it again.
template <int32_t kNTiles, int32_t kElementBytes, class Op, class Ops>
SGL_DEVICE void run_tiles(const DecodeStepParams& p, const Shared& s, int32_t layer, Op op, bool is_in_order, const abi::TileRange& own,
                          RingCursor& cursor, PartialCursor& partial, const Ops& ops) {
  constexpr int32_t kHalf = abi::kTileRows / 2;
  static_assert(kNTiles * 8 * kHalf <= kConsumerThreads, "a thread finishes one pair of a tile");
  const bool is_paired = op == abi::kOpGateUp;
  const int32_t pairs = is_paired ? kHalf / 2 : kHalf;  // of one row of a tile
  const sync::FaultSink sink = fault_sink(p);
  const int32_t begin = own.begin, end = begin + own.count;
  const int32_t k_extent = p.ops[op].k_extent, k_panel = p.ops[op].k_panel;
  const int32_t thread = dialect::thread_idx(), warp = thread / 32, lane = thread % 32;
  const int32_t pitch = abi::panel_row_bytes(k_panel), finishers = finisher_warps(p.rows, pairs) * 32;
  const auto scales_of = [&](int32_t tile, int32_t k) { return load_block_scales<kElementBytes>(p, s, layer, op, tile, k, warp, lane); };
  OpScales<kElementBytes, Op> next_scales = scales_of(begin, 0);
  for (int32_t k0 = 0; k0 < k_extent; k0 += k_panel) {
    const int32_t k1 = min_int(k0 + k_panel, k_extent);
    const bool is_last_panel = k1 == k_extent;
    ops.load(op, k0, k1);
    for (int32_t tile = begin; tile < end; ++tile) {
      const bool is_late = !is_in_order && finishers < kConsumerThreads;  // all tiles but the last
      const bool has_late = is_late && tile > begin, has_barrier = !is_late || tile + 1 == end;
      // The tile that this warp finishes now: this one, or the one before; finishers of two consecutive tiles are different warps.
      const int32_t turn = is_in_order ? thread : (thread - (tile - begin) * finishers) & (kConsumerThreads - 1);
      const int32_t late_turn = (turn + finishers) & (kConsumerThreads - 1);
      const bool is_own = has_barrier && turn < finishers, has_target = is_own || (has_late && late_turn < finishers);
      const int32_t target = is_own ? tile : tile - 1, nth = is_own ? turn : late_turn;
      const int32_t m = nth % pairs * 2, n = nth / pairs;
      const bool is_finisher = has_target && n < p.rows;
      Early early{};
      if (is_last_panel && is_finisher) early = ops.before(op, target, m, n);
      RowScales<kElementBytes> row_scales;
      if (is_last_panel && is_finisher) row_scales = load_row_scales<kElementBytes>(p, s, layer, op, target, m);
      const OpScales<kElementBytes, Op> scales = next_scales;
      next_scales = scales_of(tile + 1 < end ? tile + 1 : begin, tile + 1 < end ? k0 : k1);
      WarpTile<kNTiles, kElementBytes> product;
      const int32_t stage_k = abi::stage_k(weight_bytes<kElementBytes>(op));
      for (int32_t k = k0; k < k1; k += stage_k) {
        if (!dialect::planted(dialect::Planted::kRingNoWait)) {
          sync::wait_mbarrier(sink, abi::kFaultRingFull, layer, cursor.stage, s.full(cursor.stage), cursor.parity);
        }
        if constexpr (kElementBytes == 1 && std::is_same_v<Op, MoeOp>) {
          if (op == abi::kOpRouter) {
            product.multiply_bf16(p, s, s.stage(cursor.stage), pitch, k - k0, min_int(stage_k, k1 - k), warp, lane);
          } else {
            product.multiply(p, s, s.stage(cursor.stage), pitch, k - k0, min_int(abi::stage_k(1), k1 - k), (k - k0) / abi::stage_k(1), warp, lane, scales);
          }
        } else {
          product.multiply(p, s, s.stage(cursor.stage), pitch, k - k0, min_int(stage_k, k1 - k), (k - k0) / stage_k, warp, lane, scales);
        }
        dialect::sync_warp();
        // Pairs with the producer's wait on `empty`: this warp's reads of the stage are done.
        if (lane == 0) dialect::mbarrier_arrive(s.empty(cursor.stage));
        cursor.advance(p.num_stages);
      }
      const int32_t half_floats = abi::kNumConsumerWarps * p.rows * abi::kScratchPitch;
      float* const own_half = s.scratch() + partial.half * half_floats;
      partial.half ^= 1u;
      if (has_late) {
        // Pairs with the arrivals below: every warp's part of the tile before, and what its finishers read of the one before that.
        if (!dialect::planted(dialect::Planted::kPartialNoWait)) {
          sync::wait_mbarrier(sink, abi::kFaultPartial, layer, op, s.partials(partial.half), partial.parities >> partial.half & 1u);
        }
        partial.parities ^= 1u << partial.half;
      }
      store_partial<kNTiles>(own_half + warp * p.rows * abi::kScratchPitch, p.rows, lane, product);
      if (has_barrier) sync_consumers();
      if (has_target) {
        const float* const target_half = is_own ? own_half : s.scratch() + partial.half * half_floats;
        const auto finish_sum = [&](int32_t row_in_tile, float (&y)[2]) {
          const float* column = target_half + n * abi::kScratchPitch + row_in_tile;
          y[0] = y[1] = 0.0f;
SGL_UNROLL
          for (int32_t w = 0; w < abi::kNumConsumerWarps; ++w) {
            const Float2 part = *reinterpret_cast<const Float2*>(column + w * p.rows * abi::kScratchPitch);
            y[0] += part.x;
            y[1] += part.y;
          }
          if (k_panel < k_extent) {  // several panels: only this thread touches these accumulators
            float* accumulator = s.accumulators() + (target - begin) * (p.rows * abi::kTileRows) + n * abi::kTileRows + row_in_tile;
SGL_UNROLL
            for (int32_t i = 0; i < 2; ++i) {
              if (k0 > 0) y[i] += accumulator[i];
              accumulator[i] = y[i];
            }
          }
        };
        TilePair pair{target, m, n, {}, {}};
        if (is_finisher) {
          finish_sum(m, pair.y);
          if (is_paired) finish_sum(m + kHalf, pair.up);
          if constexpr (kElementBytes == 1) {
SGL_UNROLL
            for (int32_t i = 0; i < 2; ++i) {
              pair.y[i] *= row_scales.y[i];
              if (is_paired) pair.up[i] *= row_scales.up[i];
            }
          }
        }
        if (is_last_panel) ops.finish(op, pair, is_finisher, early);
      }
      if (!has_barrier) {
        dialect::sync_warp();
        // Pairs with the wait above, a tile later: this warp's part is stored, and what it finished is read.
        if (lane == 0) dialect::mbarrier_arrive(s.partials(partial.half ^ 1u));
      }
      if (is_last_panel) ops.behind(op, tile - begin);
    }
  }
}

}  // namespace sgl_lowlatency::stages
