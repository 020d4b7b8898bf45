// decode_step: one decode step of a Qwen3 dense model, embedding to final norm, in one persistent launch. DESIGN.md has the reasons.
//
//   x = embedding[input_ids]
//   per layer: x += out_proj(attention(rope(qk_norm(qkv(rms_norm(x))))));  x += down(silu(gate(rms_norm(x))) * up(rms_norm(x)))
//   hidden_out = rms_norm(x) * final_norm
//
// Tensors   (abi/decode_step.hpp has all) weights of a layer [out, K] bf16, KV pool [slots, num_kv_heads, head_dim] bf16, both in
//           SGLang's own layout; inputs [rows] int64, req_to_token [requests, tokens] int32; residual x [rows, hidden] bf16;
//           qkv [rows, (num_q_heads + 2 num_kv_heads) head_dim] fp32; attention_out [rows, num_q_heads head_dim] bf16;
//           activation [rows, intermediate] bf16; partial_out [items, 8, head_dim] fp32; hidden_out [rows, hidden] bf16.
// Grid      the plan's number of blocks, one an SM (correct for any number that runs at once), kNumThreads threads each; all
//           blocks stay for all layers. kNTiles: N tiles of the MMA, 1 for 1..8 rows, 2 for 9..16.
// Roles     warps 0..7 consume; warps 8..11 stream the block's weights through the shared-memory ring, across every wait.
// Phases    per layer: qkv | attention | out_proj | gate_up | down; then the final norm. A block runs its static tiles
//           (StaticPlan) and its share of the attention items (cut on the device from the lengths).
// Hand-over every phase waits for the edge of the phase before it (sync/edge.hpp), and signals its own after its last store.
//           No buffer is overwritten while readable: a phase's writers have waited, edge by edge, for all of its readers.
//           A split's partials pass through a ticket (attention_combine.hpp).
// Residency all blocks must run at once: the launcher checks occupancy and launches cooperatively. One launch at a time may use
//           a SyncState and a workspace.
#pragma once
#include "sgl_lowlatency/stages/attention_phase.hpp"
#include "sgl_lowlatency/stages/gemm.hpp"

namespace sgl_lowlatency::kernels {

using namespace stages;

template <int32_t kNTiles, int32_t kHeadDim>
struct DecodeStep {
  const DecodeStepParams& p;
  const Shared& s;
  RingCursor cursor;
  uint32_t scratch_parity = 0;

  SGL_DEVICE DecodeStep(const DecodeStepParams& params, const Shared& shared) : p(params), s(shared) {}

  SGL_DEVICE bf16* residual_row(int32_t row) const { return p.residual + static_cast<int64_t>(row) * p.geometry.hidden; }

  // What differs between the four operations of layer `layer` (see run_tiles).
  struct Ops {
    const DecodeStep& step;
    const bf16* norm_weight;  // of qkv and gate_up
    bool is_embedding;        // layer 0, before its out_proj: the residual stream is still the embedding

