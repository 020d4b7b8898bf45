// What becomes of four columns of a row's sum: rounded once it is the MoE's output y, and where the launch has streams the hyper-connection's post
// follows, with coefficients that router warps have made meanwhile (stages/hyper_mix.hpp).
//
//   y = bf16(sum);   R'[i] = bf16(post[i] y + sum_j comb[j][i] R[j])
#pragma once
#include "sgl_lowlatency/stages/fused_moe_state.hpp"
#include "sgl_lowlatency/stages/hyper_connection.hpp"

namespace sgl_lowlatency::stages {

SGL_DEVICE bool has_post(const FusedMoeParams& p) { return p.hyper.streams != nullptr; }
SGL_DEVICE HyperView moe_hyper(const FusedMoeParams& p, const MoeWords& words) {
  return {p.hyper, p.rows, p.geometry.hidden, fault_sink(p), words.mix(), words.coefficients(), abi::kMoeEdgeMix, abi::kMoeEdgeCoefficients};
}

// What the post of a thread's four columns needs beside their sum.
struct MoePost {
  uint32_t pair[abi::kStreams][2];  // R
  float c[abi::kMixes];
};
// Asks for it: to be called in front of the wait for outputs. Nothing of a launch without streams.
SGL_DEVICE void begin_post(const FusedMoeParams& p, const MoeWords& words, int32_t row, int32_t column, MoePost& post) {
  if (!has_post(p)) return;
  const HyperView v = moe_hyper(p, words);
  load_streams(v, row, column, post.pair);
  await_coefficients(v, row, post.c);
}

// Four columns of a row, from `column` on.
SGL_DEVICE void finish_moe_sum(const FusedMoeParams& p, const MoeWords& words, int32_t row, int32_t column, const MoePost& post, float (&sum)[4]) {
  if (p.out != nullptr) {
    uint32_t* const out = reinterpret_cast<uint32_t*>(p.out + static_cast<int64_t>(row) * p.geometry.hidden + column);
    dialect::store_plain(out, pack_bf16(sum[0], sum[1]));
    dialect::store_plain(out + 1, pack_bf16(sum[2], sum[3]));
  }
  if (has_post(p)) store_streams(moe_hyper(p, words), row, column, post.c, post.pair, sum, [](int32_t, int32_t, uint32_t) {});
}

}  // namespace sgl_lowlatency::stages
