// The hand-over buffers of a layer. There are kGenerations of them and layers take them in turn, across launches. The words of a
// generation are cleared kClearAhead layers before it is filled again.
//
// Why that is safe: each consumer thread fences once a layer (order_generations), behind the block's clears of that layer. The
// words that the block hands over from then on carry the fence to their readers, whose own next fence receives it. So two layers
// later every block is ordered behind the clears; and a block that clears is ordered behind everyone's reads of the layers up to
// the one before last, because it has read words that their readers handed over behind a fence. Blocks without tiles of qkv or
// gate_up learn it later or never: the plan's validator (plan/generations.py) decides whether a plan leaves enough layers.
#pragma once
#include "sgl_lowlatency/stages/row_state.hpp"
#include "sgl_lowlatency/sync/handover.hpp"

namespace sgl_lowlatency::stages {

// layer: of this launch; -1 is the embedding's.
SGL_DEVICE int32_t generation_of(const Shared& s, int32_t layer) { return (s.rows()->first_generation + layer + 1) % abi::kGenerations; }

// The buffer at byte offset `at` (HandoverLayout) of the layer's generation.
SGL_DEVICE uint32_t* handover_buffer(const DecodeStepParams& p, const Shared& s, int32_t layer, int32_t at) {
  return reinterpret_cast<uint32_t*>(p.handover + generation_of(s, layer) * p.generation_bytes + at);
}

SGL_DEVICE sync::Awaited awaited(const DecodeStepParams& p, const Shared& s, int32_t layer, int32_t at, abi::EdgeIdx edge) {
  return {handover_buffer(p, s, layer, at), layer, edge};
}

// Bytes to clear for `layer`: what the launch itself put there kGenerations layers earlier, else what earlier launches left.
SGL_DEVICE int32_t used_bytes(const DecodeStepParams& p, const Shared& s, int32_t layer) {
  return layer >= abi::kGenerations - 1 ? p.at.total_bytes : s.rows()->used_bytes[generation_of(s, layer)];
}

// Entry: all consumer threads, in a layer; of layer -1, before the first. A block clears in proportion to its tiles of `down`:
// those who own none may hand over nothing in a layer, and nobody would ever be ordered behind their clears.
SGL_DEVICE void clear_generation(const DecodeStepParams& p, const Shared& s, int32_t layer) {
  const abi::TileRange own = s.rows()->tiles[abi::kOpDown];
  const int32_t target = layer + abi::kClearAhead, num_vecs = used_bytes(p, s, target) / 16, tiles = p.ops[abi::kOpDown].num_tiles;
  const int32_t begin = static_cast<int32_t>(static_cast<int64_t>(num_vecs) * own.begin / tiles);
  const int32_t end = static_cast<int32_t>(static_cast<int64_t>(num_vecs) * (own.begin + own.count) / tiles);
  uint32_t* const words = handover_buffer(p, s, target, 0);
  for (int32_t i = begin + dialect::thread_idx(); i < end; i += kConsumerThreads) dialect::clear_words(words + i * 4);
}

// Entry: all consumer threads, once a layer; a consumer barrier lies between the block's clears and this.
// Acquire and release, gpu scope: pairs with the same fence of the other blocks, through the words they hand over. kIsParallel: system scope, and
// with that of the blocks of other ranks too, through the words that they push (stages/peer_sums.hpp).
template <bool kIsParallel>
SGL_DEVICE void order_generations() {
  if (dialect::planted(dialect::Planted::kMissingFence)) return;
  kIsParallel && !dialect::planted(dialect::Planted::kPeerGpuScope) ? dialect::fence_acq_rel_system() : dialect::fence_acq_rel_gpu();
}

// What the next launch finds. Entry: one thread, after every block is done.
SGL_DEVICE void close_generations(const DecodeStepParams& p, const Shared& s) {
  const int32_t layers = p.geometry.num_layers;
  for (int32_t layer = -1; layer < layers; ++layer) {
    s.rows()->used_bytes[generation_of(s, layer + abi::kClearAhead)] = 0;
    s.rows()->used_bytes[generation_of(s, layer)] = p.at.total_bytes;
  }
  for (int32_t i = 0; i < abi::kGenerations; ++i) dialect::store_plain(p.sync->used_bytes + i, s.rows()->used_bytes[i]);
  dialect::store_plain(p.sync->first_generation, generation_of(s, layers));
}

}  // namespace sgl_lowlatency::stages