    SGL_DEVICE const bf16* residual_source(int32_t row) const {
      return is_embedding ? embedding_row(step.p, step.s, row) : static_cast<const bf16*>(step.residual_row(row));
    }
    template <int32_t kOp>
    SGL_DEVICE void load(int32_t k0, int32_t k1) const {
      constexpr bool kNorm = kOp == abi::kOpQkv || kOp == abi::kOpGateUp;
      const DecodeStepParams& p = step.p;
      const bf16* input = kOp == abi::kOpOutProj ? p.attention_out : p.activation;
      load_panel<kNorm>(p, step.s, p.ops[kOp].k_panel, k0, k1, norm_weight,
                        [&](int32_t row) { return kNorm ? residual_source(row) : input + static_cast<int64_t>(row) * p.ops[kOp].k_extent; });
      if (kNorm && k1 == p.ops[kOp].k_extent) finish_square_sums(p, step.s);
    }
    template <int32_t kOp>
    SGL_DEVICE bf16 before(int32_t tile, int32_t m, int32_t n) const {
      if (kOp == abi::kOpQkv || kOp == abi::kOpGateUp) return bf16{};
      return dialect::load_plain(residual_source(n) + tile * abi::kTileRows + m);
    }
    template <int32_t kOp>
    SGL_DEVICE void finish(int32_t tile, int32_t m, int32_t n, float y, float y8, bf16 residual) const {
      const DecodeStepParams& p = step.p;
      const int32_t column = tile * abi::kTileRows + m;
      if (kOp == abi::kOpQkv) {
        const int32_t columns = (p.geometry.num_q_heads + 2 * p.geometry.num_kv_heads) * kHeadDim;
        dialect::store_plain(p.qkv + static_cast<int64_t>(n) * columns + column, y * step.s.rows()->inverse_rms[n]);
      } else if (kOp == abi::kOpGateUp) {
        const float inverse_rms = step.s.rows()->inverse_rms[n], x = y * inverse_rms, silu = x / (1.0f + dialect::exp2(-x * kLog2e));
        const int32_t neuron = tile * (abi::kTileRows / 2) + m;
        dialect::store_plain(p.activation + static_cast<int64_t>(n) * p.geometry.intermediate + neuron, dialect::to_bf16(silu * (y8 * inverse_rms)));
      } else {
        dialect::store_plain(step.residual_row(n) + column, dialect::to_bf16(dialect::to_float(residual) + y));
      }
    }
  };

  // The edge an operation waits for (qkv: that of the layer before) and the one it signals.
  static constexpr abi::EdgeIdx kInputEdge[abi::kNumOps] = {abi::kEdgeDown, abi::kEdgeAttention, abi::kEdgeOutProj, abi::kEdgeGateUp};
  static constexpr abi::EdgeIdx kOutputEdge[abi::kNumOps] = {abi::kEdgeQkv, abi::kEdgeOutProj, abi::kEdgeGateUp, abi::kEdgeDown};

  // Entry: all consumer threads. A block without tiles of the operation neither waits nor signals.
  template <int32_t kOp>
  SGL_DEVICE void run_op(int32_t layer) {
    if (s.rows()->tiles[kOp].count == 0) return;
    constexpr abi::EdgeIdx kInput = kInputEdge[kOp], kOutput = kOutputEdge[kOp];
    // Read before the wait, which hides its latency.
    const bf16* norm_weight = dialect::load_constant_pointer(kOp == abi::kOpQkv ? &p.layers[layer].input_norm : &p.layers[layer].post_norm);
    await_phase(p, s, kInput, kOp == abi::kOpQkv ? layer - 1 : layer);
    run_tiles<kNTiles, kOp>(p, s, layer, cursor, scratch_parity, Ops{*this, norm_weight, layer == 0 && kOp <= abi::kOpOutProj});
    if (dialect::planted(dialect::Planted::kWithheldSignal) && layer == 0 && kOp == abi::kOpOutProj && s.rows()->tiles[kOp].begin == 0) return;
    signal_phase(p, kOutput);
  }

  // Row r by block r % grid: nothing waits for it but the end of the launch. Entry: all consumer threads.
  SGL_DEVICE void final_norm() {
    if (dialect::block_idx() >= p.rows) return;
    await_phase(p, s, abi::kEdgeDown, p.geometry.num_layers - 1);
    const int32_t hidden = p.geometry.hidden, warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32;
    for (int32_t row = dialect::block_idx(); row < p.rows; row += dialect::grid_dim()) {
      float squares = 0.0f;
      for (int32_t i = dialect::thread_idx(); i < hidden; i += kConsumerThreads) {
        const float x = dialect::to_float(dialect::load_plain(residual_row(row) + i));
        squares += x * x;
      }
SGL_UNROLL
      for (int32_t mask = 16; mask > 0; mask /= 2) squares += dialect::shuffle_xor(squares, mask);
      if (lane == 0) s.rows()->square_sum[row][warp] = squares;
      sync_consumers();
      float sum = 0.0f;
      for (int32_t w = 0; w < abi::kNumConsumerWarps; ++w) sum += s.rows()->square_sum[row][w];
      const float inverse_rms = dialect::rsqrt(sum / static_cast<float>(hidden) + p.geometry.rms_eps);
      for (int32_t i = dialect::thread_idx(); i < hidden; i += kConsumerThreads) {
        const float x = dialect::to_float(dialect::load_plain(residual_row(row) + i));
        dialect::store_plain(p.hidden_out + static_cast<int64_t>(row) * hidden + i,
                             dialect::to_bf16(x * inverse_rms * dialect::to_float(dialect::load_constant(p.final_norm + i))));
      }
    }
  }

