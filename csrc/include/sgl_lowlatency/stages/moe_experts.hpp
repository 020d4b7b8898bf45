// The experts of a MoE layer, on the block's routing (moe_routing.hpp):
//
//   activation[pair] = silu(gate[e] @ y[r]) * up[e] @ y[r]     for every pair (r, e);  y = mid_scaled / rms
//   x[r] += sum over the experts e of r, ascending, of weight[r, e] * down[e] @ activation[pair]
//
// Each weight tile of an active expert is read once, for all rows that chose it: the rows of the step are the columns of the MMA, as in a
// dense step, and a column whose row did not choose the expert reads zeros. kElementBytes: of an expert's weight, 2 bf16 or 1 FP8 in blocks.
#pragma once
#include "sgl_lowlatency/stages/gemm.hpp"
#include "sgl_lowlatency/stages/moe_ring.hpp"

namespace sgl_lowlatency::stages {

constexpr int32_t kMaxTilesPerSum = 8;  // of gate_up, behind one barrier

// The scales of a tile of gate_up of one expert, as load_block_scales: lane i has those of stage i. Asked for a tile ahead. Entry: all lanes of a
// consumer warp.
template <int32_t kElementBytes>
SGL_DEVICE BlockScales<kElementBytes> load_gate_up_scales(const DecodeStepParams& p, const Shared& s, int32_t layer, int32_t expert, int32_t tile) {
  BlockScales<kElementBytes> scales;
  if constexpr (kElementBytes == 1) {
    const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32;
    const int32_t num_blocks = p.ops[abi::kOpGateUp].k_extent / abi::kScaleBlock, channels = p.geometry.moe_intermediate;
    int32_t block = lane * abi::kStageChunks + warp;
    if (block >= num_blocks) return scales;
    if (dialect::planted(dialect::Planted::kWrongScaleBlock)) block = (block + 1) % num_blocks;
    const int32_t row = expert * 2 * channels + tile * (abi::kTileRows / 2);
    scales = block_scales_at(layer_scales(s, layer).of[abi::kOpGateUp], num_blocks, block, row, row + channels, true);
  }
  return scales;
}

// The scales of a tile of down, of a window of experts at a time: an expert has one or two stages, and each of the window's would be a trip to memory
// of its own. The window is 1 << log2 experts, as many as a warp has lanes for. Windows begin at multiples of their size.
struct ScaleWindow {
  int32_t log2 = 5;
  SGL_DEVICE explicit ScaleWindow(int32_t num_stages) {
    while (log2 > 0 && num_stages << log2 > 32) --log2;
  }
  SGL_DEVICE int32_t first(int32_t place) const { return place >> log2 << log2; }
  // The lane that has the scale of stage `stage` of the expert at `place`.
  SGL_DEVICE int32_t lane_of(int32_t place, int32_t stage) const { return (place & ((1 << log2) - 1)) + (stage << log2); }
};

// Of the window that begins at place `first`; entry: all lanes of a consumer warp.
template <int32_t kElementBytes>
SGL_DEVICE BlockScales<kElementBytes, false> load_down_scales(const DecodeStepParams& p, const Shared& s, int32_t layer, const MoeWork& work,
                                                              const ScaleWindow& window, int32_t first, int32_t tile) {
  BlockScales<kElementBytes, false> scales;
  if constexpr (kElementBytes == 1) {
    const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32;
    const int32_t num_blocks = p.ops[abi::kOpDown].k_extent / abi::kScaleBlock;
    const int32_t place = first + (lane & ((1 << window.log2) - 1));
    int32_t block = (lane >> window.log2) * abi::kStageChunks + warp;
    if (block >= num_blocks || place >= work.num_active()) return scales;
    if (dialect::planted(dialect::Planted::kWrongScaleBlock)) block = (block + 1) % num_blocks;
    const int32_t row = work.expert(place) * p.geometry.hidden + tile * abi::kTileRows;
    scales.first = block_scale_at(layer_scales(s, layer).of[abi::kOpDown], num_blocks, block, row);
  }
  return scales;
}

// Waits for the ring's next stage, multiplies it into `product` and frees it. index: the lane that has its scales. Entry: all lanes of every consumer
// warp.
template <int32_t kNTiles, int32_t kElementBytes, bool kIsPaired, class RowOf>
SGL_DEVICE void multiply_stage(const DecodeStepParams& p, const Shared& s, int32_t layer, RingCursor& cursor, WarpTile<kNTiles, kElementBytes>& product,
                               int32_t width, int32_t index, const BlockScales<kElementBytes, kIsPaired>& scales, const RowOf& row_of) {
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32;
  if (!dialect::planted(dialect::Planted::kRingNoWait)) {
    sync::wait_mbarrier(fault_sink(p), abi::kFaultRingFull, layer, cursor.stage, s.full(cursor.stage), cursor.parity);
  }
  product.multiply_rows(s.stage(cursor.stage), width, index, warp, lane, scales, row_of);
  dialect::sync_warp();
  // Pairs with the producer's wait on `empty`: this warp's reads of the stage are done.
  if (lane == 0) dialect::mbarrier_arrive(s.empty(cursor.stage));
  cursor.advance(p.num_stages);
}

// out[row_in_tile, row_in_tile + 1] of column n: the warps' parts in one order. half: of scratch.
SGL_DEVICE void sum_partials(const DecodeStepParams& p, const float* half, int32_t n, int32_t row_in_tile, float (&y)[2]) {
  const float* const column = half + n * abi::kScratchPitch + row_in_tile;
  y[0] = y[1] = 0.0f;
SGL_UNROLL
  for (int32_t w = 0; w < abi::kNumConsumerWarps; ++w) {
    const Float2 part = *reinterpret_cast<const Float2*>(column + w * p.rows * abi::kScratchPitch);
    y[0] += part.x;
    y[1] += part.y;
  }
}

SGL_DEVICE float* scratch_half(const DecodeStepParams& p, const Shared& s, uint32_t half) {
  return s.scratch() + half * (abi::kNumConsumerWarps * p.rows * abi::kScratchPitch);
}

// Where the parts of gate_up's tiles lie until they are summed: two halves of `per_sum` tiles each, behind the router's panel, which leaves room there
// with few rows; where it leaves none, in scratch, a tile each.
struct ExpertParts {
  float* base;
  int32_t per_sum;

