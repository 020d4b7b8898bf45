// The consumers' part of one FP8 product of a slice: rows times the block's units of a matrix, tiles of kTallRows rows of which each of the eight
// warps has sixteen for itself. A warp's sums stay in its registers over all of the unit's columns and are finished from there: warps meet at panels
// alone.
#pragma once
#include "sgl_lowlatency/stages/block_scaled_tile.hpp"
#include "sgl_lowlatency/stages/slice_state.hpp"

namespace sgl_lowlatency::stages {

// Calls finish(n, m, y) with a warp's finished values: y are rows m, m + 1 of the unit, of activations' row n < rows. A lane of the MMA's result has
// rows g and g + 8 of columns 2t, 2t + 1: neighbouring lanes of g swap one each. Entry: all lanes of the warp.
template <int32_t kNTiles, class Finish>
SGL_DEVICE void visit_tall_pairs(const BlockScaledTile<kNTiles>& tile, int32_t rows, int32_t warp, int32_t lane, const Finish& finish) {
  const bool is_odd = (lane / 4) % 2 != 0;
SGL_UNROLL
  for (int32_t t = 0; t < kNTiles; ++t) {
SGL_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      const float first = tile.sum(t, half * 2), second = tile.sum(t, half * 2 + 1);
      const float other = dialect::shuffle_xor(is_odd ? first : second, 4);
      const int32_t n = t * 8 + lane % 4 * 2 + is_odd, m = warp * abi::kTileRows + half * 8 + lane / 8 * 2;
      if (n < rows) finish(n, m, is_odd ? Float2{other, second} : Float2{first, other});
    }
  }
}

// Units `own` of operation `op`, number i being unit_of(i). Its columns pass in sections, as many as the panel holds. load(k0, k1): fills the panel
// with columns [k0, k1) and ends with a consumer barrier; called where they change. scales: of the matrix, scale_pitch floats for each
// kSliceScaleBlock rows; lane l has those of the section's stage l, asked for a section ahead. finish(unit, n, m, y): as of visit_tall_pairs.
// Entry: all consumer threads.
template <int32_t kNTiles, class UnitOf, class Load, class Finish>
SGL_DEVICE void run_tall_op(sync::FaultSink sink, const SliceShared& s, int32_t rows, int32_t op, const float* scales, int32_t scale_pitch,
                            const abi::TileRange& own, const UnitOf& unit_of, const Load& load, const Finish& finish, SliceConsumer& state) {
  using Tile = BlockScaledTile<kNTiles>;
  static_assert(abi::kTallRows == abi::kNumConsumerWarps * abi::kTileRows, "a warp has one chunk of a tall stage");
  static_assert(Tile::kFactors == 4, "a stage's scales are a vector");
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32, pitch = abi::panel_row_bytes(s.at.panel_k);
  const int32_t most_columns = min_int(s.at.panel_k / abi::kTallK, 32) * abi::kTallK;  // of a section: a stage a lane
  const auto scales_of = [&](const SliceUnit& unit, int32_t k) {
    Vec16 of{};
    if (k + lane * abi::kTallK >= unit.k1) return of;
    const int64_t block = (unit.row + warp * abi::kTileRows) / abi::kSliceScaleBlock;
    return dialect::load_constant(reinterpret_cast<const Vec16*>(scales + block * scale_pitch + k / abi::kSliceScaleBlock) + lane);
  };
  if (own.count == 0) return;
  SliceUnit unit = unit_of(own.begin);
  Vec16 next_scales = scales_of(unit, unit.k0);
  int32_t panel_k0 = -1, panel_k1 = -1;
SGL_NO_UNROLL
  for (int32_t i = own.begin; i < own.begin + own.count; ++i) {
    const SliceUnit next_unit = i + 1 < own.begin + own.count ? unit_of(i + 1) : unit;
    Tile tile;
SGL_NO_UNROLL
    for (int32_t k0 = unit.k0; k0 < unit.k1; k0 += most_columns) {
      const int32_t k1 = min_int(k0 + most_columns, unit.k1), num_stages = (k1 - k0) / abi::kTallK;
      if (k0 != panel_k0 || k1 != panel_k1) {
        if (panel_k0 >= 0) sync_consumers();  // everybody has read what the panel holds
        load(k0, k1);
        panel_k0 = k0;
        panel_k1 = k1;
      }
      uint32_t own_factors[Tile::kFactors];
SGL_UNROLL
      for (int32_t f = 0; f < Tile::kFactors; ++f) own_factors[f] = fp8_factor(dialect::bits_to_float(next_scales.w[f]));
      if (k1 < unit.k1) {
        next_scales = scales_of(unit, k1);
      } else if (i + 1 < own.begin + own.count) {
        next_scales = scales_of(next_unit, next_unit.k0);
      }
SGL_NO_UNROLL
      for (int32_t n = 0; n < num_stages; ++n) {
        uint32_t factors[Tile::kFactors];
SGL_UNROLL
        for (int32_t f = 0; f < Tile::kFactors; ++f) factors[f] = dialect::shuffle(own_factors[f], n);
        if (!dialect::planted(dialect::Planted::kRingNoWait)) {
          sync::wait_mbarrier(sink, abi::kFaultRingFull, op, state.at.stage, s.full(state.at.stage), state.at.parity);
        }
        dialect::sync_warp();
        tile.multiply(s.stage(state.at.stage), warp, lane, factors, [&](int32_t row) {
          const bool is_row = row < rows;
          return PanelRow{is_row ? s.panel() + row * pitch + (n * abi::kTallK + lane / 8 * 8) * 2 : s.zero_row(), is_row ? 64 : 0};
        });
        dialect::sync_warp();
        // Pairs with the producer's wait for `empty`: the warp has read the stage.
        if (lane == 0) dialect::mbarrier_arrive(s.empty(state.at.stage));
        state.at.advance(s.at.num_stages);
      }
    }
    visit_tall_pairs(tile, rows, warp, lane, [&](int32_t n, int32_t m, const Float2& y) { finish(unit, n, m, y); });
    unit = next_unit;
  }
}

}  // namespace sgl_lowlatency::stages
