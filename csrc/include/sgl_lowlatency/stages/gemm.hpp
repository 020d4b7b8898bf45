// out[n, m] = sum_k weight[m, k] * panel[n, k] for the block's tiles of one matrix: m16n8k16 MMAs, K split over the eight
// consumer warps, partial tiles added across warps in warp order (bitwise repeatable).
#pragma once
#include "sgl_lowlatency/stages/panel.hpp"

namespace sgl_lowlatency::stages {

// One stage's share of a tile: warp w takes K elements 64 w .. 64 w + 63 of the stage. Entry: all lanes of a consumer warp, the
// stage is full. pitch: bytes of a panel row; k_local: the stage's first column in the panel; width: K elements of the stage, a
// multiple of 64; c: two sums an N tile, even and odd k16 steps, so that consecutive MMAs do not depend on each other.
template <int32_t kNTiles>
SGL_DEVICE void multiply_stage(const DecodeStepParams& p, const Shared& s, const char* stage, int32_t pitch, int32_t k_local, int32_t width,
                               int32_t warp, int32_t lane, float (&c)[kNTiles][2][4]) {
  constexpr int32_t kWarpK = abi::kStageK / abi::kNumConsumerWarps, kPairs = kWarpK / 32;
  static_assert(kWarpK % 64 == 0, "whole pairs of k16 steps, and widths are multiples of 64");
  const char* a_row = stage + (lane % 16) * abi::kStagePitchBytes + (warp * kWarpK + lane / 16 * 8) * 2;
  const char* b_row[kNTiles];
  int32_t b_step[kNTiles];
SGL_UNROLL
  for (int32_t t = 0; t < kNTiles; ++t) {
    const int32_t row = t * 8 + lane % 8;
    const bool is_row = row < p.rows;
    b_row[t] = is_row ? s.panel() + row * pitch + (k_local + warp * kWarpK + lane / 8 * 8) * 2 : s.zero_row();
    b_step[t] = is_row ? 64 : 0;  // bytes of 32 K elements; rows beyond p.rows read zeros
  }
SGL_UNROLL
  for (int32_t pair = 0; pair < kPairs; ++pair) {
    if (warp * kWarpK + pair * 32 >= width) break;
    uint32_t a0[4], a1[4];
    dialect::ldmatrix_x4(a0, a_row + pair * 64);
    dialect::ldmatrix_x4(a1, a_row + pair * 64 + 32);
SGL_UNROLL
    for (int32_t t = 0; t < kNTiles; ++t) {
      uint32_t b[4];
      dialect::ldmatrix_x4(b, b_row[t] + pair * b_step[t]);
      const uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
      dialect::mma_m16n8k16(c[t][0], a0, b0);
      dialect::mma_m16n8k16(c[t][1], a1, b1);
    }
  }
}

// Stores a warp's partial tile as [column][kScratchPitch] floats: column n, then tile row m.
template <int32_t kNTiles>
SGL_DEVICE void store_partial(float* scratch, int32_t lane, const float (&c)[kNTiles][2][4]) {
SGL_UNROLL
  for (int32_t t = 0; t < kNTiles; ++t) {
    float* column = scratch + (t * 8 + lane % 4 * 2) * abi::kScratchPitch + lane / 4;
    column[0] = c[t][0][0] + c[t][1][0];
    column[abi::kScratchPitch] = c[t][0][1] + c[t][1][1];
    column[8] = c[t][0][2] + c[t][1][2];
    column[abi::kScratchPitch + 8] = c[t][0][3] + c[t][1][3];
  }
}

// One operation's tiles of this block. Ops is the caller's table of what differs between the four operations:
//   ops.load<kOp>(k0, k1)             fills the panel (load_panel)
//   ops.before<kOp>(tile, m, n)       an early load, handed to finish as it came (a conversion would wait for it)
//   ops.finish<kOp>(tile, m, n, y, y8, early)  y = out[n, m]; y8 = out[n, m + 8], for gate_up only; called for n < rows
// A gate_up tile is finished by half as many threads, each with both factors of its SwiGLU.
// Entry: all consumer threads; panel and scratch are free. Some threads return while others still store: follow with a barrier.
template <int32_t kNTiles, int32_t kOp, class Ops>
SGL_DEVICE void run_tiles(const DecodeStepParams& p, const Shared& s, int32_t layer, RingCursor& cursor, uint32_t& scratch_parity, const Ops& ops) {
  constexpr int32_t kColumns = kNTiles * 8, kHalf = abi::kTileRows / 2;
  constexpr bool kPaired = kOp == abi::kOpGateUp;
  const sync::FaultSink sink = fault_sink(p);
  const int32_t begin = s.rows()->tiles[kOp].begin, end = begin + s.rows()->tiles[kOp].count;
  const int32_t k_extent = p.ops[kOp].k_extent, k_panel = p.ops[kOp].k_panel;
  const int32_t thread = dialect::thread_idx(), warp = thread / 32, lane = thread % 32;
  const int32_t pitch = abi::panel_row_bytes(k_panel);
  const int32_t m = kPaired ? thread % kHalf : thread % abi::kTileRows, n = kPaired ? thread / kHalf : thread / abi::kTileRows;
  const bool is_finisher = n < kColumns && n < p.rows;

  for (int32_t k0 = 0; k0 < k_extent; k0 += k_panel) {
    const int32_t k1 = min_int(k0 + k_panel, k_extent);
    const bool is_last_panel = k1 == k_extent;
    ops.template load<kOp>(k0, k1);
    for (int32_t tile = begin; tile < end; ++tile) {
      bf16 early{};
      if (is_last_panel && is_finisher) early = ops.template before<kOp>(tile, m, n);
      float c[kNTiles][2][4] = {};
      for (int32_t k = k0; k < k1; k += abi::kStageK) {
        if (!dialect::planted(dialect::Planted::kRingNoWait)) {
          sync::wait_mbarrier(sink, abi::kFaultRingFull, layer, cursor.stage, s.full(cursor.stage), cursor.parity);
        }
        multiply_stage<kNTiles>(p, s, s.stage(cursor.stage), pitch, k - k0, min_int(abi::kStageK, k1 - k), warp, lane, c);
        dialect::sync_warp();
        // Pairs with the producer warps' wait on `empty`: this warp's reads of the stage are done.
        if (lane == 0) dialect::mbarrier_arrive(s.empty(cursor.stage));
        cursor.advance(p.num_stages);
      }
      float* partials = s.scratch() + scratch_parity * (abi::kNumConsumerWarps * kColumns * abi::kScratchPitch);
      scratch_parity ^= 1u;  // two buffers: the next tile's partials need no second barrier
      store_partial<kNTiles>(partials + warp * kColumns * abi::kScratchPitch, lane, c);
      sync_consumers();
      if (!is_finisher) continue;
      const auto finish_sum = [&](int32_t row_in_tile) {
        const float* column = partials + n * abi::kScratchPitch + row_in_tile;
        float y = 0.0f;
SGL_UNROLL
        for (int32_t w = 0; w < abi::kNumConsumerWarps; ++w) y += column[w * kColumns * abi::kScratchPitch];
        if (k_panel < k_extent) {  // several panels: only this thread touches this accumulator
          float* accumulator = s.accumulators() + (tile - begin) * (kColumns * abi::kTileRows) + n * abi::kTileRows + row_in_tile;
          if (k0 > 0) y += *accumulator;
          *accumulator = y;
        }
        return y;
      };
      const float y = finish_sum(m), y8 = kPaired ? finish_sum(m + kHalf) : 0.0f;
      if (is_last_panel) ops.template finish<kOp>(tile, m, n, y, y8, early);
    }
  }
}

}  // namespace sgl_lowlatency::stages
