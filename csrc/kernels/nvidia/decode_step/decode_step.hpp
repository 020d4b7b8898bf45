// decode_step: one decode step of a Llama-like dense model, embedding to logits, in one persistent launch. DESIGN.md has the reasons.
//
//   x = embedding[input_ids]
//   per layer: x += out_proj(attention(rope(qk_norm(qkv(rms_norm(x)) + bias))));  x += down(silu(gate(rms_norm(x))) * up(rms_norm(x)))
//   hidden_out = rms_norm(x) * final_norm;  logits = rms_norm(x) * final_norm @ head.T, where they are asked for
//
// Tensors   (abi/decode_step.hpp has all) weights of a layer [out, K] bf16 or FP8 (abi::WeightFormat), KV pool [slots, num_kv_heads, head_dim] bf16, both in
//           SGLang's own layout; inputs [rows] or [requests] int64, req_to_token [requests, tokens] int32; hidden_out [rows, hidden] bf16;
//           aux_out [rows, captured layers * hidden] bf16, the x that enters each captured layer; logits [rows, vocab] fp32. What blocks
//           hand to each other lies in abi::HandoverLayout.
// Grid      the plan's number of blocks, at most one an SM (all run at once), kNumThreads threads each; all
//           blocks stay for all layers. kNTiles: N tiles of the MMA, 1 for 1..8 rows, 2 for 9..16, 4 for 17..32. kElementBytes: of a weight,
//           2 (bf16) or 1 (FP8). kIsVerify: requests may have several rows (DecodeStepParams::rows_per_request). kExpertWords: 0
//           for dense layers; else every layer's MLP half is a router and up to 32 kExpertWords experts (DESIGN-moe.md).
//           kIsParallel: the step is a rank's share of a tensor-parallel group's (DESIGN-tp.md); Params: its parameters, or a timed one's.
// Roles     warps 0..7 consume; warp 8 streams the block's weights through the shared-memory ring, across every wait.
// Phases    the embedding, as the stream that layer -1 leaves; per layer: qkv | attention | out_proj | gate_up | down; the final
//           norm, and before it the LM head in a launch with logits. A block runs its static tiles (StaticPlan) and its share of
//           the attention items (cut on the device from the lengths), and behind its first gate_up tiles the layer's upkeep. Of a MoE layer,
//           qkv | attention | out_proj | router | clears, routing, fence | gate_up, the block's share of the active experts' tiles | down.
// Hand-over every word is its own flag (sync/handover.hpp): a phase polls the words it needs and stores its results, no more.
//           Words are used again kGenerations layers later, cleared and ordered meanwhile (stages/generations.hpp).
// Residency all blocks must run at once: the launcher checks occupancy and launches cooperatively. One launch at a time may use
//           a SyncState and a workspace.
#pragma once
#include <type_traits>

#include "sgl_lowlatency/stages/attention_phase.hpp"
#include "sgl_lowlatency/stages/gemm.hpp"
#include "sgl_lowlatency/stages/lm_head.hpp"
#include "sgl_lowlatency/stages/moe_experts.hpp"
#include "sgl_lowlatency/stages/operand.hpp"
#include "sgl_lowlatency/stages/peer_sums.hpp"
#include "sgl_lowlatency/stages/timeline.hpp"

namespace sgl_lowlatency::kernels {

using namespace stages;

template <int32_t kNTiles, int32_t kHeadDim, int32_t kElementBytes, bool kIsVerify, int32_t kExpertWords, class Params>
struct DecodeStep {
  static constexpr bool kIsParallel = !std::is_same_v<Params, DecodeStepParams>;
  const Params& p;
  const Shared& s;
  RingCursor cursor;
  PartialCursor partial;

  SGL_DEVICE DecodeStep(const Params& params, const Shared& shared) : p(params), s(shared) {}

  // What differs between the operations of layer `layer` (see run_tiles).
  struct Ops {
    const DecodeStep& step;
    int32_t layer;

