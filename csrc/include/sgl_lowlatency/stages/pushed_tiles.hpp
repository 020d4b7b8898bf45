// Partial sums of tiles that go from registers to every rank's workspace, and what becomes of the workspace's words from launch to launch.
//
// Words are data and flag at once, as in sync/handover.hpp, at system scope. Launch n uses parity n % 3. While it waits for n's words, the reduction
// of launch n clears those of n - 1, which parity n + 2 is. DESIGN.md of kernels/nvidia/epilogue_multicast, and of fused_moe, argue why nobody stores
// to them too early: order_pushes and order_reads are the two ends of it.
#pragma once
#include "sgl_lowlatency/sync/peer.hpp"

namespace sgl_lowlatency::stages {

// The parity of launch number `launch`, the one of the launch before, and words of a parity's tiles in a workspace.
SGL_DEVICE int32_t parity_of(uint64_t launch) {
  return static_cast<int32_t>(launch % (dialect::planted(dialect::Planted::kTwoParities) ? 2u : static_cast<uint32_t>(abi::kParities)));
}
SGL_DEVICE int32_t parity_before(uint64_t launch) {
  return parity_of(launch + (dialect::planted(dialect::Planted::kTwoParities) ? 1u : static_cast<uint32_t>(abi::kParities) - 1u));
}
SGL_DEVICE uint32_t* parity_words(const abi::SymmetricLayout& at, char* workspace, int32_t parity) {
  return reinterpret_cast<uint32_t*>(workspace + at.tiles + parity * at.parity_bytes);
}

// Entry: every thread that will push, once a launch, behind await_previous_launch and before its first push.
// Release, system scope: pairs with order_reads of the ranks that load what is pushed. It covers all that this rank's earlier launches did:
// the clears of the one before, and with them its reads of the parity that it cleared.
SGL_DEVICE void order_pushes() {
  if (dialect::planted(dialect::Planted::kMissingPeerRelease)) return;
  dialect::planted(dialect::Planted::kPeerGpuScope) ? dialect::fence_acq_rel_gpu() : dialect::fence_acq_rel_system();
}

// Entry: every thread that has loaded pushed words, behind them and before the kernel ends.
// Acquire, system scope: pairs with order_pushes of the ranks that pushed. This rank's next launches are ordered behind it.
SGL_DEVICE void order_reads() {
  if (dialect::planted(dialect::Planted::kMissingPeerAcquire)) return;
  dialect::planted(dialect::Planted::kPeerGpuScope) ? dialect::fence_acq_rel_gpu() : dialect::fence_acq_rel_system();
}

// Words `first` and following of a row of this rank's part of a tile, to every rank; to the next one first, so that not all store to one at a time.
// Relaxed, system scope: pairs with await_pushed and await_embedding.
template <int32_t kCount>
SGL_DEVICE void push_words(const sync::Peers& peers, int32_t parity, int32_t tile, int32_t row, int32_t first, uint32_t (&words)[kCount]) {
SGL_UNROLL
  for (int32_t i = 0; i < kCount; ++i) {
    if (words[i] == abi::kUnwritten) words[i] = abi::kUnwritten >> 1;  // another NaN: its reader would wait for ever
  }
  const int32_t word = abi::tile_word(peers.at, peers.rank, tile) + row * abi::kTileRows + first;
  for (int32_t i = 1; i <= peers.at.num_ranks; ++i) {
    const int32_t to = peers.rank + i < peers.at.num_ranks ? peers.rank + i : peers.rank + i - peers.at.num_ranks;
    if (dialect::planted(dialect::Planted::kLostTile) && peers.rank == 0 && tile == 0 && to == peers.at.num_ranks - 1) continue;
    dialect::store_words_system(parity_words(peers.at, peers.workspaces[to], parity) + word, words);
  }
}

// Columns m, m + 1 of a row of this rank's partial tile, to every rank. multicast: what stores to all workspaces at once, or null.
SGL_DEVICE void push_pair(const sync::Peers& peers, char* multicast, int32_t parity, int32_t tile, int32_t row, int32_t m, const float (&y)[2]) {
  uint32_t words[2] = {dialect::float_to_bits(y[0]), dialect::float_to_bits(y[1])};
  if (multicast == nullptr) return push_words(peers, parity, tile, row, m, words);
SGL_UNROLL
  for (int32_t i = 0; i < 2; ++i) words[i] = words[i] == abi::kUnwritten ? abi::kUnwritten >> 1 : words[i];
  const int32_t word = abi::tile_word(peers.at, peers.rank, tile) + row * abi::kTileRows + m;
  dialect::store_words_multicast(parity_words(peers.at, multicast, parity) + word, words);
}

// Sums of columns m .. m + kColumns - 1 of a row of tile `tile`: of all ranks, in rank order, once all of their words are there. kRanks: at least
// num_ranks. layer, phase: for the record.
template <int32_t kRanks, int32_t kColumns>
SGL_DEVICE void await_pushed(sync::FaultSink sink, const sync::Peers& peers, abi::PeerPhase phase, int32_t layer, int32_t parity, int32_t tile,
                             int32_t row, int32_t m, float (&sums)[kColumns]) {
  const uint32_t* const words = parity_words(peers.at, peers.workspaces[peers.rank], parity) + row * abi::kTileRows + m;
  const int32_t num_ranks = peers.at.num_ranks;
  const auto is_there = [](const uint32_t (&w)[kColumns]) {
    return dialect::planted(dialect::Planted::kFirstWordIsFlag) ? w[0] != abi::kUnwritten : sync::is_written(w);
  };
  uint32_t w[kRanks][kColumns];
SGL_UNROLL
  for (int32_t i = 0; i < kRanks * kColumns; ++i) w[i / kColumns][i % kColumns] = abi::kUnwritten;
  sync::wait_for_peers(
      sink, peers,
      [&] {
SGL_UNROLL
        for (int32_t r = 0; r < kRanks; ++r) {
          if (r < num_ranks && !is_there(w[r])) dialect::load_words_system(w[r], words + abi::tile_word(peers.at, r, tile));
        }
        bool are_there = true;
SGL_UNROLL
        for (int32_t r = 0; r < kRanks; ++r) are_there = are_there && (r >= num_ranks || is_there(w[r]));
        return are_there;
      },
      [&] {
        int32_t missing = 0;
SGL_UNROLL
        for (int32_t r = kRanks - 1; r >= 0; --r) {
          if (r < num_ranks && !is_there(w[r])) missing = r;
        }
        return abi::AbortReason{peers.rank, missing, layer, tile, phase};
      });
SGL_UNROLL
  for (int32_t i = 0; i < kColumns; ++i) {
    sums[i] = dialect::bits_to_float(w[0][i]);
SGL_UNROLL
    for (int32_t r = 1; r < kRanks; ++r) sums[i] = r < num_ranks ? sums[i] + dialect::bits_to_float(w[r][i]) : sums[i];
  }
}

// Columns m .. m + 3 of a row of rank `rank`'s tile `tile`, once they are there.
SGL_DEVICE void await_rank(sync::FaultSink sink, const sync::Peers& peers, int32_t layer, int32_t parity, int32_t rank, int32_t tile, int32_t row,
                           int32_t m, uint32_t (&w)[4]) {
  const int32_t first = abi::tile_word(peers.at, rank, tile) + row * abi::kTileRows + m;
  const uint32_t* const words = parity_words(peers.at, peers.workspaces[peers.rank], parity) + first;
  sync::wait_for_peers(
      sink, peers,
      [&] {
        dialect::load_words_system(w, words);
        return dialect::planted(dialect::Planted::kFirstWordIsFlag) ? w[0] != abi::kUnwritten : sync::is_written(w);
      },
      [&] { return abi::AbortReason{peers.rank, rank, layer, tile}; });
}

// Clears rows row, row + step, .. of all tiles of `parity` that are in use. Entry: num_threads threads, of which this is number `thread`.
SGL_DEVICE void clear_pushed(const sync::Peers& peers, int32_t parity, int32_t row, int32_t step, int32_t thread, int32_t num_threads) {
  constexpr int32_t kVectors = abi::kTileRows / 4;
  uint32_t* const words = parity_words(peers.at, peers.workspaces[peers.rank], parity);
  const int32_t used_rows = dialect::load_plain(peers.state()->used_rows + parity), num_tiles = peers.at.num_ranks * (peers.at.hidden / abi::kTileRows);
  for (; row < used_rows; row += step) {
    for (int32_t i = thread; i < num_tiles * kVectors; i += num_threads) {
      dialect::clear_words(words + (i / kVectors * peers.at.max_rows + row) * abi::kTileRows + i % kVectors * 4);
    }
  }
}

// Clears the vectors number first, first + step, .. of `parity`, whose first used_rows rows are in use.
SGL_DEVICE void clear_rows(const sync::Peers& peers, int32_t parity, int32_t used_rows, int32_t first, int32_t step) {
  uint32_t* const words = parity_words(peers.at, peers.workspaces[peers.rank], parity);
  const int32_t of_tile = used_rows * (abi::kTileRows / 4), num_vectors = peers.at.num_ranks * (peers.at.hidden / abi::kTileRows) * of_tile;
SGL_NO_UNROLL
  for (int32_t i = first; i < num_vectors; i += step) {
    dialect::clear_words(words + i / of_tile * (peers.at.max_rows * abi::kTileRows) + i % of_tile * 4);
  }
}

// What the next launch finds. Entry: one thread of the rank, after every block that read the state is done.
SGL_DEVICE void close_parity(const sync::Peers& peers, int32_t rows) {
  const uint64_t launch = dialect::load_plain(peers.state()->launches);
  dialect::store_plain(peers.state()->used_rows + parity_before(launch), 0);
  dialect::store_plain(peers.state()->used_rows + parity_of(launch), rows);
  dialect::store_plain(peers.state()->launches, launch + 1);
}

}  // namespace sgl_lowlatency::stages
