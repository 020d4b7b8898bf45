// k2: the rest of a decoder layer: attention over the paged pool, output projection, sum over ranks, norm, MLP, sum over ranks.
//
//   residual_out = residual + sum over ranks, in rank order, of out_proj(attention(q, pool));   y = rms_norm(residual_out)
//   x_out = sum over ranks, in rank order, of down(silu(gate(y)) * up(y)), or of the experts that each row of y takes
//
// Tensors   (abi/monokernel.hpp, K2Params) in SGLang's own layout: weights [out, K] bf16, KV pool [slots, num_kv_heads, head_dim] bf16. Sums are
//           fp32, rounded to bf16 once.
// Grid      MonoLaunch::grid workgroups of kMonoThreads, at most one a CU: each takes all of a CU's LDS.
// Roles     eight waves of 64, all alike (stages/wave_tile.hpp).
// Phases    inputs, clears of k1's words | attention items, combinations | out_proj, each tile pushed to all ranks | the block's tiles summed: the
//           stream | gate_up (MoE: router, routing, the block's share of the active experts' tiles) | down, pushed | the block's tiles summed: x_out.
// Hand-over between workgroups words that are each their own flag, relaxed at agent scope; between ranks the same at system scope, with one fence
//           behind a launch's first instruction and one behind its last reads (DESIGN.md). No barrier of the grid, by XCD or otherwise.
// Residency all workgroups of all ranks run at once (resident_blocks); whoever is waited for runs or has run.
#pragma once
#include "sgl_lowlatency/stages/wave_attention.hpp"
#include "sgl_lowlatency/stages/wave_exchange.hpp"
#include "sgl_lowlatency/stages/wave_experts.hpp"

namespace sgl_lowlatency::kernels {

using namespace stages;

// What a thread needs of the rows. Row r of MonoRows has its request's length and row of req_to_token at index r of the requests.
template <abi::Isa kIsa>
SGL_DEVICE void load_requests(const abi::K2Params& p, const MonoShared<kIsa>& s) {
  const MonoLaunch& l = p.launch;
  const int32_t request = dialect::thread_idx(), uncounted = l.rows_per_request - p.counted_tokens;
  if (request >= l.rows / l.rows_per_request) return;
  const int32_t first_row = request * l.rows_per_request;
  const int64_t counted = dialect::load_constant(p.seq_lens + request);
  const int32_t length = checked(l, abi::kFaultBadLength, first_row, counted, l.geometry.req_to_token_stride - uncounted + 1) + uncounted;
  s.rows()->row[request].length = length >= l.rows_per_request ? length : 0;
  s.rows()->row[request].request =
      checked(l, abi::kFaultBadRequestRow, first_row, dialect::load_constant(p.req_pool_indices + request), l.geometry.num_request_rows);
}

template <abi::Isa kIsa>
struct K2 {
  const abi::K2Params& p;
  const MonoShared<kIsa>& s;
  const MonoLaunch& l;
  const abi::Geometry& g;
  int32_t parity;

  SGL_DEVICE K2(const abi::K2Params& params, const MonoShared<kIsa>& shared, int32_t parity_of_launch)
      : p(params), s(shared), l(params.launch), g(params.launch.geometry), parity(parity_of_launch) {}