    template <class Op>
    SGL_DEVICE void load(Op op, int32_t k0, int32_t k1) const {
      load_operand<kElementBytes>(step.p, step.s, layer, op, k0, k1);
      if constexpr (kIsParallel) {
        if (k0 == 0) step.stamp_op(layer, op, 0);
      }
    }
    // The stream's word that a tile adds to, and the norm weights that will scale the result; of qkv, the bias (none: zeros).
    template <class Op>
    SGL_DEVICE Early before(Op op, int32_t tile, int32_t m, int32_t n) const {
      if (op == abi::kOpGateUp || op == abi::kOpRouter) return {};
      if (op == abi::kOpQkv) {
        const bf16* const bias = layer_tables(step.s, layer).weights.qkv_bias;
        return {0, bias == nullptr ? 0u : dialect::load_constant(reinterpret_cast<const uint32_t*>(bias + tile * abi::kTileRows + m))};
      }
      if constexpr (kIsParallel) return {};  // take_sums loads them
      uint32_t word[1];
      dialect::load_words(word, stream_words(step.p, step.s, input_stream(step.p, layer, op), step.p.stream.x).buffer + stream_word(tile, m, n));
      const bf16* const norm = norm_behind(step.p, step.s, layer, op);
      return {word[0], dialect::load_constant(reinterpret_cast<const uint32_t*>(norm + tile * abi::kTileRows + m))};
    }
    SGL_DEVICE int64_t stream_word(int32_t tile, int32_t m, int32_t n) const {
      return (static_cast<int64_t>(n) * step.p.geometry.hidden + tile * abi::kTileRows + m) / 2;
    }

    // Entry: all lanes of a warp that has a finisher.
    template <class Op>
    SGL_DEVICE void finish(Op op, const TilePair& pair, bool is_finisher, const Early& early) const {
      const Params& p = step.p;
      const Shared& s = step.s;
      const int64_t row = pair.n;
      if (op == abi::kOpQkv) {
        if (!is_finisher) return;
        const int32_t columns = (p.geometry.num_q_heads + 2 * p.geometry.num_kv_heads) * kHeadDim;
        const float inverse_rms = s.rows()->row[row].inverse_rms;
        uint32_t words[2] = {dialect::float_to_bits(pair.y[0] * inverse_rms + low_float(early.weights)),
                             dialect::float_to_bits(pair.y[1] * inverse_rms + high_float(early.weights))};
        sync::publish(handover_buffer(p, s, layer, p.at.qkv) + row * columns + pair.tile * abi::kTileRows + pair.m, words);
      } else if (op == abi::kOpRouter) {
        if (!is_finisher) return;
        const float inverse_rms = s.rows()->row[row].inverse_rms, logits[2] = {pair.y[0] * inverse_rms, pair.y[1] * inverse_rms};
        uint32_t words[1] = {pack_bf16(logits[0], logits[1])};
        if (dialect::planted(dialect::Planted::kUnroundedLogits)) {
          words[0] = dialect::float_to_bits(logits[0]) >> 16 | (dialect::float_to_bits(logits[1]) & 0xffff0000u);
        }
        const int32_t expert = pair.tile * abi::kTileRows + pair.m;
        uint32_t* const at = handover_buffer(p, s, layer, abi::router_logits_at(p.geometry, p.at, p.rows));
        sync::publish(at + (row * p.geometry.num_experts + expert) / 2, words);
      } else if (op == abi::kOpGateUp) {
        if (!is_finisher) return;
        const float inverse_rms = s.rows()->row[row].inverse_rms;
        float out[2];
SGL_UNROLL
        for (int32_t i = 0; i < 2; ++i) {
          out[i] = swiglu(pair.y[i] * inverse_rms, pair.up[i] * inverse_rms);
        }
        uint32_t words[1] = {pack_bf16(out[0], out[1])};
        const int32_t neuron = pair.tile * (abi::kTileRows / 2) + pair.m;
        sync::publish(handover_buffer(p, s, layer, p.at.activation) + (row * p.geometry.intermediate + neuron) / 2, words);
      } else if constexpr (kIsParallel) {
        if (is_finisher) push_pair(peers_of(p), nullptr, peer_copy(s, layer, op == abi::kOpDown), pair.tile, pair.n, pair.m, pair.y);
      } else {
        uint32_t word[1] = {early.word};
        if (is_finisher && !sync::is_written(word)) {
          sync::await_words(fault_sink(p), stream_words(p, s, input_stream(p, layer, op), p.stream.x), stream_word(pair.tile, pair.m, pair.n), word);
        }
        const uint32_t x = pack_bf16(low_float(word[0]) + pair.y[0], high_float(word[0]) + pair.y[1]);
        if (dialect::planted(dialect::Planted::kWithheldSignal) && op == abi::kOpOutProj && layer == 0 && pair.tile == 0) return;
        publish_stream(p, s, op == abi::kOpOutProj ? mid_stream(p, layer) : end_stream(p, layer), pair.tile, pair.m, pair.n, is_finisher, x,
                       early.weights);
        const int32_t entered = dialect::planted(dialect::Planted::kCapturesOutput) ? layer : layer + 1;
        if (op == abi::kOpDown && is_finisher && entered < p.geometry.num_layers) {
          capture_stream(p, layer_tables(s, entered).weights, pair.tile, pair.m, pair.n, x);
        }
      }
    }
    template <class Op>
    SGL_DEVICE void behind(Op op, int32_t index) const {
      if (op == abi::kOpGateUp && index == 0) step.begin_layer_upkeep(layer);
      if (op == abi::kOpGateUp && index == 1) step.finish_layer_upkeep(layer);
    }
  };

