// Words that ranks push to each other together with the number of the position that they are for, 64 bits at once: a word is there when its number is
// the awaited one. So nothing is cleared and no word is ordered by another; positions take two copies in turn. DESIGN-tp.md, Tagged words.
#pragma once
#include "sgl_lowlatency/stages/generations.hpp"
#include "sgl_lowlatency/stages/pushed_tiles.hpp"

namespace sgl_lowlatency::stages {

// The number of layer -1 of this launch, one word in the block's shared memory: of the zero row's 128 bytes only the first 16 are read.
SGL_DEVICE uint32_t& first_tag(const Shared& s) { return *reinterpret_cast<uint32_t*>(s.zero_row() + 64); }
SGL_DEVICE uint32_t tag_of(const Shared& s, int32_t layer) { return first_tag(s) + static_cast<uint32_t>(layer + 1); }

// A copy has 64 bits where one of pushed_tiles.hpp has 32. The index is that of pushed_tiles' words.
SGL_DEVICE uint64_t* tagged_words(const abi::SymmetricLayout& at, char* workspace, const Shared& s, int32_t layer, bool is_down) {
  const int32_t in_turn = dialect::planted(dialect::Planted::kTwoParities) ? 1 : 2;
  const int32_t copy = generation_of(s, layer) % in_turn * 2 + is_down;
  return reinterpret_cast<uint64_t*>(workspace + at.tiles + copy * 2 * at.parity_bytes);
}

// push_words of words of a position. Relaxed, system scope: pairs with await_tagged.
template <int32_t kCount>
SGL_DEVICE void push_tagged(const sync::Peers& peers, const Shared& s, int32_t layer, bool is_down, int32_t tile, int32_t row, int32_t first,
                            const uint32_t (&words)[kCount]) {
  uint64_t pairs[kCount];
SGL_UNROLL
  for (int32_t i = 0; i < kCount; ++i) pairs[i] = static_cast<uint64_t>(tag_of(s, layer)) << 32 | words[i];
  const int32_t word = abi::tile_word(peers.at, peers.rank, tile) + row * abi::kTileRows + first;
  for (int32_t i = 1; i <= peers.at.num_ranks; ++i) {
    const int32_t to = peers.rank + i < peers.at.num_ranks ? peers.rank + i : peers.rank + i - peers.at.num_ranks;
    if (dialect::planted(dialect::Planted::kLostTile) && peers.rank == 0 && tile == 0 && to == peers.at.num_ranks - 1) continue;
    dialect::store_pairs_system(tagged_words(peers.at, peers.workspaces[to], s, layer, is_down) + word, pairs);
  }
}

// kCount words of ranks [from, to), once all of them are there. phase: for the record.
template <int32_t kRanks, int32_t kCount>
SGL_DEVICE void await_tagged(sync::FaultSink sink, const sync::Peers& peers, const Shared& s, abi::PeerPhase phase, int32_t layer, bool is_down,
                             int32_t from, int32_t to, int32_t tile, int32_t row, int32_t first, uint32_t (&w)[kRanks][kCount]) {
  const uint64_t* const words = tagged_words(peers.at, peers.workspaces[peers.rank], s, layer, is_down) + row * abi::kTileRows + first;
  const uint32_t tag = tag_of(s, layer), wanted = (1u << (to - from)) - 1u;
  uint32_t there = 0;
  sync::wait_for_peers(
      sink, peers,
      [&] {
SGL_UNROLL
        for (int32_t r = 0; r < kRanks; ++r) {
          if (from + r >= to || (there >> r & 1u) != 0) continue;
          uint64_t pairs[kCount];
          dialect::load_pairs_system(pairs, words + abi::tile_word(peers.at, from + r, tile));
          bool is_there = true;
SGL_UNROLL
          for (int32_t i = 0; i < kCount; ++i) {
            is_there = is_there && (pairs[i] >> 32 == tag || (i > 0 && dialect::planted(dialect::Planted::kFirstWordIsFlag)));
            w[r][i] = static_cast<uint32_t>(pairs[i]);
          }
          there |= static_cast<uint32_t>(is_there) << r;
        }
        return there == wanted;
      },
      [&] {
        int32_t missing = from;
        while ((there >> (missing - from) & 1u) != 0) ++missing;
        return abi::AbortReason{peers.rank, missing, layer < 0 ? 0 : layer, tile, phase};
      });
}

// await_pushed of tagged words: sums in rank order.
template <int32_t kRanks, int32_t kColumns>
SGL_DEVICE void await_tagged_sums(sync::FaultSink sink, const sync::Peers& peers, const Shared& s, abi::PeerPhase phase, int32_t layer, bool is_down,
                                  int32_t tile, int32_t row, int32_t m, float (&sums)[kColumns]) {
  uint32_t w[kRanks][kColumns] = {};
  await_tagged(sink, peers, s, phase, layer, is_down, 0, peers.at.num_ranks, tile, row, m, w);
SGL_UNROLL
  for (int32_t i = 0; i < kColumns; ++i) {
    sums[i] = dialect::bits_to_float(w[0][i]);
SGL_UNROLL
    for (int32_t r = 1; r < kRanks; ++r) sums[i] = r < peers.at.num_ranks ? sums[i] + dialect::bits_to_float(w[r][i]) : sums[i];
  }
}

// What the next launch finds. Entry: one thread, after every block is done.
SGL_DEVICE void close_tags(const sync::Peers& peers, const Shared& s, int32_t num_layers) {
  dialect::store_plain(peers.state()->launches, static_cast<uint64_t>(tag_of(s, num_layers)));
}

}  // namespace sgl_lowlatency::stages