  // The last block out closes the launch: bases move up by this launch's signals, the step is counted. Every block read the
  // bases before its ticket, so none can see the next launch's, which the end of this one makes visible to it.
  // Entry: all consumer threads.
  SGL_DEVICE void close_launch() const {
    sync_consumers();
    if (dialect::thread_idx() != 0) return;
    abi::SyncState* sync = p.sync;
    // Acquire and release, gpu scope: pairs with the other blocks' arrivals, so that the last one is ordered after every block's
    // work: its reads of the bases, which the stores below overwrite, and all that a step counted as executed must have done.
    if (dialect::fetch_add_acq_rel_gpu(sync->exit_ticket, 1u) != static_cast<uint32_t>(dialect::grid_dim() - 1)) return;
    dialect::store_plain(sync->exit_ticket, 0u);
    for (int32_t e = 0; e < abi::kNumEdges; ++e) {
      const auto edge = static_cast<abi::EdgeIdx>(e);
      dialect::store_plain(sync->edge_base + e, s.rows()->edge_base[e] + static_cast<uint32_t>(p.geometry.num_layers * signals_per_layer(p, edge)));
    }
    const uint64_t executed = dialect::load_plain(sync->executed + p.rows) + 1;
    dialect::store_plain(sync->executed + p.rows, executed);
    dialect::store_relaxed_system(p.executed_mirror + p.rows, executed);  // pairs with nothing: the host reads a figure
  }

  // Entry: all consumer threads, after the block's first barrier.
  SGL_DEVICE void run() {
    for (int32_t layer = 0; layer < p.geometry.num_layers; ++layer) {
      run_op<abi::kOpQkv>(layer);
      run_attention<kHeadDim>(p, layer);
      run_op<abi::kOpOutProj>(layer);
      run_op<abi::kOpGateUp>(layer);
      run_op<abi::kOpDown>(layer);
    }
    final_norm();
    close_launch();
  }
};

// Entry: every thread of every block. The threads of different warps prepare different parts of the block's state; the barrier
// publishes it (the mbarriers to the threads too, as the init fence does to the copies), and then the roles part for good.
template <int32_t kNTiles, int32_t kHeadDim>
SGL_DEVICE void decode_step_body(const DecodeStepParams& p) {
  const Shared s{p.shared};
  const int32_t thread = dialect::thread_idx();
  if (thread < p.rows) load_row(p, s, thread);
  if (thread == kConsumerThreads) {
    for (int32_t i = 0; i < p.num_stages; ++i) {
      dialect::mbarrier_init(s.full(i), abi::kNumProducerWarps);
      dialect::mbarrier_init(s.empty(i), abi::kNumConsumerWarps);
    }
    dialect::mbarrier_init_fence();
  }
  if (thread >= 64 && thread < 64 + abi::kNumEdges) s.rows()->edge_base[thread - 64] = dialect::load_plain(p.sync->edge_base + thread - 64);
  if (thread >= 96 && thread < 100) reinterpret_cast<uint32_t*>(s.zero_row())[thread - 96] = 0u;
  if (thread >= 128 && thread < 128 + abi::kNumOps) {
    const abi::TileRange* range = p.tiles + dialect::block_idx() * abi::kNumOps + thread - 128;
    s.rows()->tiles[thread - 128] = {dialect::load_constant(&range->begin), dialect::load_constant(&range->count)};
  }
  dialect::sync_block();
  if (thread >= kConsumerThreads) {
    produce_weights(p, s, (thread - kConsumerThreads) / 32, thread % 32);
  } else {
    DecodeStep<kNTiles, kHeadDim>(p, s).run();
  }
}

}  // namespace sgl_lowlatency::kernels