  // Entry: as begin_upkeep.
  SGL_DEVICE void begin_layer_upkeep(int32_t layer) const {
    begin_upkeep<kElementBytes>(p, s, layer);
    if constexpr (kIsParallel) {
      clear_pushed_words(p, s, layer);
      stamp(p, layer, abi::kPointClears);
    }
  }

  // Entry: as finish_upkeep.
  SGL_DEVICE void finish_layer_upkeep(int32_t layer) const {
    finish_upkeep(p, s, layer, [&] {
      if constexpr (kIsParallel) {
        stamp(p, layer, abi::kPointFence);
        order_generations<true>();
        stamp(p, layer, abi::kPointFenced);
      } else {
        order_generations<false>();
      }
    });
  }

  // Behind an operation's operand, its tiles or its sums: point 0, 1, 2 of the operation.
  template <class Op>
  SGL_DEVICE void stamp_op(int32_t layer, Op op, int32_t point) const {
    const int32_t first = op == abi::kOpQkv      ? static_cast<int32_t>(abi::kPointQkvOperand)
                          : op == abi::kOpOutProj ? static_cast<int32_t>(abi::kPointOutProjOperand)
                          : op == abi::kOpGateUp  ? static_cast<int32_t>(abi::kPointGateUpOperand)
                                                  : static_cast<int32_t>(abi::kPointDownOperand);
    stamp(p, layer, op == abi::kOpGateUp && point == 1 ? static_cast<int32_t>(abi::kPointGateUp) : first + point);
  }

  // Entry: all consumer threads.
  template <class Op>
  SGL_DEVICE void run_op(int32_t layer, Op op) {
    const int32_t num_tiles = s.rows()->tiles[op].count;
    if (op == abi::kOpGateUp && num_tiles == 0) begin_layer_upkeep(layer);
    // FP8 tiles are short, and their finishing counts. Behind qkv, attention keeps the new tokens' k and v of verify in half of scratch.
    const bool is_in_order = kElementBytes == 2 || (kIsVerify && op == abi::kOpQkv);
    if (num_tiles > 0) run_tiles<kNTiles, kElementBytes>(p, s, layer, op, is_in_order, s.rows()->tiles[op], cursor, partial, Ops{*this, layer});
    if (op == abi::kOpGateUp && num_tiles < 2) finish_layer_upkeep(layer);
    if constexpr (kIsParallel) stamp_op(layer, op, 1);
  }

