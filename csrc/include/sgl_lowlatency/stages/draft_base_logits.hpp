// Base logits of a draft block: base_logits[n, m] = bf16(sum_k head[m, k] * x[n, k]), x = hidden_states, normed where the draft asks for it.
//
// A pair of consumer warps has a tile, 16 rows of the LM head, to itself: of every stage each warp takes half of K, and at the tile's end they add
// up, the second one's sum on top of the first one's. No other warp takes part, and results repeat bit by bit.
#pragma once
#include "sgl_lowlatency/stages/draft_gumbel.hpp"
#include "sgl_lowlatency/stages/draft_panel.hpp"
#include "sgl_lowlatency/stages/draft_ring.hpp"
#include "sgl_lowlatency/stages/draft_tile.hpp"
#include "sgl_lowlatency/stages/draft_timeline.hpp"

namespace sgl_lowlatency::stages {

constexpr int32_t kPairBarrier = 2;  // named barrier of pair 0; those of the others follow

// Adds up a pair's halves of a tile and stores the base logits. tile: of the block. Entry: both warps of the pair, all lanes. half: of the exchange
// buffer, the one that takes the next sums; two uses of the same half have a barrier of the other between them.
template <int32_t kNTiles, int32_t kAtOnce>
SGL_DEVICE void finish_draft_tile(const DraftSamplerParams& p, const DraftShared& s, const DraftBlock& b, int32_t rows, int32_t tile, int32_t& half,
                                  const DraftTile<kNTiles, kAtOnce>& product) {
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32, pair = warp / 2;
  const abi::DraftRank& own = p.ranks[b.local_rank];
  const int32_t pitch = own.num_units * abi::kUnitColumns, column = (b.units.begin * 2 + tile) * abi::kTileRows + lane / 4;
SGL_UNROLL
  for (int32_t first = 0; first < kNTiles; first += abi::kExchangeTiles) {
    float* const at = s.exchange() + (half * abi::kDraftPairs + pair) * (abi::kExchangeTiles * 4 * 32) + lane;
    half ^= 1;
    if (warp % 2 != 0) {
SGL_UNROLL
      for (int32_t t = first; t < kNTiles && t < first + abi::kExchangeTiles; ++t) {
SGL_UNROLL
        for (int32_t i = 0; i < 4; ++i) at[((t - first) * 4 + i) * 32] = product.sum(t, i);
      }
    }
    dialect::sync_named(kPairBarrier + pair, 64);
    if (warp % 2 != 0) continue;
SGL_UNROLL
    for (int32_t t = first; t < kNTiles && t < first + abi::kExchangeTiles; ++t) {
SGL_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        const int32_t row = t * 8 + lane % 4 * 2 + i % 2;
        const float sum = product.sum(t, i) + at[((t - first) * 4 + i) * 32];
        if (row < rows) dialect::store_plain(own.base_logits + static_cast<int64_t>(row) * pitch + column + i / 2 * 8, dialect::to_bf16(sum));
      }
    }
  }
}

// Entry: all consumer threads; the ring is filled, the panels have begun. kNTiles: of 8 rows, enough for all. kAtOnce: p.tiles_at_once. noise, of all
// steps, and meanwhile(): done while weights stream, the second once, behind a consumer barrier. Ends with a consumer barrier, which publishes the
// block's base logits and noise to its own threads; nobody else reads them in this launch.
template <int32_t kNTiles, int32_t kAtOnce, class Clock, class Meanwhile>
SGL_DEVICE void run_draft_head(const DraftSamplerParams& p, const DraftShared& s, const DraftBlock& b, DraftFeed& feed, const DraftPanels& panels,
                               DraftGumbel noise, const Clock& clock, const Meanwhile& meanwhile) {
  const sync::FaultSink sink = fault_sink(p, b.rank);
  const int32_t rows = p.batch * p.gamma, stage_k = abi::stage_k(2), chunk_k = abi::chunk_k(2), pitch = abi::panel_row_bytes(p.k_panel);
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32, pair = warp / 2;
  constexpr int32_t kHalfChunks = abi::kStageChunks / 2, kWalkTiles = abi::kDraftPairs * kAtOnce;
  const int32_t num_walks = ceil_div(b.num_tiles, kWalkTiles), num_panels = ceil_div(p.hidden, p.k_panel);
  const int32_t quota = num_walks == 0 ? 0 : noise.quota(num_walks * num_panels);
  int32_t count = 0, half = 0, number = 0;  // number: of the panel
SGL_NO_UNROLL
  for (int32_t first = 0; first < b.num_tiles; first += kWalkTiles) {
    DraftTile<kNTiles, kAtOnce> products[kAtOnce];
SGL_NO_UNROLL
    for (int32_t k0 = 0; k0 < p.hidden; k0 += p.k_panel, ++number) {
      const int32_t k1 = min_int(k0 + p.k_panel, p.hidden);
      if (number == 0 || !panels.is_whole()) panels.take(number, k0, k1, number + 1 == num_walks * num_panels);
      if (number == 0) clock.stamp(abi::kDraftPanel);
      const char* const panel = panels.at(panels.is_whole() ? 0 : number);
SGL_UNROLL
      for (int32_t turn = 0; turn < kAtOnce; ++turn) {
        if (first + turn * abi::kDraftPairs + pair >= b.num_tiles) continue;
        for (int32_t k = k0; k < k1; k += stage_k) {
          const DraftPlace at = draft_place(pair, count++);
          if (!dialect::planted(dialect::Planted::kRingNoWait)) {
            sync::wait_mbarrier(sink, abi::kFaultRingFull, 0, at.stage, s.full(at.stage), at.parity());
          }
          const int32_t begin = warp % 2 * kHalfChunks, end = min_int(begin + kHalfChunks, (k1 - k) / chunk_k);
SGL_NO_UNROLL
          for (int32_t chunk = begin; chunk < end; ++chunk) {
            products[turn].multiply(s.stage(at.stage), chunk, lane, [&](int32_t row) {
              const bool is_row = row < rows;
              return PanelRow{is_row ? panel + row * pitch + (k - k0 + chunk * chunk_k + lane / 8 * 8) * 2 : s.zero_row(), is_row ? 64 : 0};
            });
          }
          feed.give_back(at.stage);
        }
      }
      if (number == 0) meanwhile();
      noise.make(quota);
    }
SGL_UNROLL
    for (int32_t turn = 0; turn < kAtOnce; ++turn) {
      const int32_t tile = first + turn * abi::kDraftPairs + pair;
      if (tile < b.num_tiles) finish_draft_tile(p, s, b, rows, tile, half, products[turn]);
    }
  }
  clock.stamp(abi::kDraftHead);
  sync_consumers();
  if (b.num_tiles == 0) meanwhile();
  clock.stamp(abi::kDraftBase);
}

}  // namespace sgl_lowlatency::stages