  // most: tiles that a sum may have.
  SGL_DEVICE ExpertParts(const DecodeStepParams& p, const Shared& s, int32_t most) {
    const int32_t panel_bytes = p.rows * abi::panel_row_bytes(p.ops[abi::kOpGateUp].k_panel);
    per_sum = min_int(most, (p.max_panel_bytes - panel_bytes) / (2 * 4 * tile_floats(p)));
    base = per_sum > 1 ? reinterpret_cast<float*>(s.panel() + panel_bytes) : s.scratch();
    if (per_sum < 1) per_sum = 1;
  }
  SGL_DEVICE static int32_t tile_floats(const DecodeStepParams& p) { return abi::kNumConsumerWarps * p.rows * abi::kScratchPitch; }
  // nth: of the tiles of a sum.
  SGL_DEVICE float* tile(const DecodeStepParams& p, uint32_t half, int32_t nth) const {
    return base + (static_cast<int32_t>(half) * per_sum + nth) * tile_floats(p);
  }
};

// Where a block begins in gate_up; asked for as soon as the routing is there, since the first scales come from memory.
template <int32_t kElementBytes>
struct GateUpBegin {
  GateUpShare own;
  BlockScales<kElementBytes> scales;
};
// Entry: all consumer threads, behind route_rows.
template <int32_t kElementBytes>
SGL_DEVICE GateUpBegin<kElementBytes> begin_expert_gate_up(const DecodeStepParams& p, const Shared& s, int32_t layer) {
  const MoeWork work = moe_work(p, s);
  GateUpBegin<kElementBytes> begin{GateUpShare(p, work.num_active()), {}};
  if (begin.own.left > 0) begin.scales = load_gate_up_scales<kElementBytes>(p, s, layer, work.expert(begin.own.place), begin.own.tile);
  return begin;
}

// The block's share of the active experts' gate and up tiles. Several tiles are multiplied before a barrier, and then summed side by side, by a warp
// or two each: what a sum costs is paid once for all of them. The parts of the next ones go to the other half meanwhile; who stores to this half again
// is behind the next barrier, and so are this half's readers.
// Entry: all consumer threads, behind route_rows; the panel is the router's: mid_scaled, all of K; Row::inverse_rms is published. The panel is free
// behind it. Some threads may still read scratch, as in run_tiles.
template <int32_t kNTiles, int32_t kElementBytes>
SGL_DEVICE void run_expert_gate_up(const DecodeStepParams& p, const Shared& s, int32_t layer, const GateUpBegin<kElementBytes>& begin,
                                   RingCursor& cursor, PartialCursor& partial) {
  constexpr int32_t kHalf = abi::kTileRows / 2, kPairs = kHalf / 2, kStageK = abi::stage_k(kElementBytes);
  constexpr int32_t kTileThreads = kNTiles * 8 * kPairs;  // that sum a tile
  constexpr int32_t kMaxPerSum = kConsumerThreads / kTileThreads < kMaxTilesPerSum ? kConsumerThreads / kTileThreads : kMaxTilesPerSum;
  const MoeWork work = moe_work(p, s);
  const abi::OpPlan& op = p.ops[abi::kOpGateUp];
  const int32_t thread = dialect::thread_idx(), warp = thread / 32, lane = thread % 32, pitch = abi::panel_row_bytes(op.k_panel);
  const int32_t m = thread % kPairs * 2, n = thread / kPairs % (kNTiles * 8), nth_own = thread / kTileThreads;
  const auto scales_of = [&](const GateUpShare& at) {
    return at.left > 0 ? load_gate_up_scales<kElementBytes>(p, s, layer, work.expert(at.place), at.tile) : BlockScales<kElementBytes>{};
  };
  const ExpertParts parts(p, s, kMaxPerSum);
  GateUpShare own = begin.own;
  BlockScales<kElementBytes> next_scales = begin.scales;
SGL_NO_UNROLL
  while (own.left > 0) {
    GateUpShare summed = own;  // the tile that this thread sums: number nth_own of these
    const int32_t count = min_int(own.left, parts.per_sum);
    summed.advance_by(nth_own, op.num_tiles);
SGL_NO_UNROLL
    for (int32_t nth = 0; nth < count; ++nth) {
      const uint32_t row_bits = work.routing().row_bits()[work.expert(own.place)];
      own.advance(op.num_tiles);
      const BlockScales<kElementBytes> scales = next_scales;
      next_scales = scales_of(own);
      WarpTile<kNTiles, kElementBytes> product;
SGL_NO_UNROLL
      for (int32_t k = 0; k < op.k_extent; k += kStageK) {
        multiply_stage<kNTiles>(p, s, layer, cursor, product, min_int(kStageK, op.k_extent - k), k / kStageK, scales, [&](int32_t row) {
          const bool is_row = (row_bits >> row & 1u) != 0;
          const char* const at = s.panel() + row * pitch + (k + warp * abi::chunk_k(kElementBytes) + lane / 8 * 8) * 2;
          return PanelRow{is_row ? at : s.zero_row(), is_row ? 64 : 0};
        });
      }
      store_partial<kNTiles>(parts.tile(p, partial.half, nth) + warp * p.rows * abi::kScratchPitch, p.rows, lane, product);
    }
    const float* const tile_parts = parts.tile(p, partial.half, nth_own);
    partial.half ^= 1u;
    if (!dialect::planted(dialect::Planted::kPartialNoWait)) sync_consumers();
    if (nth_own >= count || n >= p.rows) continue;
    const uint32_t row_bits = work.routing().row_bits()[work.expert(summed.place)];
    if ((row_bits >> n & 1u) == 0) continue;
    float gate[2], up[2], out[2];
    sum_partials(p, tile_parts, n, m, gate);
    sum_partials(p, tile_parts, n, m + kHalf, up);
    const float inverse_rms = s.rows()->row[n].inverse_rms;
SGL_UNROLL
    for (int32_t j = 0; j < 2; ++j) out[j] = swiglu(gate[j] * inverse_rms, up[j] * inverse_rms);
    uint32_t words[1] = {pack_bf16(out[0], out[1])};
    const int32_t pair = work.first_pairs()[summed.place] + rows_below(row_bits, n), neuron = summed.tile * kHalf + m;
    sync::publish(handover_buffer(p, s, layer, p.at.activation) + (static_cast<int64_t>(pair) * p.geometry.moe_intermediate + neuron) / 2, words);
  }
  if (parts.per_sum > 1) sync_consumers();  // the parts in the panel are read
}

// Fills the panel with the activations of pairs [begin, end), a row each. Entry: all consumer threads; the panel is free. A consumer barrier must
// follow.
template <int32_t kElementBytes>
SGL_DEVICE void load_pairs(const DecodeStepParams& p, const Shared& s, int32_t layer, int32_t begin, int32_t end) {
  constexpr int32_t kVec = 8, kBatch = 4;
  const sync::Awaited source = awaited(p, s, layer, p.at.activation, abi::kEdgeGateUp);
  const int32_t k_extent = p.geometry.moe_intermediate, num_vecs = k_extent / kVec, pitch = abi::panel_row_bytes(k_extent);
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32;
  for (int32_t pair = begin + warp; pair < end; pair += abi::kNumConsumerWarps) {
    for (int32_t first = lane; first < num_vecs; first += kBatch * 32) {
      char* const out = s.panel() + (pair - begin) * pitch;
      copy_vectors<kElementBytes, 1, kBatch>(p, source, static_cast<int64_t>(pair) * (k_extent / 2), 0, 1, first, 32, num_vecs, out, 0);
    }
  }
}

// A warp's part of a tile of the rows' sums, in fp32: what an expert's product has for a column, times the row's weight. A column whose row did not
// choose the expert is left alone.
template <int32_t kNTiles>
struct WeightedTile {
  float c[kNTiles][4] = {};

