// Sums over ranks inside k2: partial tiles go from registers to every rank's workspace (stages/pushed_tiles.hpp), and the owner of a tile adds those
// of all ranks, in rank order, while other workgroups still produce.
#pragma once
#include "sgl_lowlatency/stages/pushed_tiles.hpp"
#include "sgl_lowlatency/stages/wave_rows.hpp"

namespace sgl_lowlatency::stages {

// Tile number of tile `tile` of exchange `exchange` in the ranks' workspaces.
SGL_DEVICE int32_t exchange_tile(const abi::Geometry& g, int32_t exchange, int32_t tile) { return exchange * (g.hidden / abi::kTileRows) + tile; }

// The tiles that a block owns of a sum over ranks: those it makes of out_proj and down.
SGL_DEVICE abi::TileRange owned_tiles(const MonoLaunch& l) {
  return abi::even_share(l.geometry.hidden / abi::kTileRows, dialect::block_idx(), l.grid);
}

// Sums of the block's tiles of an exchange: a lane waits for four columns of one rank, then the lanes of the same columns are added in rank order.
// finish(row, column, sums): four columns. Entry: all threads. order_reads follows, before the launch ends.
template <class Finish>
SGL_DEVICE void sum_tiles(const MonoLaunch& l, int32_t parity, int32_t exchange, const Finish& finish) {
  const abi::TileRange own = owned_tiles(l);
  constexpr int32_t kVectors = abi::kTileRows / 4;
  const int32_t num_ranks = l.symmetric.num_ranks;
  const int32_t lanes = num_ranks == 1 ? 1 : num_ranks == 2 ? 2 : num_ranks <= 4 ? 4 : 8;  // of four columns, one a rank
  const int32_t rank = dialect::thread_idx() % lanes, first = lane_idx() - rank, total = own.count * l.rows * kVectors * lanes;
SGL_NO_UNROLL
  for (int32_t begin = 0; begin < total; begin += abi::kMonoThreads) {
    const int32_t i = begin + dialect::thread_idx(), item = i / lanes;
    const int32_t tile = own.begin + item / (l.rows * kVectors), row = item / kVectors % l.rows, m = item % kVectors * 4;
    uint32_t words[4] = {};
    if (i < total && rank < num_ranks) {
      const MonoLaunch& again = dialect::read_again(l);
      await_rank(peer_sink(again), peers_of(again), again.layer, parity, rank, exchange_tile(again.geometry, exchange, tile), row, m, words);
    }
    float sums[4];
SGL_UNROLL
    for (int32_t j = 0; j < 4; ++j) {
      sums[j] = dialect::bits_to_float(dialect::shuffle(words[j], first));
SGL_NO_UNROLL
      for (int32_t r = 1; r < num_ranks; ++r) sums[j] += dialect::bits_to_float(dialect::shuffle(words[j], first + r));
    }
    if (i < total && rank == 0) finish(row, tile * abi::kTileRows + m, sums);
  }
}

}  // namespace sgl_lowlatency::stages
