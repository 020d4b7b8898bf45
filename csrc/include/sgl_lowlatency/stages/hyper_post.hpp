// Sums over splits, and what follows attention's output: mHC's post, the combine for the next sublayer, and its norm.
//
//   y = bf16(sum over splits of output);   R'[i] = bf16(post[i] y + sum_j comb[j][i] R[j])
//   c = bf16(sum_k pre[k] R'[k]);   out = c / sqrt(mean(c^2) + norm_eps) * norm
//
// A warp takes 128 columns of a row. Of several ranks the sum goes over theirs too, in front of its rounding (attention_out_ranks.hpp).
#pragma once
#include "sgl_lowlatency/stages/attention_out_ranks.hpp"
#include "sgl_lowlatency/stages/hyper_connection.hpp"

namespace sgl_lowlatency::stages {

// The latent rows of several splits of K: sums, rounded. Entry: all consumer threads.
SGL_DEVICE void join_latent(const AttentionOutParams& p, const AttnOutWords& words) {
  const int32_t splits = attn_out_splits(p, abi::kAttnOutA), latent = abi::attn_out_latent(p.geometry);
  if (splits == 1) return;
  const int32_t lane = dialect::thread_idx() % 32;
  visit_pieces(p.rows, latent, [&](int32_t row, int32_t piece) {
    const int32_t at = row * latent + piece * 128 + lane * 4;
    float sum[4];
    await_split_sums(fault_sink(p), abi::kAttnOutEdgePartial, words.partial(), at, p.rows * latent, splits, sum);
    uint32_t word[2] = {pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3])};
    sync::publish(words.latent() + at / 2, word);
  });
}

// Streams of a piece, and its combined values, not yet normed, in `out`. Entry: all lanes of a consumer warp.
template <class Params>
SGL_DEVICE void post_piece(const Params& p, const SliceShared& s, const AttnOutWords& words, int32_t row, int32_t piece) {
  const int32_t lane = dialect::thread_idx() % 32, hidden = p.geometry.hidden, column = piece * 128 + lane * 4;
  const HyperView v = attn_out_hyper(p, words);
  float y[4], c[abi::kMixes], combined[4] = {};
  uint32_t pair[abi::kStreams][2];
  load_streams(v, row, column, pair);
  await_coefficients(v, row, c);
  take_output(p, s, words, row, column, y);
  store_streams(v, row, column, c, pair, y, [&](int32_t k, int32_t i, uint32_t word) {
    combined[2 * i] += c[k] * low_float(word);
    combined[2 * i + 1] += c[k] * high_float(word);
  });
  uint32_t* const out = reinterpret_cast<uint32_t*>(p.out + static_cast<int64_t>(row) * hidden + column);
  float squares = 0.0f;
SGL_UNROLL
  for (int32_t i = 0; i < 2; ++i) {
    const uint32_t word = pack_bf16(combined[2 * i], combined[2 * i + 1]);
    dialect::store_plain(out + i, word);
    squares += low_float(word) * low_float(word) + high_float(word) * high_float(word);
  }
SGL_UNROLL
  for (int32_t mask = 16; mask > 0; mask /= 2) squares += dialect::shuffle_xor(squares, mask);
  uint32_t word[1] = {dialect::float_to_bits(squares)};
  if (lane == 0) sync::publish(words.squares() + row * (hidden / 128) + piece, word);
}

// The norm of a piece that this thread's own stores have left in `out`. Entry: all lanes of a consumer warp.
SGL_DEVICE void norm_piece(const AttentionOutParams& p, const AttnOutWords& words, int32_t row, int32_t piece) {
  const int32_t lane = dialect::thread_idx() % 32, hidden = p.geometry.hidden, column = piece * 128 + lane * 4;
  const float scale = await_factor(fault_sink(p), abi::kAttnOutEdgeSquares, words.squares(), row, hidden, p.norm_eps);
  uint32_t* const out = reinterpret_cast<uint32_t*>(p.out + static_cast<int64_t>(row) * hidden + column);
SGL_UNROLL
  for (int32_t i = 0; i < 2; ++i) {
    const uint32_t word = dialect::load_plain(out + i), norm = dialect::load_constant(reinterpret_cast<const uint32_t*>(p.norm + column) + i);
    dialect::store_plain(out + i, pack_bf16(low_float(word) * scale * low_float(norm), high_float(word) * scale * high_float(norm)));
  }
}

}  // namespace sgl_lowlatency::stages
