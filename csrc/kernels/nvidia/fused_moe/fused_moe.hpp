// fused_moe: the MoE of a DeepSeek-V4.1 layer, router to combined output, in one persistent launch, and if asked to mHC's post behind it. DESIGN.md
// has the reasons.
//
//   logits = x @ router.T;   score = sqrt(softplus(logits));   ids = top_k of score + bias;   weight = score / sum * routed_scaling
//   expert(x) = down @ (silu(min(gate @ x, limit)) * clamp(up @ x, limit));   out = shared_expert(x) + sum over ids of weight * expert(x)
//   of a launch with streams:  R'[i] = post[i] out + sum_j comb[j][i] R[j];   post, comb: of the mix of R (stages/hyper_mix.hpp)
//
// Tensors   (abi/fused_moe.hpp has all) x [rows, hidden] bf16; router [num_experts, hidden] bf16; gate_up [num_experts, 2 intermediate, hidden / 2]
//           and down [num_experts, hidden, intermediate / 2] FP4, interleaved, with e8m0 scales; shared_gate_up [2 intermediate, hidden] and
//           shared_down [hidden, intermediate] FP8 with fp32 scales; out [rows, hidden] bf16; or null, streams R and streams_out R' [rows, 4, hidden]
//           bf16, mix [24, 4 * hidden] fp32, coefficients [rows, 24] fp32.
// Grid      at most one block an SM (all run at once), kMoeThreads threads each.
// Roles     warps 0..7 consume, each from a ring of its own; lanes of warps 8 and 9 fill one ring each; warp 10 routes, then mixes streams.
// Phases    router | the shared expert's gate_up, while rows are routed | the experts' gate_up | the shared expert's down | the experts' down |
//           sums, and of streams the post.
// Hand-over logits, choices, activations, outputs and of streams mixes and coefficients as words that are each their own flag, two generations that
//           launches use in turn. Of ranks (abi/parallel_moe.hpp) sums are pushed to every rank's workspace, words at system scope, three parities in
//           turn; out is their sum in rank order, the same bits on every rank.
// Residency all blocks must run at once; FusedMoe checks occupancy. A launch may begin before the one in front is over (PDL), and the next one before
//           this is; launches of one workspace follow one another. Blocks of a rank wait for the other ranks' launches, in `sums` alone: all ranks
//           launch the same rows in the same order.
#pragma once
#include "sgl_lowlatency/stages/fused_moe_ranks.hpp"
#include "sgl_lowlatency/stages/fused_moe_ring.hpp"
#include "sgl_lowlatency/stages/fused_moe_routing.hpp"
#include "sgl_lowlatency/stages/launch_count.hpp"

namespace sgl_lowlatency::kernels {

using namespace stages;

// The last block out closes the launch. Entry: one thread of each block, behind a barrier that follows the block's reads of the state.
template <class Params>
SGL_DEVICE void close_moe(const Params& p, int32_t generation) {
  // Acquire and release, gpu scope: pairs with the other blocks' arrivals, so that the stores below come after every block's reads of the state.
  if (dialect::fetch_add_acq_rel_gpu(p.state->exit_ticket, 1u) != static_cast<uint32_t>(dialect::grid_dim() - 1)) return;
  dialect::store_plain(p.state->exit_ticket, 0u);
  dialect::store_plain(p.state->launches, dialect::load_plain(p.state->launches) + 1u);
  dialect::store_plain(p.state->used_words + generation, abi::moe_used_words(abi::moe_handover(p.geometry, p.rows), has_post(p)));
  dialect::store_plain(p.state->used_words + (1 - generation), 0);
  count_launch(p);
  end_parity(p);
}

// Entry: all consumer threads, after the block's first barrier.
template <class Params>
SGL_DEVICE void fused_moe_consume(const Params& p, const MoeShared& s) {
  const MoeWords words = moe_words(p, s);
  MoeConsumer state;
  const auto pass = [&](abi::MoePoint point) {
    if (p.trace == nullptr || dialect::thread_idx() != 0) return;
    dialect::store_plain(p.trace + dialect::block_idx() * abi::kNumMoePoints + point, dialect::timer_ns());
  };
  pass(abi::kMoePointBegin);
SGL_NO_UNROLL
  for (int32_t number = 0; number < abi::kNumMoeOps; ++number) {  // one copy of each kind's code: it is run cold
    const MoeOp op = static_cast<MoeOp>(number);
    if (op == abi::kMoeGateUp) {
      order_sums(p);
      // Pairs with the router warp's arrival (route_moe): jobs, pairs and weights are there.
      sync::wait_mbarrier(fault_sink(p), abi::kFaultRouting, 0, 0, s.routed(), 0u);
      pass(abi::kMoePointRouted);
    }
    if (is_routed(op)) {
      run_routed_op(p, s, words, op, state);
    } else {
      run_static_op(p, s, words, op, state);
    }
    pass(static_cast<abi::MoePoint>(number + (number < abi::kMoeGateUp ? abi::kMoePointRouter : abi::kMoePointRouter + 1)));
  }
  sum_moe(p, s, words);
  pass(abi::kMoePointSums);
  if (dialect::thread_idx() == 0) close_moe(p, s.state()->generation);
}

// Which generation it is and what is to be cleared, from the state that the launch in front has left. Entry: consumers and the router warp; whoever
// reads what that launch wrote is behind this. Ends with a barrier of theirs.
template <class Params>
SGL_DEVICE void begin_moe(const Params& p, const MoeShared& s) {
  constexpr int32_t kAllButTheProducers = 2;  // named barrier
  if (!dialect::planted(dialect::Planted::kNoAwaitOfPrevious)) dialect::await_previous_launch();
  if (dialect::thread_idx() == 0) {
    const int32_t generation = static_cast<int32_t>(dialect::load_plain(p.state->launches) % 2u);
    const MoeParity of_ranks = begin_parity(p);
    *s.state() = {generation, 0, dialect::load_plain(p.state->used_words + (1 - generation)), of_ranks.parity, of_ranks.rows_to_clear};
  }
  dialect::sync_named(kAllButTheProducers, abi::kMoeThreads - abi::kMoeProducerWarps * 32);
}

// Params: FusedMoeParams, or ParallelMoeParams of a rank. Entry: every thread of every block. The barrier publishes the mbarriers to the threads, as
// the init fence does to the copies. Producers ask for router and shared expert, which nobody writes, while the launch in front is still running.
template <class Params>
SGL_DEVICE void fused_moe_body(const Params& p) {
  const MoeShared s{p.shared};
  const int32_t thread = dialect::thread_idx(), warp = thread / 32;
  if (thread == kConsumerThreads) {
    for (int32_t i = 0; i < abi::kNumConsumerWarps; ++i) {
      for (int32_t slot = 0; slot < s.at.depth; ++slot) {
        dialect::mbarrier_init(s.full(i, slot), 1);
        dialect::mbarrier_init(s.empty(i, slot), 1);
      }
    }
    dialect::mbarrier_init(s.routed(), 1);
    dialect::mbarrier_init_fence();
  }
  dialect::sync_block();
  dialect::allow_next_launch();
  if (warp >= abi::kNumConsumerWarps && warp < abi::kMoeRouterWarp) {
    produce_moe_weights(p, s);
    return;
  }
  begin_moe(p, s);
  if (warp == abi::kMoeRouterWarp) {
    route_moe(p, s);
  } else {
    fused_moe_consume(p, s);
  }
}

}  // namespace sgl_lowlatency::kernels
