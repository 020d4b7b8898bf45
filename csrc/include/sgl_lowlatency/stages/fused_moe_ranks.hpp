// The sums of a tensor-parallel fused_moe: a rank's part of a row's columns goes from registers to every rank's workspace, and whoever pushed it
// takes all ranks' words of the same columns, adds them in rank order and finishes them (fused_moe_post.hpp), as every rank does. The functions that
// a launch of one rank has nothing to do in are here beside those of ranks, by the parameters' type.
//
// Words are data and flag at once, at system scope (stages/pushed_tiles.hpp). Launches take three parities of them in turn; DESIGN.md of
// kernels/nvidia/fused_moe argues why no store to them is early.
#pragma once
#include "sgl_lowlatency/abi/parallel_moe.hpp"
#include "sgl_lowlatency/stages/fused_moe_phases.hpp"
#include "sgl_lowlatency/stages/fused_moe_post.hpp"
#include "sgl_lowlatency/stages/pushed_tiles.hpp"

namespace sgl_lowlatency::stages {

using abi::ParallelMoeParams;

SGL_DEVICE sync::Peers peers_of(const ParallelMoeParams& p) { return {p.symmetric, p.workspaces, p.rank}; }

// A wait for a rank has half the deadline: a block that waits for words of its own rank as long would give up beside it, and could not say whom to
// blame.
SGL_DEVICE sync::FaultSink peer_sink(const ParallelMoeParams& p) { return {p.fault, p.rank, p.deadline_ns / 2}; }

// What a launch finds of its rank's workspace: the parity that it takes, and rows of the one before that are not clear. Ends the launch where a rank
// has given up. Entry: one thread of each block, behind await_previous_launch.
struct MoeParity {
  int16_t parity;
  int16_t rows_to_clear;
};
SGL_DEVICE MoeParity begin_parity(const FusedMoeParams&) { return {0, 0}; }
SGL_DEVICE MoeParity begin_parity(const ParallelMoeParams& p) {
  const sync::Peers peers = peers_of(p);
  const uint64_t word = sync::load_abort(peers);
  if (word != 0) sync::raise_aborted(peer_sink(p), peers, word, {p.rank, -1, p.layer, 0, abi::kPeerExperts});
  const uint64_t launch = dialect::load_plain(peers.state()->launches);
  const int32_t rows = dialect::load_plain(peers.state()->used_rows + parity_before(launch));
  return {static_cast<int16_t>(parity_of(launch)), static_cast<int16_t>(rows)};
}

// Entry: one thread of the rank, behind every block's begin_parity.
SGL_DEVICE void end_parity(const FusedMoeParams&) {}
SGL_DEVICE void end_parity(const ParallelMoeParams& p) { close_parity(peers_of(p), p.rows); }

// Calls each(row, column) for what combine_moe gives this thread of `rows` rows.
template <class Each>
SGL_DEVICE void for_own_columns(const abi::MoeGeometry& g, int32_t rows, Each each) {
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32, chunks = g.hidden / 128;
SGL_NO_UNROLL
  for (int32_t i = dialect::block_idx() + warp * dialect::grid_dim(); i < rows * chunks; i += dialect::grid_dim() * abi::kNumConsumerWarps) {
    each(i / chunks, i % chunks * 128 + lane * 4);
  }
}
SGL_DEVICE bool has_own_columns(const ParallelMoeParams& p) {
  return dialect::block_idx() + dialect::thread_idx() / 32 * dialect::grid_dim() < p.rows * (p.geometry.hidden / 128);
}

// The first fence of a launch (order_pushes), of the threads that will push. Entry: all consumer threads, behind await_previous_launch.
SGL_DEVICE void order_sums(const FusedMoeParams&) {}
SGL_DEVICE void order_sums(const ParallelMoeParams& p) {
  if (has_own_columns(p)) order_pushes();
}

// Clears what all ranks have pushed of this thread's columns in the launch before, which the launch after next uses again.
SGL_DEVICE void clear_own_columns(const ParallelMoeParams& p, int32_t parity, int32_t rows) {
  uint32_t* const words = parity_words(p.symmetric, p.workspaces[p.rank], parity);
  for_own_columns(p.geometry, rows, [&](int32_t row, int32_t column) {
SGL_NO_UNROLL
    for (int32_t rank = 0; rank < p.symmetric.num_ranks; ++rank) {
      dialect::clear_words(words + abi::tile_word(p.symmetric, rank, column / abi::kTileRows) + row * abi::kTileRows + column % abi::kTileRows);
    }
  });
}

// out, and where the launch has streams those behind it, of combine_moe's sums; of ranks, of the sum of theirs in rank order. Of these, all of a
// thread's columns are pushed before it takes the first ones, and the clears fall into the trip. Entry: all consumer threads, behind order_sums.
SGL_DEVICE void sum_moe(const FusedMoeParams& p, const MoeShared& s, const MoeWords& words) {
  MoePost post;
  combine_moe(p, s, words, [&](int32_t row, int32_t column) { begin_post(p, words, row, column, post); },
              [&](int32_t row, int32_t column, float (&sum)[4]) { finish_moe_sum(p, words, row, column, post, sum); });
}
SGL_DEVICE void sum_moe(const ParallelMoeParams& p, const MoeShared& s, const MoeWords& words) {
  const sync::Peers peers = peers_of(p);
  const int32_t parity = s.state()->parity;
  combine_moe(p, s, words, [](int32_t, int32_t) {}, [&](int32_t row, int32_t column, const float (&sum)[4]) {
    uint32_t word[4];
SGL_UNROLL
    for (int32_t i = 0; i < 4; ++i) word[i] = dialect::float_to_bits(sum[i]);
    push_words(peers, parity, column / abi::kTileRows, row, column % abi::kTileRows, word);
  });
  clear_own_columns(p, parity_before(static_cast<uint64_t>(parity)), s.state()->rows_to_clear);
  for_own_columns(p.geometry, p.rows, [&](int32_t row, int32_t column) {
    MoePost post;
    begin_post(p, words, row, column, post);
    float sum[4];
    await_pushed<abi::kMaxRanks>(peer_sink(p), peers, abi::kPeerExperts, p.layer, parity, column / abi::kTileRows, row, column % abi::kTileRows, sum);
    finish_moe_sum(p, words, row, column, post, sum);
  });
  if (has_own_columns(p)) order_reads();
}

}  // namespace sgl_lowlatency::stages
