// k1: the first half of a decoder layer's start: what enters it is added up, normed and projected, and q, k and v are made ready for attention.
//
//   residual_out = x + residual;   q, k, v = qkv(rms_norm(x + residual));   q_out = rope(q_norm(q));   pool[slot] = rope(k_norm(k)), v
//
// Tensors   (abi/monokernel.hpp, K1Params) in SGLang's own layout: weights [out, K] bf16, KV pool [slots, num_kv_heads, head_dim] bf16.
// Grid      MonoLaunch::grid workgroups of kMonoThreads, at most one a CU: each takes all of a CU's LDS.
// Roles     eight waves of 64, all alike: of every tile a wave multiplies its share of K, of its own copies (stages/wave_tile.hpp).
// Phases    inputs | clears of the last k2's words, residual_out | tiles of qkv | heads: norm, rope, q_out, pool.
// Hand-over q, k and v before their norm, fp32 words that are each their own flag (sync/handover.hpp): one trip, no barrier of the grid, no fence.
//           Cleared by the k2 behind this launch. Everything else a launch finds was there before it began.
// Residency all workgroups run at once (resident_blocks): heads wait for tiles of other workgroups.
#pragma once
#include "sgl_lowlatency/stages/pushed_tiles.hpp"
#include "sgl_lowlatency/stages/wave_qkv.hpp"

namespace sgl_lowlatency::kernels {

using namespace stages;

// Entry: every thread of every workgroup.
template <abi::Isa kIsa>
SGL_DEVICE void k1_body(const abi::K1Params& p) {
  const MonoLaunch& l = p.launch;
  const abi::Geometry& g = l.geometry;
  const MonoShared<kIsa> s{dialect::shared_base()};
  const int32_t thread = dialect::thread_idx();
  dialect::await_previous_launch();
  if (thread < l.rows) {
    MonoRow& row = s.rows()->row[thread];
    row.position = checked(l, abi::kFaultBadPosition, thread, dialect::load_constant(p.positions + thread), g.max_position);
    row.slot = checked(l, abi::kFaultBadSlot, thread, dialect::load_constant(p.out_cache_loc + thread), g.num_kv_slots);
  }
  dialect::sync_shared();
  clear_handover(l, dialect::load_plain(l.state->used_bytes), dialect::load_plain(l.state->used_bytes + 1));
  // The newest k2's tiles, which are read: nobody stores to them before the second k2 from here (DESIGN.md of k2).
  const sync::Peers peers = peers_of(l);
  clear_pushed(peers, parity_before(dialect::load_plain(peers.state()->launches)), dialect::block_idx(), l.grid, thread, abi::kMonoThreads);
  if (p.residual != nullptr) store_stream(p);

  const int32_t columns = (g.num_q_heads + 2 * g.num_kv_heads) * g.head_dim;
  const abi::TileRange own = abi::even_share(columns / abi::kTileRows, dialect::block_idx(), l.grid);
  run_wave_tiles<8>(s, l.rows, PlainMatrix{p.qkv, g.hidden}, own, StreamOperand{p.x, p.residual, p.input_norm, g.hidden},
                    [&](int32_t tile, int32_t n, int32_t m, const TileSums<kIsa>& sums) {
                      const MonoLaunch& l = dialect::read_again(p.launch);
                      const float inverse = inverse_rms(s, l.geometry, n);
                      uint32_t words[2] = {dialect::float_to_bits(sums.at(m) * inverse), dialect::float_to_bits(sums.at(m + 1) * inverse)};
                      if (dialect::planted(dialect::Planted::kWithheldSignal) && tile == 0) return;
                      sync::publish(handover_words(l, l.at.qkv) + static_cast<int64_t>(n) * columns + tile * abi::kTileRows + m, words);
                    });
  const abi::K1Params& again = dialect::read_again(p);
  again.launch.geometry.head_dim == 64 ? finish_heads<64>(again, s) : finish_heads<128>(again, s);
}

}  // namespace sgl_lowlatency::kernels