  // What a layer executes of code has to stay in the instruction cache (DESIGN.md). So out_proj and down, which both add to the stream, are one piece
  // of code, run twice. Entry: all consumer threads.
  SGL_DEVICE void run_dense_layer(int32_t layer) {
    if constexpr (kIsParallel) stamp(p, layer, abi::kPointBegin);
    run_op(layer, StaticOp<abi::kOpQkv>{});
    run_attention<kHeadDim, kIsVerify>(p, s, layer, partial.half);
    if constexpr (kIsParallel) stamp(p, layer, abi::kPointAttention);
SGL_NO_UNROLL
    for (int32_t is_down = 0; is_down < 2; ++is_down) {
      if (is_down) run_op(layer, StaticOp<abi::kOpGateUp>{});
      const int32_t op = is_down ? static_cast<int32_t>(abi::kOpDown) : static_cast<int32_t>(abi::kOpOutProj);
      run_op(layer, op);
      if constexpr (kIsParallel) {
        take_sums(p, s, layer, op);
        stamp_op(layer, op, 2);
      }
    }
  }

  // qkv, out_proj and router are one piece of code here. The panel that the router multiplies is gate_up's too: a block without tiles of the router
  // loads it all the same. The upkeep has places of its own, since how many tiles of gate_up a block has is known on the device only: its clears are
  // asked for in front of the routing, and made when its fence comes, behind it, where the first experts' weights are on their way. Entry: all consumer threads.
  SGL_DEVICE void run_moe_layer(int32_t layer) {
    static_assert(abi::kOpQkv == 0 && abi::kOpOutProj == 1, "the first operations are numbered as they run");
    const Ops ops{*this, layer};
SGL_NO_UNROLL
    for (int32_t nth = 0; nth < 3; ++nth) {
      const MoeOp op{nth < 2 ? nth : static_cast<int32_t>(abi::kOpRouter)};
      if (op == abi::kOpOutProj) run_attention<kHeadDim, kIsVerify>(p, s, layer, partial.half);
      const abi::TileRange& own = s.rows()->tiles[op];
      if (own.count > 0 || op == abi::kOpRouter) run_tiles<kNTiles, kElementBytes>(p, s, layer, op, true, own, cursor, partial, ops);
      if constexpr (kIsParallel) {
        if (op == abi::kOpOutProj) take_sums(p, s, layer, op);
      }
    }
    begin_layer_upkeep(layer);
    route_rows<kExpertWords>(p, s, layer);
    const GateUpBegin<kElementBytes> gate_up = begin_expert_gate_up<kElementBytes>(p, s, layer);
    finish_layer_upkeep(layer);
    run_expert_gate_up<kNTiles, kElementBytes>(p, s, layer, gate_up, cursor, partial);
    run_expert_down<kNTiles, kElementBytes>(p, s, layer, cursor, partial, ops);
    if constexpr (kIsParallel) take_sums(p, s, layer, abi::kOpDown);
  }

  // The last block out closes the launch: generations move on, the step is counted. Every block read the state before its ticket,
  // so none can see the next launch's, which the end of this one makes visible to it.
  // Entry: all consumer threads.
  SGL_DEVICE void close_launch() const {
    if constexpr (kIsParallel) {
      // What was taken of other ranks since the last layer's fence is in front of the next launch.
      if (!dialect::planted(dialect::Planted::kMissingPeerAcquire)) order_generations<true>();
    }
    sync_consumers();
    if (dialect::thread_idx() != 0) return;
    abi::SyncState* sync = p.sync;
    // Acquire and release, gpu scope: pairs with the other blocks' arrivals, so that the last one is ordered after every block's
    // work: its reads of the state, which the stores below overwrite, and all that a step counted as executed must have done.
    if (dialect::fetch_add_acq_rel_gpu(sync->exit_ticket, 1u) != static_cast<uint32_t>(dialect::grid_dim() - 1)) return;
    dialect::store_plain(sync->exit_ticket, 0u);
    close_generations(p, s);
    if constexpr (kIsParallel) dialect::store_plain(peers_of(p).state()->used_rows, p.rows);
    const uint64_t executed = dialect::load_plain(sync->executed + p.rows) + 1;
    dialect::store_plain(sync->executed + p.rows, executed);
    dialect::store_relaxed_system(p.executed_mirror + p.rows, executed);  // pairs with nothing: the host reads a figure
  }

