// The residual stream of a tensor-parallel step: partial sums of out_proj and down go from registers to every rank's workspace, and whoever owns
// a tile takes all ranks' words of it, adds them in rank order to the stream, and hands that over as a step of one rank does. The embedding comes
// the same way from the rank that has the row.
//
// Words are data and flag at once, at system scope. Layers take kPeerGenerations copies of them in turn. Of a tile everything is one block's, on
// every rank the same number: it reads the words, clears them a layer later, and pushes the next ones. DESIGN-tp.md argues from that why no store
// to them is early.
#pragma once
#include "sgl_lowlatency/abi/parallel_step.hpp"
#include "sgl_lowlatency/stages/operand.hpp"
#include "sgl_lowlatency/stages/gemm.hpp"
#include "sgl_lowlatency/stages/pushed_tiles.hpp"

namespace sgl_lowlatency::stages {

using abi::ParallelStepParams;

SGL_DEVICE sync::Peers peers_of(const ParallelStepParams& p) { return {p.symmetric, p.workspaces, p.rank}; }

// Blocks wait for each other because one of them waits for a peer, so that one gives up first: it knows whom to name.
SGL_DEVICE sync::FaultSink peer_sink(const ParallelStepParams& p) { return {p.fault, p.rank, p.deadline_ns / 2}; }

// Which copy of the workspace's tiles a layer's out_proj or down takes; of layer -1, the embedding, down's.
SGL_DEVICE int32_t peer_copy(const Shared& s, int32_t layer, bool is_down) {
  const int32_t generations = dialect::planted(dialect::Planted::kTwoParities) ? 2 : abi::kPeerGenerations;
  return generation_of(s, layer) % generations * 2 + is_down;
}

// Clears the words of the own tiles that the layer before left. Entry: all consumer threads; the block has taken those sums behind a barrier.
SGL_DEVICE void clear_pushed_words(const ParallelStepParams& p, const Shared& s, int32_t layer) {
  const sync::Peers peers = peers_of(p);
  const int32_t ahead = dialect::planted(dialect::Planted::kTwoParities) ? 1 : abi::kPeerClearAhead;
  const int32_t rows = layer < 0 ? dialect::load_plain(peers.state()->used_rows) : p.rows;  // of the launch before; nobody may have used it
  for (int32_t is_down = 0; is_down < 2; ++is_down) {
    const abi::TileRange own = s.rows()->tiles[is_down ? abi::kOpDown : abi::kOpOutProj];
    uint32_t* const words = parity_words(p.symmetric, p.workspaces[p.rank], peer_copy(s, layer + ahead, is_down));
    const int32_t vectors = rows * abi::kTileRows / 4, of_rank = own.count * vectors;
    for (int32_t i = dialect::thread_idx(); i < p.symmetric.num_ranks * of_rank; i += kConsumerThreads) {
      const int32_t tile = own.begin + i % of_rank / vectors;
      dialect::clear_words(words + abi::tile_word(p.symmetric, i / of_rank, tile) + i % vectors * 4);
    }
  }
}

// The block's own tiles of out_proj or down, all in one trip: a thread has two columns of a row. Entry: all consumer threads, behind the block's
// last push of the operation.
SGL_DEVICE void take_sums(const ParallelStepParams& p, const Shared& s, int32_t layer, int32_t op) {
  constexpr int32_t kPairs = abi::kTileRows / 2;
  const bool is_down = op == abi::kOpDown;
  const abi::TileRange own = s.rows()->tiles[op];
  const int32_t thread = dialect::thread_idx(), m = thread % kPairs * 2, count = own.count * p.rows;
  const Stream to = is_down ? end_stream(p, layer) : mid_stream(p, layer);
  const sync::Awaited before = stream_words(p, s, input_stream(p, layer, op), p.stream.x);
  const bf16* const norm = norm_behind(p, s, layer, op);
  for (int32_t first = thread / 32 * (32 / kPairs); first < count; first += kConsumerThreads / kPairs) {  // a warp's lanes together
    const int32_t item = first + thread % 32 / kPairs, tile = own.begin + item / p.rows, row = item % p.rows;
    const bool is_owner = item < count;
    uint32_t x = 0, weight = 0;
    if (is_owner) {
      const int64_t word_idx = (static_cast<int64_t>(row) * p.geometry.hidden + tile * abi::kTileRows + m) / 2;
      uint32_t word[1];
      dialect::load_words(word, before.buffer + word_idx);
      weight = dialect::load_constant(reinterpret_cast<const uint32_t*>(norm + tile * abi::kTileRows + m));
      float sums[2];
      const abi::PeerPhase phase = is_down ? abi::kPeerDown : abi::kPeerOutProj;
      await_pushed<abi::kMaxRanks>(peer_sink(p), peers_of(p), phase, layer, peer_copy(s, layer, is_down), tile, row, m, sums);
      if (!sync::is_written(word)) sync::await_words(fault_sink(p), before, word_idx, word);
      x = pack_bf16(low_float(word[0]) + sums[0], high_float(word[0]) + sums[1]);
    }
    publish_stream(p, s, to, tile, m, row, is_owner, x, weight);
    const int32_t entered = dialect::planted(dialect::Planted::kCapturesOutput) ? layer : layer + 1;
    if (is_down && is_owner && entered < p.geometry.num_layers) capture_stream(p, layer_tables(s, entered).weights, tile, m, row, x);
  }
}

// Two columns of a row of the embedding, bf16, once the rank that has the row has pushed them.
SGL_DEVICE uint32_t await_embedding(const ParallelStepParams& p, int32_t copy, int32_t from, int32_t tile, int32_t row, int32_t m) {
  const sync::Peers peers = peers_of(p);
  const uint32_t* const tiles = parity_words(p.symmetric, p.workspaces[p.rank], copy);
  const uint32_t* const words = tiles + abi::tile_word(p.symmetric, from, tile) + row * abi::kTileRows;
  uint32_t word[1];
  sync::wait_for_peers(
      peer_sink(p), peers,
      [&] {
        dialect::load_words_system(word, words + m / 2);
        return sync::is_written(word);
      },
      [&] { return abi::AbortReason{p.rank, from, 0, tile, abi::kPeerEmbedding}; });
  return word[0];
}

// As publish_embedding: the owner of a tile of `down` pushes its columns of the rows that this rank has, then takes those of all rows.
// Entry: all consumer threads.
SGL_DEVICE void exchange_embedding(const ParallelStepParams& p, const Shared& s, const abi::LayerWeights& first) {
  constexpr int32_t kPairs = abi::kTileRows / 2;
  const abi::TileRange own = s.rows()->tiles[abi::kOpDown];
  const int32_t m = dialect::thread_idx() % kPairs * 2, row = dialect::thread_idx() / kPairs, copy = peer_copy(s, -1, true);
  const bool is_owner = row < p.rows;
  const int32_t token = is_owner ? s.rows()->row[row].token : 0, from = token / p.vocab_shard;
  if (is_owner && from == p.rank) {
    for (int32_t tile = own.begin; tile < own.begin + own.count; ++tile) {
      const bf16* const embedding = p.embedding + static_cast<int64_t>(token - from * p.vocab_shard) * p.geometry.hidden;
      uint32_t words[1] = {dialect::load_constant(reinterpret_cast<const uint32_t*>(embedding + tile * abi::kTileRows + m))};
      push_words(peers_of(p), copy, tile, row, m / 2, words);
    }
  }
  for (int32_t tile = own.begin; tile < own.begin + own.count; ++tile) {
    uint32_t x = 0, weight = 0;
    if (is_owner) {
      x = await_embedding(p, copy, from, tile, row, m);
      weight = dialect::load_constant(reinterpret_cast<const uint32_t*>(first.input_norm + tile * abi::kTileRows + m));
    }
    publish_stream(p, s, end_stream(p, -1), tile, m, row, is_owner, x, weight);
    if (is_owner && !dialect::planted(dialect::Planted::kCapturesOutput)) capture_stream(p, first, tile, m, row, x);
  }
}

}  // namespace sgl_lowlatency::stages
