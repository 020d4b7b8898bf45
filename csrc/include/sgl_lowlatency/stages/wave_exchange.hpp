// Sums over ranks inside k2: partial tiles go from registers to every rank's workspace (stages/pushed_tiles.hpp), and the owner of a tile adds those of all
// ranks, in rank order, while other workgroups still produce.
#pragma once
#include "sgl_lowlatency/stages/pushed_tiles.hpp"
#include "sgl_lowlatency/stages/wave_rows.hpp"

namespace sgl_lowlatency::stages {

// Tile number of tile `tile` of exchange `exchange` in the ranks' workspaces.
SGL_DEVICE int32_t exchange_tile(const abi::Geometry& g, int32_t exchange, int32_t tile) { return exchange * (g.hidden / abi::kTileRows) + tile; }

// The tiles that a block owns of a sum over ranks: those it makes of out_proj and down.
SGL_DEVICE abi::TileRange owned_tiles(const MonoLaunch& l) { return abi::even_share(l.geometry.hidden / abi::kTileRows, dialect::block_idx(), l.grid); }

// Sums of the block's tiles of an exchange. finish(row, column, sums): four columns. Entry: all threads. A thread orders its reads itself (order_reads).
template <class Finish>
SGL_DEVICE void sum_tiles(const MonoLaunch& l, int32_t parity, int32_t exchange, const Finish& finish) {
  const abi::TileRange own = owned_tiles(l);
  const sync::Peers peers = peers_of(l);
SGL_NO_UNROLL
  for (int32_t i = dialect::thread_idx(); i < own.count * l.rows * (abi::kTileRows / 4); i += abi::kMonoThreads) {
    const int32_t tile = own.begin + i / (l.rows * (abi::kTileRows / 4)), row = i / (abi::kTileRows / 4) % l.rows, m = i % (abi::kTileRows / 4) * 4;
    float sums[4];
    await_pushed<abi::kMaxRanks>(peer_sink(l), peers, l.layer, parity, exchange_tile(l.geometry, exchange, tile), row, m, sums);
    finish(row, tile * abi::kTileRows + m, sums);
  }
}

}  // namespace sgl_lowlatency::stages