  // Entry: all consumer threads, after the block's first barrier.
  SGL_DEVICE void run() {
    if constexpr (kIsParallel) {
      exchange_embedding(p, s, layer_tables(s, 0).weights);
      clear_pushed_words(p, s, -1);
    } else {
      publish_embedding(p, s, layer_tables(s, 0).weights);
    }
    clear_generation(p, s, -1);
    sync_consumers();  // the items are kept
    if constexpr (kIsParallel) {
      // What is pushed from here on carries this launch's first clears, and the last ones of the launch before.
      if (!dialect::planted(dialect::Planted::kMissingPeerRelease)) order_generations<true>();
    }
    for (int32_t layer = 0; layer < p.geometry.num_layers; ++layer) {
      if constexpr (kExpertWords > 0) {
        run_moe_layer(layer);
      } else {
        run_dense_layer(layer);
      }
    }
    if (p.logits != nullptr) {
      run_head<kNTiles>(p, s, cursor, partial);
    } else {
      final_norm(p, s);
    }
    close_launch();
  }
};

// Entry: every thread of every block. The threads of different warps prepare different parts of the block's state; the barrier
// publishes it (the mbarriers to the threads too, as the init fence does to the copies), and then the roles part for good.
// Params: DecodeStepParams; or of a rank ParallelStepParams, TimedStepParams.
template <int32_t kNTiles, int32_t kHeadDim, int32_t kElementBytes, bool kIsVerify, int32_t kExpertWords = 0, class Params = DecodeStepParams>
SGL_DEVICE void decode_step_body(const Params& p) {
  constexpr bool kIsParallel = !std::is_same_v<Params, DecodeStepParams>;
  const Shared s{p.shared};
  const int32_t thread = dialect::thread_idx();
  if constexpr (kIsParallel) {
    if (thread < p.rows) load_row<kIsVerify>(p, s, thread, p.num_tokens);
    if (thread == kConsumerThreads + 31) {  // a launch behind one that ranks were stopped in ends at once
      const uint64_t word = sync::load_abort(peers_of(p));
      if (word != 0) sync::raise_aborted(fault_sink(p), peers_of(p), word, {p.rank, -1, 0, 0, abi::kPeerNothing});
    }
  } else {
    if (thread < p.rows) load_row<kIsVerify>(p, s, thread, p.geometry.vocab);
  }
  if (thread == kConsumerThreads) {
    for (int32_t i = 0; i < p.num_stages; ++i) {
      dialect::mbarrier_init(s.full(i), abi::kNumProducerWarps);
      dialect::mbarrier_init(s.empty(i), abi::kNumConsumerWarps);
    }
    for (uint32_t half = 0; half < 2; ++half) dialect::mbarrier_init(s.partials(half), abi::kNumConsumerWarps);
    if constexpr (kExpertWords > 0) dialect::mbarrier_init(s.routed(), 1);
    dialect::mbarrier_init_fence();
  }
  if (thread >= 64 && thread < 64 + abi::kGenerations) s.rows()->used_bytes[thread - 64] = dialect::load_plain(p.sync->used_bytes + thread - 64);
  if (thread == 95) s.rows()->first_generation = dialect::load_plain(p.sync->first_generation);
  if (thread >= 96 && thread < 100) reinterpret_cast<uint32_t*>(s.zero_row())[thread - 96] = 0u;
  if (thread >= 128 && thread < 128 + abi::kNumMatrices) {
    const abi::TileRange* range = p.tiles + dialect::block_idx() * abi::kNumMatrices + thread - 128;
    s.rows()->tiles[thread - 128] = {dialect::load_constant(&range->begin), dialect::load_constant(&range->count)};
  }
  if (thread == 160) load_first_tables<kElementBytes>(p, s);
  dialect::sync_block();
  if (thread == 0) keep_items<kIsVerify>(p, s);
  if (thread >= kConsumerThreads) {
    if constexpr (kExpertWords > 0) {
      produce_moe_weights<kElementBytes>(p, s, thread % 32);
    } else {
      produce_weights<kElementBytes>(p, s, thread % 32);
    }
  } else {
    DecodeStep<kNTiles, kHeadDim, kElementBytes, kIsVerify, kExpertWords, Params>(p, s).run();
  }
}

}  // namespace sgl_lowlatency::kernels
