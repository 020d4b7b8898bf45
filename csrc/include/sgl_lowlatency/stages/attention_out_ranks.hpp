// Where attention_out's ranks meet: wo_b's sums go to every rank's workspace, and whoever has a piece of a row adds all ranks' words of it.
//
//   y = sum over ranks, in rank order, of (sum over the rank's splits of its output)      fp32; the post rounds it
//
// Every hook is there twice: of a rank of several, and of a rank alone, where it does nothing, or takes the splits' sum. Words, parities and fences are
// stages/pushed_tiles.hpp's; DESIGN.md of kernels/nvidia/attention_out argues their order.
#pragma once
#include "sgl_lowlatency/abi/parallel_attention_out.hpp"
#include "sgl_lowlatency/stages/attention_out_state.hpp"
#include "sgl_lowlatency/stages/pushed_tiles.hpp"
#include "sgl_lowlatency/stages/split_sums.hpp"

namespace sgl_lowlatency::stages {

using abi::ParallelAttentionOutParams;

SGL_DEVICE sync::Peers peers_of(const ParallelAttentionOutParams& p) { return {p.symmetric, p.workspaces, p.rank}; }

// Half of the deadline: blocks wait for each other because one of them waits for a peer, so that one gives up first: it knows whom to name.
SGL_DEVICE sync::FaultSink peer_sink(const ParallelAttentionOutParams& p) { return {p.fault, p.rank, p.deadline_ns / 2}; }

// This launch's parity, and what the launch before has left. Ends the launch if a rank has given up. Entry: thread 0 of each block, behind
// await_previous_launch, in front of the barrier that publishes the block's state: the last block out is ordered behind these reads.
SGL_DEVICE void begin_ranks(const AttentionOutParams&, const SliceShared&) {}
SGL_DEVICE void begin_ranks(const ParallelAttentionOutParams& p, const SliceShared& s) {
  const sync::Peers peers = peers_of(p);
  const uint64_t word = sync::load_abort(peers);
  if (word != 0) sync::raise_aborted(peer_sink(p), peers, word, {p.rank, -1, p.layer, 0, abi::kPeerWoB});
  const uint64_t launch = dialect::load_plain(peers.state()->launches);
  s.state()->parity = parity_of(launch);
  s.state()->rows_to_clear = dialect::load_plain(peers.state()->used_rows + parity_before(launch));
}

// Entry: all consumer threads, in front of wo_b: its latent rows are awaited meanwhile.
SGL_DEVICE void order_ranks_pushes(const AttentionOutParams&) {}
SGL_DEVICE void order_ranks_pushes(const ParallelAttentionOutParams&) { order_pushes(); }

// Columns column .. column + 3 of a row of wo_b's output: the sum over this rank's splits, in their order, once they are there.
SGL_DEVICE void await_output(const AttentionOutParams& p, const AttnOutWords& words, int32_t row, int32_t column, float (&y)[4]) {
  const int32_t hidden = p.geometry.hidden;
  await_split_sums(fault_sink(p), abi::kAttnOutEdgeOutput, words.output(), row * hidden + column, p.rows * hidden,
                   attn_out_splits(p, abi::kAttnOutB), y);
}

// The rank's sums of the warp's pieces, to every rank; all of them before the first is taken, so that they share a trip. Entry: all consumer threads,
// behind order_ranks_pushes.
SGL_DEVICE void push_output(const AttentionOutParams&, const SliceShared&, const AttnOutWords&) {}
SGL_DEVICE void push_output(const ParallelAttentionOutParams& p, const SliceShared& s, const AttnOutWords& words) {
  visit_pieces(p.rows, p.geometry.hidden, [&](int32_t row, int32_t piece) {
    const int32_t column = piece * abi::kPieceColumns + dialect::thread_idx() % 32 * 4;
    float y[4];
    await_output(p, words, row, column, y);
    uint32_t word[4];
SGL_UNROLL
    for (int32_t i = 0; i < 4; ++i) word[i] = dialect::float_to_bits(y[i]);
    push_words(peers_of(p), s.state()->parity, column / abi::kTileRows, row, column % abi::kTileRows, word);
  });
}

// The whole of columns column .. column + 3 of a row, once it is there: over splits, or over ranks.
SGL_DEVICE void take_output(const AttentionOutParams& p, const SliceShared&, const AttnOutWords& words, int32_t row, int32_t column, float (&y)[4]) {
  await_output(p, words, row, column, y);
}
SGL_DEVICE void take_output(const ParallelAttentionOutParams& p, const SliceShared& s, const AttnOutWords&, int32_t row, int32_t column,
                            float (&y)[4]) {
  await_pushed<abi::kMaxRanks>(peer_sink(p), peers_of(p), abi::kPeerWoB, p.layer, s.state()->parity, column / abi::kTileRows, row,
                               column % abi::kTileRows, y);
}

// Entry: all consumer threads, behind their last take_output: squares of rows are awaited meanwhile.
SGL_DEVICE void order_ranks_reads(const AttentionOutParams&) {}
SGL_DEVICE void order_ranks_reads(const ParallelAttentionOutParams&) { order_reads(); }

// Clears the block's share of what the launch before has taken. Entry: all lanes of the mixer warp.
SGL_DEVICE void clear_ranks_words(const AttentionOutParams&, const SliceShared&) {}
SGL_DEVICE void clear_ranks_words(const ParallelAttentionOutParams& p, const SliceShared& s) {
  const int32_t parities = dialect::planted(dialect::Planted::kTwoParities) ? 2 : abi::kParities;
  clear_rows(peers_of(p), (s.state()->parity + parities - 1) % parities, s.state()->rows_to_clear,
             dialect::block_idx() * 32 + dialect::thread_idx() % 32, dialect::grid_dim() * 32);
}

// What the next launch finds. Entry: one thread of the last block out, as close_slice found it.
SGL_DEVICE void close_ranks(const AttentionOutParams&) {}
SGL_DEVICE void close_ranks(const ParallelAttentionOutParams& p) { close_parity(peers_of(p), p.rows); }

}  // namespace sgl_lowlatency::stages
