// attention_out: a DeepSeek-V4.1 layer from attention's heads to the normed input of its MoE, in one persistent launch. DESIGN.md has the reasons.
//
//   latent[g] = wo_a[g] @ rotate_back(heads of group g);   y = wo_b @ latent
//   R'[i] = post[i] y + sum_j comb[j][i] R[j];   out = norm(sum_k pre[k] R'[k]);   pre, post, comb: of the mix of R (stages/hyper_mix.hpp)
//
// Tensors   (abi/attention_out.hpp has all) x [rows, heads, head_dim] bf16; streams R and streams_out R' [rows, 4, hidden] bf16; wo_a [groups, lora,
//           heads / groups * head_dim] bf16; wo_b [hidden, groups * lora] FP8 with fp32 scales of 32 x 32; mix [24, 4 * hidden] fp32; out [rows,
//           hidden] bf16.
// Grid      at most one block an SM (all run at once), kAttnOutThreads threads each. kNTiles: of 8 rows, 1, 2, 4 or 6.
// Roles     warps 0..7 consume; warp 8 streams the block's weights through the shared-memory ring; warp 9 mixes the streams.
// Phases    wo_a | the join of its splits, of more than 8 rows | wo_b | of several ranks the push of its sums | post and combine | norm.
// Hand-over mixes, coefficients, latent rows, output and squares as words that are each their own flag, two generations that launches use in turn;
//           between ranks wo_b's sums, as such words at system scope, three parities (stages/attention_out_ranks.hpp).
// Residency all blocks must run at once; AttentionOut checks occupancy. A launch may begin before the one in front is over (PDL), and the next one
//           before this is; launches of one workspace follow one another.
#pragma once
#include "sgl_lowlatency/stages/attention_out_phases.hpp"
#include "sgl_lowlatency/stages/attention_out_ranks.hpp"
#include "sgl_lowlatency/stages/hyper_mix.hpp"
#include "sgl_lowlatency/stages/hyper_post.hpp"
#include "sgl_lowlatency/stages/slice_launch.hpp"
#include "sgl_lowlatency/stages/slice_ring.hpp"

namespace sgl_lowlatency::kernels {

using namespace stages;

// Entry: all consumer threads, after the barrier of begin_slice.
template <int32_t kNTiles, class Params>
SGL_DEVICE void attention_out_consume(const Params& p, const SliceShared& s) {
  const AttnOutWords words = attn_out_words(p, s);
  SliceConsumer state;
  const auto pass = [&](abi::AttnOutPoint point) {
    if (p.trace == nullptr || dialect::thread_idx() != 0) return;
    dialect::store_plain(p.trace + dialect::block_idx() * abi::kNumAttnOutPoints + point, dialect::timer_ns());
  };
  pass(abi::kAttnOutPointBegin);
  run_latent<kNTiles>(p, s, words, state);
  pass(abi::kAttnOutPointA);
  join_latent(p, words);
  pass(abi::kAttnOutPointJoin);
  order_ranks_pushes(p);
  run_output<kNTiles>(p, s, words, state);
  pass(abi::kAttnOutPointB);
  push_output(p, s, words);
  visit_pieces(p.rows, p.geometry.hidden, [&](int32_t row, int32_t piece) { post_piece(p, s, words, row, piece); });
  order_ranks_reads(p);
  pass(abi::kAttnOutPointPost);
  visit_pieces(p.rows, p.geometry.hidden, [&](int32_t row, int32_t piece) { norm_piece(p, words, row, piece); });
  pass(abi::kAttnOutPointNorm);
  if (dialect::thread_idx() == 0 && close_slice(p, s.state()->generation, words.at.total_words)) close_ranks(p);
}

// Entry: all lanes of the producer warp; one of them does the work.
SGL_DEVICE void produce_attention_out(const AttentionOutParams& p, const SliceShared& s) {
  if (dialect::thread_idx() % 32 != 0) return;
  SliceProducer state;
  produce_slice_op(fault_sink(p), s, abi::kAttnOutA, p.maps + abi::kAttnOutA, attn_out_own(p, abi::kAttnOutA),
                   [&](int32_t i) { return attn_out_unit_a(p, i); }, state);
  produce_tall_op(fault_sink(p), s, abi::kAttnOutB, p.maps + abi::kAttnOutB, attn_out_own(p, abi::kAttnOutB),
                  [&](int32_t i) { return attn_out_unit_b(p, i); }, state);
}

// Entry: every thread of every block. The barrier publishes the mbarriers to the threads, as the init fence does to the copies, and the zero row, and
// then the roles part for good. The producer streams weights, which nobody writes, while the launch in front is still running. Params:
// AttentionOutParams, or of a rank of several ParallelAttentionOutParams.
template <int32_t kNTiles, class Params>
SGL_DEVICE void attention_out_body(const Params& p) {
  const SliceShared s{p.shared};
  const int32_t thread = dialect::thread_idx(), warp = thread / 32;
  init_slice(s);
  dialect::sync_block();
  dialect::allow_next_launch();
  if (warp == abi::kNumConsumerWarps) {
    produce_attention_out(p, s);
    return;
  }
  constexpr int32_t kAllButTheProducer = 2;  // named barrier
  begin_slice(p, s, kAllButTheProducer, abi::kAttnOutThreads - 32, [&] { begin_ranks(p, s); });
  if (warp == abi::kAttnOutMixerWarp) {
    mix_streams(attn_out_hyper(p, attn_out_words(p, s)));
    clear_slice_words(p, s, thread % 32, 32);
    clear_ranks_words(p, s);
  } else {
    attention_out_consume<kNTiles>(p, s);
  }
}

}  // namespace sgl_lowlatency::kernels
