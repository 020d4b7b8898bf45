// attention_in: a DeepSeek-V4.1 layer from its residual streams to rotated queries and the new KV row, in one persistent launch. DESIGN.md has the
// reasons.
//
//   x = norm(sum_k pre[k] streams[k]);   a | kv = wqkv_a @ x;   q_lora = norm(a);   q = rotate(wq_b @ q_lora);   cache[slot] = rotate(norm(kv))
//
// Tensors   (abi/attention_in.hpp has all) streams [rows, 4, hidden] bf16; pre [rows, 4] fp32; wqkv_a [lora + 512, hidden] and wq_b [heads * 512,
//           lora] FP8 with fp32 scales of 32 x 32; x [rows, hidden], q_lora [rows, lora], q [rows, heads, 512] bf16; cache [pages, page_bytes].
// Grid      at most one block an SM (all run at once), kAttnInThreads threads each. kNTiles: of 8 rows, 1, 2, 4 or 6.
// Roles     warps 0..7 consume; warp 8 streams the block's weights through the shared-memory ring; warp 9 writes x, KV rows and q_lora.
// Phases    combine | wqkv_a | the join of its splits | wq_b.
// Hand-over combined and latent rows with their squares, and splits' sums, as words that are each their own flag, two generations that launches use
//           in turn.
// Residency all blocks must run at once; AttentionIn checks occupancy. A launch may begin before the one in front is over (PDL), and the next one
//           before this is; launches of one workspace follow one another.
#pragma once
#include "sgl_lowlatency/stages/attention_in_phases.hpp"
#include "sgl_lowlatency/stages/slice_launch.hpp"
#include "sgl_lowlatency/stages/slice_ring.hpp"

namespace sgl_lowlatency::kernels {

using namespace stages;

constexpr int32_t kAllButTheProducer = 2;  // named barrier

// Entry: all consumer threads, after the barrier of begin_slice.
template <int32_t kNTiles>
SGL_DEVICE void attention_in_consume(const AttentionInParams& p, const SliceShared& s) {
  const AttnInWords words = attn_in_words(p, s);
  SliceConsumer state;
  const auto pass = [&](abi::AttnInPoint point) {
    if (p.trace == nullptr || dialect::thread_idx() != 0) return;
    dialect::store_plain(p.trace + dialect::block_idx() * abi::kNumAttnInPoints + point, dialect::timer_ns());
  };
  pass(abi::kAttnInPointBegin);
  combine_streams(p, words);
  pass(abi::kAttnInPointCombine);
  run_qkv<kNTiles>(p, s, words, state);
  pass(abi::kAttnInPointA);
  join_queries(p, words);
  pass(abi::kAttnInPointJoin);
  run_queries<kNTiles>(p, s, words, state);
  pass(abi::kAttnInPointB);
  dialect::sync_named(kAllButTheProducer, abi::kAttnInThreads - 32);  // the rows' warp is done as well
  pass(abi::kAttnInPointRows);
  if (dialect::thread_idx() == 0) close_slice(p, s.state()->generation, words.at.total_words);
}

// Entry: all lanes of the producer warp; one of them does the work.
SGL_DEVICE void produce_attention_in(const AttentionInParams& p, const SliceShared& s) {
  if (dialect::thread_idx() % 32 != 0) return;
  SliceProducer state;
  for (int32_t number = 0; number < abi::kNumAttnInOps; ++number) {
    const AttnInOp op = static_cast<AttnInOp>(number);
    produce_tall_op(fault_sink(p), s, op, p.maps + op, attn_in_own(p, op), [&](int32_t i) { return attn_in_unit(p, op, i); }, state);
  }
}

// Entry: every thread of every block. The barrier publishes the mbarriers to the threads, as the init fence does to the copies, and the zero row, and
// then the roles part for good. The producer streams weights, which nobody writes, while the launch in front is still running.
template <int32_t kNTiles>
SGL_DEVICE void attention_in_body(const AttentionInParams& p) {
  const SliceShared s{p.shared};
  const int32_t warp = dialect::thread_idx() / 32;
  init_slice(s);
  dialect::sync_block();
  dialect::allow_next_launch();
  if (warp == abi::kNumConsumerWarps) {
    produce_attention_in(p, s);
    return;
  }
  begin_slice(p, s, kAllButTheProducer, abi::kAttnInThreads - 32);
  if (warp == abi::kAttnInRowsWarp) {
    write_rows(p, s);
    dialect::sync_named(kAllButTheProducer, abi::kAttnInThreads - 32);
  } else {
    attention_in_consume<kNTiles>(p, s);
  }
}

}  // namespace sgl_lowlatency::kernels