  // A finished pair of a partial tile, to all ranks.
  SGL_DEVICE void push(int32_t exchange, int32_t tile, int32_t n, int32_t m, const TileSums<kIsa>& sums) const {
    const float y[2] = {sums.at(m), sums.at(m + 1)};
    push_pair(peers_of(l), nullptr, parity, exchange_tile(g, exchange, tile), n, m, y);
  }
  SGL_DEVICE void run_out_proj() const {
    const int32_t k = g.num_q_heads * g.head_dim;
    run_wave_tiles<8>(s, l.rows, PlainMatrix{p.out_proj, k}, owned_tiles(l),
                      WordOperand{l, l.at.attention_out, abi::kEdgeAttention, k, nullptr},
                      [&](int32_t tile, int32_t n, int32_t m, const TileSums<kIsa>& sums) { next().push(0, tile, n, m, sums); });
  }
  // Each tile of the stream is handed over by its owner, once.
  SGL_DEVICE void sum_attention() const {
    sum_tiles(l, parity, 0, [&](int32_t row, int32_t column, const float (&sums)[4]) {
      const int64_t at = static_cast<int64_t>(row) * g.hidden + column;
      const uint64_t old = dialect::load_plain(reinterpret_cast<const uint64_t*>(p.residual + at));
      const uint32_t low = static_cast<uint32_t>(old), high = static_cast<uint32_t>(old >> 32);
      uint32_t words[2] = {pack_bf16(low_float(low) + sums[0], high_float(low) + sums[1]),
                           pack_bf16(low_float(high) + sums[2], high_float(high) + sums[3])};
      dialect::store_plain(reinterpret_cast<uint64_t*>(p.residual_out + at), words[0] | static_cast<uint64_t>(words[1]) << 32);
      sync::publish(handover_words(l, l.at.mid) + at / 2, words);
    });
  }
  SGL_DEVICE WordOperand normed_stream() const { return {l, l.at.mid, abi::kEdgeOutProj, g.hidden, p.post_norm}; }
  SGL_DEVICE void run_gate_up() const {
    const abi::TileRange own = abi::even_share(g.intermediate / 8, dialect::block_idx(), l.grid);
    run_wave_tiles<4>(s, l.rows, GateUpMatrix(p.gate_up, g.intermediate, g.hidden), own, normed_stream(),
                      [&](int32_t tile, int32_t n, int32_t m, const TileSums<kIsa>& sums) {
                        next().publish_activation(n, m, sums, static_cast<int64_t>(n) * g.intermediate + tile * 8);
                      });
  }
  // SwiGLU of row n and channels m, m + 1 of a tile whose channel 0 is element `first` of the activations.
  SGL_DEVICE void publish_activation(int32_t n, int32_t m, const TileSums<kIsa>& sums, int64_t first) const {
    const float inverse = inverse_rms(s, g, n);
    float y[2];
SGL_UNROLL
    for (int32_t i = 0; i < 2; ++i) {
      const float gate = sums.at(m + i) * inverse;
      y[i] = dialect::divide(gate, 1.0f + dialect::exp2(-gate * kLog2e)) * (sums.at(m + i + 8) * inverse);
    }
    uint32_t word[1] = {pack_bf16(y[0], y[1])};
    sync::publish(handover_words(l, l.at.activation) + (first + m) / 2, word);
  }
  SGL_DEVICE void run_down() const {
    run_wave_tiles<8>(s, l.rows, PlainMatrix{p.down, g.intermediate}, owned_tiles(l),
                      WordOperand{l, l.at.activation, abi::kEdgeGateUp, g.intermediate, nullptr},
                      [&](int32_t tile, int32_t n, int32_t m, const TileSums<kIsa>& sums) { next().push(1, tile, n, m, sums); });
  }
  SGL_DEVICE void run_router() const {
    run_wave_tiles<8>(s, l.rows, PlainMatrix{p.router, g.hidden}, abi::even_share(g.num_experts / abi::kTileRows, dialect::block_idx(), l.grid),
                      normed_stream(), [&](int32_t tile, int32_t n, int32_t m, const TileSums<kIsa>& sums) {
                        const K2 again = next();
                        const MonoLaunch& l = again.l;
                        const float inverse = inverse_rms(s, l.geometry, n), low = sums.at(m) * inverse, high = sums.at(m + 1) * inverse;
                        uint32_t word[1] = {pack_bf16(low, high)};
                        if (dialect::planted(dialect::Planted::kUnroundedLogits)) {
                          word[0] = dialect::float_to_bits(low) >> 16 | (dialect::float_to_bits(high) & 0xffff0000u);
                        }
                        const int64_t at = (static_cast<int64_t>(n) * l.geometry.num_experts + tile * abi::kTileRows + m) / 2;
                        if (again.p.routed_logits != nullptr) dialect::store_plain(reinterpret_cast<uint32_t*>(again.p.routed_logits) + at, word[0]);
                        sync::publish(handover_words(l, l.at.logits) + at, word);
                      });
  }
  // Entry: all threads; the routing is there.
  SGL_DEVICE void run_expert_gate_up() const {
    const MonoRouting* const r = routing_of(s);
    const ExpertGateUp matrix(p.gate_up, r, g.moe_intermediate, g.hidden);
    const abi::TileRange own = abi::even_share(dialect::uniform(r->num_active) * matrix.tiles(), dialect::block_idx(), l.grid);
    run_wave_tiles<4>(s, l.rows, matrix, own, normed_stream(), [&](int32_t number, int32_t n, int32_t m, const TileSums<kIsa>& sums) {
      const int32_t tile = dialect::varying(number), place = tile / matrix.tiles();
      const uint32_t bits = r->row_bits[place];
      if ((bits >> n & 1u) == 0) return;
      const int64_t pair = r->first_pairs[place] + rows_below(bits, n);
      next().publish_activation(n, m, sums, pair * matrix.channels + tile % matrix.tiles() * 8);
    });
  }
  SGL_DEVICE void run_expert_down() const {
    stages::run_expert_down(l, s, p.down, owned_tiles(l),
                            [&](int32_t tile, int32_t n, int32_t m, const TileSums<kIsa>& sums) { next().push(1, tile, n, m, sums); });
  }
  SGL_DEVICE void sum_mlp() const {
    sum_tiles(l, parity, 1, [&](int32_t row, int32_t column, const float (&sums)[4]) {
      const uint64_t words = pack_bf16(sums[0], sums[1]) | static_cast<uint64_t>(pack_bf16(sums[2], sums[3])) << 32;
      dialect::store_plain(reinterpret_cast<uint64_t*>(p.x_out + static_cast<int64_t>(row) * g.hidden + column), words);
    });
  }
  // The last workgroup out closes the launch. Entry: all threads.
  SGL_DEVICE void close() const {
    order_reads();
    dialect::sync_publish();  // every wave's accesses are done: the release below covers them
    if (dialect::thread_idx() != 0) return;
    // Acquire and release, agent scope: pairs with the other workgroups' arrivals; the last one is ordered behind all that they did, and behind their
    // reads of the state that it overwrites.
    if (dialect::fetch_add_acq_rel_gpu(l.state->exit_ticket, 1u) != static_cast<uint32_t>(l.grid - 1)) return;
    dialect::store_plain(l.state->exit_ticket, 0u);
    dialect::store_plain(l.state->used_bytes, l.at.k2);
    dialect::store_plain(l.state->used_bytes + 1, l.at.total_bytes);
    close_parity(peers_of(l), l.rows);
    if (p.ends_step == 0) return;
    const uint64_t executed = dialect::load_plain(l.state->executed + l.rows) + 1;
    dialect::store_plain(l.state->executed + l.rows, executed);
    dialect::store_relaxed_system(p.executed_mirror + l.rows, executed);  // pairs with nothing: the host reads a figure
  }
  // The same with parameters that are read anew: for the next phase.
  SGL_DEVICE K2 next() const { return {dialect::read_again(p), s, parity}; }
  SGL_DEVICE void run() const {
    order_pushes();
    clear_handover(l, l.at.qkv, l.at.qkv + l.at.qkv_bytes);
    g.head_dim == 64 ? run_wave_attention<64>(next().p, s) : run_wave_attention<128>(next().p, s);
    next().run_out_proj();
    next().sum_attention();
    if (g.num_experts == 0) {
      next().run_gate_up();
      next().run_down();
    } else {
      next().run_router();
      const K2 again = next();
      route_step(again.l, s, again.p.routed_ids);
      next().run_expert_gate_up();
      next().run_expert_down();
    }
    next().sum_mlp();
    next().close();
  }
};

// Entry: every thread of every workgroup.
template <abi::Isa kIsa>
SGL_DEVICE void k2_body(const abi::K2Params& p) {
  const MonoShared<kIsa> s{dialect::shared_base()};
  dialect::await_previous_launch();
  load_requests(p, s);
  if (dialect::varying(dialect::thread_idx()) == 0) {  // or the lanes' mask would be kept for close
    const uint64_t word = sync::load_abort(peers_of(p.launch));
    if (word != 0) sync::raise_aborted(peer_sink(p.launch), peers_of(p.launch), word, {p.launch.rank, -1, p.launch.layer, 0});
  }
  dialect::sync_shared();
  K2<kIsa>(p, s, parity_of(dialect::load_plain(peers_of(p.launch).state()->launches))).run();
}

}  // namespace sgl_lowlatency::kernels