  SGL_DEVICE float sum(int32_t t, int32_t i) const { return c[t][i]; }

  // weights: of the expert's pairs, by row.
  template <int32_t kElementBytes>
  SGL_DEVICE void add(const WarpTile<kNTiles, kElementBytes>& product, uint32_t row_bits, const float* weights, int32_t lane) {
SGL_UNROLL
    for (int32_t t = 0; t < kNTiles; ++t) {
SGL_UNROLL
      for (int32_t j = 0; j < 2; ++j) {
        const int32_t n = t * 8 + lane % 4 * 2 + j;
        if ((row_bits >> n & 1u) == 0) continue;
        const float weight = dialect::planted(dialect::Planted::kUnweightedExpert) ? 1.0f : weights[rows_below(row_bits, n)];
        c[t][j] += weight * product.sum(t, j);
        c[t][j + 2] += weight * product.sum(t, j + 2);
      }
    }
  }
};

// The block's own tiles of `down`: a tile is 16 channels of the stream, summed over all active experts. ops: before and finish of kOpDown, as
// run_tiles calls them. The experts' activations come in as many panels as it takes; the next panel overwrites the last one behind a barrier.
// Entry: all consumer threads; panel and scratch are free. Behind the last tile some threads still read scratch, as in run_tiles.
template <int32_t kNTiles, int32_t kElementBytes, class Ops>
SGL_DEVICE void run_expert_down(const DecodeStepParams& p, const Shared& s, int32_t layer, RingCursor& cursor, PartialCursor& partial,
                                const Ops& ops) {
  constexpr int32_t kPairs = abi::kTileRows / 2, kStageK = abi::stage_k(kElementBytes);
  const MoeWork work = moe_work(p, s);
  const abi::TileRange own = s.rows()->tiles[abi::kOpDown];
  const int32_t k_extent = p.geometry.moe_intermediate, pitch = abi::panel_row_bytes(k_extent), num_active = work.num_active();
  const int32_t thread = dialect::thread_idx(), warp = thread / 32, lane = thread % 32;
  const int32_t m = thread % kPairs * 2, n = thread / kPairs;
  const bool has_finisher = warp * 32 < finisher_warps(p.rows, kPairs) * 32, is_finisher = n < p.rows;
  const int32_t* const first_pairs = work.first_pairs();
  int32_t loaded = -1;  // the place that the panel begins with
  const auto bits_of = [&](int32_t place) { return work.routing().row_bits()[work.expert(place)]; };
  uint32_t next_bits = num_active > 0 ? bits_of(0) : 0u;  // of a step that is all padding no expert is active
  const ScaleWindow window((k_extent + kStageK - 1) / kStageK);
  const auto scales_of = [&](int32_t first, int32_t tile) {
    return tile < own.begin + own.count ? load_down_scales<kElementBytes>(p, s, layer, work, window, first, tile) : BlockScales<kElementBytes, false>{};
  };
  BlockScales<kElementBytes, false> scales, next_scales = scales_of(0, own.begin);
SGL_NO_UNROLL
  for (int32_t tile = own.begin; tile < own.begin + own.count; ++tile) {
    Early early{};
    if (is_finisher) early = ops.before(StaticOp<abi::kOpDown>{}, tile, m, n);
    WeightedTile<kNTiles> total;
SGL_NO_UNROLL
    for (int32_t begin = 0, end = 0; begin < num_active; begin = end) {
      while (end < num_active && first_pairs[end + 1] - first_pairs[begin] <= p.panel_pairs) ++end;
      if (loaded != begin) {
        if (loaded >= 0) sync_consumers();  // every warp is done with the panel
        load_pairs<kElementBytes>(p, s, layer, first_pairs[begin], first_pairs[end]);
        sync_consumers();
        loaded = begin;
      }
SGL_NO_UNROLL
      for (int32_t place = begin; place < end; ++place) {
        const uint32_t row_bits = next_bits;
        next_bits = bits_of(place + 1 < num_active ? place + 1 : 0);
        const char* const rows = s.panel() + (first_pairs[place] - first_pairs[begin]) * pitch;
        if (place == window.first(place)) {
          const int32_t next = place + (1 << window.log2);
          scales = next_scales;
          next_scales = next < num_active ? scales_of(next, tile) : scales_of(0, tile + 1);
        }
        WarpTile<kNTiles, kElementBytes> product;
SGL_NO_UNROLL
        for (int32_t k = 0; k < k_extent; k += kStageK) {
          const int32_t index = window.lane_of(place, k / kStageK);
          multiply_stage<kNTiles>(p, s, layer, cursor, product, min_int(kStageK, k_extent - k), index, scales, [&](int32_t row) {
            const bool is_row = (row_bits >> row & 1u) != 0;
            const char* const at = rows + rows_below(row_bits, row) * pitch + (k + warp * abi::chunk_k(kElementBytes) + lane / 8 * 8) * 2;
            return PanelRow{is_row ? at : s.zero_row(), is_row ? 64 : 0};
          });
        }
        total.add(product, row_bits, work.pair_weights() + first_pairs[place], lane);
      }
    }
    float* const half = scratch_half(p, s, partial.half);
    partial.half ^= 1u;
    store_partial<kNTiles>(half + warp * p.rows * abi::kScratchPitch, p.rows, lane, total);
    sync_consumers();
    if (!has_finisher) continue;
    TilePair pair{tile, m, n, {}, {}};
    if (is_finisher) sum_partials(p, half, n, m, pair.y);
    ops.finish(StaticOp<abi::kOpDown>{}, pair, is_finisher, early);
  }
}

}  // namespace sgl_lowlatency::stages
