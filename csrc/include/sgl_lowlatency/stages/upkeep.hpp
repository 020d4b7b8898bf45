// What a block does once a layer beside its work: it clears a generation, orders the clears, and fetches the next layer's pointers
// and norm weights ahead. All of it happens behind the first tiles of gate_up, the longest operation: the weight ring has just
// been drained then and refills meanwhile, so that the memory does not notice. (Of MoE layers: around the routing, DESIGN-moe.md.)
#pragma once
#include "sgl_lowlatency/stages/generations.hpp"

namespace sgl_lowlatency::stages {

SGL_DEVICE LayerTables& layer_tables(const Shared& s, int32_t layer) { return s.rows()->tables[layer % 2]; }

SGL_DEVICE abi::LayerScales& layer_scales(const Shared& s, int32_t layer) { return s.rows()->scales[layer % 2]; }

// Entry: one thread, before the block's first barrier.
template <int32_t kElementBytes>
SGL_DEVICE void load_first_tables(const DecodeStepParams& p, const Shared& s) {
  LayerTables& tables = layer_tables(s, 0);
  constexpr int32_t kPointers = offsetof(abi::LayerWeights, aux_column) / sizeof(const bf16*);
  const auto* const from = reinterpret_cast<const bf16* const*>(p.layers);
  for (int32_t i = 0; i < kPointers; ++i) reinterpret_cast<const bf16**>(&tables.weights)[i] = dialect::load_constant_pointer(from + i);
  tables.weights.aux_column = dialect::load_constant(&p.layers->aux_column);
  tables.kv = {dialect::load_constant_pointer(&p.kv->k), dialect::load_constant_pointer(&p.kv->v)};
  if constexpr (kElementBytes == 1) {
    for (int32_t op = 0; op < abi::kNumOps; ++op) layer_scales(s, 0).of[op] = dialect::load_constant_pointer(p.scales->of + op);
  }
}

// Entry: all consumer threads of layer `layer`, which have passed a barrier since the layer's qkv.
template <int32_t kElementBytes>
SGL_DEVICE void begin_upkeep(const DecodeStepParams& p, const Shared& s, int32_t layer) {
  constexpr int32_t kWeightVecs = sizeof(abi::LayerWeights) / 16;
  clear_generation(p, s, layer);
  const int32_t thread = dialect::thread_idx();
  if (layer + 1 < p.geometry.num_layers && thread <= kWeightVecs) {
    Vec16* const to = reinterpret_cast<Vec16*>(&layer_tables(s, layer + 1));
    const void* const from = thread < kWeightVecs ? reinterpret_cast<const void*>(reinterpret_cast<const Vec16*>(p.layers + layer + 1) + thread)
                                                  : reinterpret_cast<const void*>(p.kv + layer + 1);
    dialect::copy_async_16(to + thread, from);
  }
  if constexpr (kElementBytes == 1) {
    constexpr int32_t kScaleVecs = sizeof(abi::LayerScales) / 16;
    if (layer + 1 < p.geometry.num_layers && thread < kScaleVecs) {
      dialect::copy_async_16(reinterpret_cast<Vec16*>(&layer_scales(s, layer + 1)) + thread, reinterpret_cast<const Vec16*>(p.scales + layer + 1) + thread);
    }
  }
  dialect::copy_async_commit();
}

// Norm weights of the next layer, on their way into L2: a line a thread, spread over the grid.
SGL_DEVICE void prefetch_norms(const DecodeStepParams& p, const Shared& s, int32_t layer) {
  constexpr int32_t kLineElements = 64;
  const abi::LayerWeights& w = layer_tables(s, layer).weights;
  const int32_t first = dialect::thread_idx() * dialect::grid_dim() + dialect::block_idx();
  const int32_t lines = p.geometry.hidden / kLineElements, head_lines = p.geometry.head_dim / kLineElements;
  if (first < lines) dialect::prefetch_l2(w.input_norm + first * kLineElements);
  if (first < lines) dialect::prefetch_l2(w.post_norm + first * kLineElements);
  if (first < head_lines && w.q_norm != nullptr) dialect::prefetch_l2(w.q_norm + first * kLineElements);
  if (first < head_lines && w.k_norm != nullptr) dialect::prefetch_l2(w.k_norm + first * kLineElements);
}

// Entry: all consumer threads, after begin_upkeep. Ends with a consumer barrier. order: order_generations of the instance.
template <class Order>
SGL_DEVICE void finish_upkeep(const DecodeStepParams& p, const Shared& s, int32_t layer, const Order& order) {
  dialect::copy_async_wait<0>();
  sync_consumers();  // the block's clears are made
  order();
  sync_consumers();
  if (layer + 1 < p.geometry.num_layers) prefetch_norms(p, s, layer + 1);
}

}  // namespace sgl_lowlatency::stages
