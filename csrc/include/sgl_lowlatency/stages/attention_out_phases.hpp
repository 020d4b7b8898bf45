// The consumers of an attention_out block: its units of wo_a and wo_b, from panel to hand-over words.
#pragma once
#include "sgl_lowlatency/stages/attention_out_state.hpp"
#include "sgl_lowlatency/stages/slice_op.hpp"
#include "sgl_lowlatency/stages/split_sums.hpp"
#include "sgl_lowlatency/stages/tall_op.hpp"

namespace sgl_lowlatency::stages {

constexpr int32_t kAttnOutBatch = 4;   // vectors that a thread asks for at a time

// Eight values of a head rotated back, v of head_dim / 8: (a, b) of an angle become (a cos + b sin, b cos - a sin), rounded to bf16 as SGLang stores
// them.
SGL_DEVICE Vec16 rotate_back(const AttentionOutParams& p, const SliceShared& s, int32_t row, int32_t v, Vec16 values) {
  const int32_t begin = v * 8 - (p.geometry.head_dim - p.geometry.rope_dim);
  if (begin < 0) return values;
  int32_t position = s.positions()[row];
  if (dialect::planted(dialect::Planted::kWrongRope)) position = position > 0 ? position - 1 : 1;
  const float* const freqs = p.freqs + static_cast<int64_t>(position) * p.geometry.rope_dim + begin;
SGL_UNROLL
  for (int32_t half = 0; half < 2; ++half) {
    const Vec16 f = dialect::load_constant(reinterpret_cast<const Vec16*>(freqs + half * 4));
SGL_UNROLL
    for (int32_t i = 0; i < 2; ++i) {
      const float cosine = dialect::bits_to_float(f.w[i * 2]), sine = dialect::bits_to_float(f.w[i * 2 + 1]);
      uint32_t& pair = values.w[half * 2 + i];
      const float a = low_float(pair), b = high_float(pair);
      pair = pack_bf16(a * cosine + b * sine, b * cosine - a * sine);
    }
  }
  return values;
}

// Columns [k0, k1) of the heads of a group, rotated back. Entry: all consumer threads; the panel is free. Ends with a consumer barrier.
SGL_DEVICE void load_heads_panel(const AttentionOutParams& p, const SliceShared& s, const SliceUnit& unit) {
  const int32_t width = (unit.k1 - unit.k0) / 8, total = p.rows * width, pitch = abi::panel_row_bytes(p.shared.panel_k);
  const int32_t head = p.geometry.head_dim / 8, begin = unit.group * abi::attn_out_group_k(p.geometry) + unit.k0;
SGL_NO_UNROLL
  for (int32_t first = dialect::thread_idx(); first < total; first += kAttnOutBatch * kConsumerThreads) {
    Vec16 values[kAttnOutBatch];
SGL_UNROLL
    for (int32_t i = 0; i < kAttnOutBatch; ++i) {
      const int32_t number = first + i * kConsumerThreads;
      if (number >= total) continue;
      const bf16* const from = p.x + static_cast<int64_t>(number / width) * p.x_stride + begin + number % width * 8;
      values[i] = dialect::load_plain(reinterpret_cast<const Vec16*>(from));
    }
SGL_UNROLL
    for (int32_t i = 0; i < kAttnOutBatch; ++i) {
      const int32_t number = first + i * kConsumerThreads, row = number / width, v = number % width;
      if (number >= total) continue;
      values[i] = rotate_back(p, s, row, (unit.k0 / 8 + v) % head, values[i]);
      store_panel_vector<2>(s.panel() + row * pitch, v, values[i].w);
    }
  }
  sync_consumers();
}

// Columns [k0, k1) of the latent rows, as soon as they are there. Entry and end: as load_heads_panel.
SGL_DEVICE void load_latent_panel(const AttentionOutParams& p, const SliceShared& s, const AttnOutWords& words, int32_t k0, int32_t k1) {
  const int32_t width = (k1 - k0) / 8, total = p.rows * width, pitch = abi::panel_row_bytes(p.shared.panel_k);
  const int32_t row_words = abi::attn_out_latent(p.geometry) / 2;
SGL_NO_UNROLL
  for (int32_t first = dialect::thread_idx(); first < total; first += kAttnOutBatch * kConsumerThreads) {
    uint32_t values[kAttnOutBatch][4];
    const auto number = [&](int32_t i) { return first + i * kConsumerThreads; };
    const auto index = [&](int32_t i) { return number(i) / width * row_words + k0 / 2 + number(i) % width * 4; };
    await_vectors(fault_sink(p), abi::kAttnOutEdgeLatent, words.latent(), [&](int32_t i) { return number(i) < total; }, index, values);
SGL_UNROLL
    for (int32_t i = 0; i < kAttnOutBatch; ++i) {
      if (number(i) < total) store_panel_vector<1>(s.panel() + number(i) / width * pitch, number(i) % width, values[i]);
    }
  }
  sync_consumers();
}

// Adds up the warps' parts of a tile of wo_a, in their order, and hands it over: pairs of bf16, or one split's sums of it.
// Entry: all consumer threads, this one being number nth (run_slice_op).
SGL_DEVICE void finish_latent_tile(const AttentionOutParams& p, const AttnOutWords& words, const SliceUnit& unit, const float* scratch, int32_t nth) {
  const int32_t m = nth % 8 * 2, column = unit.row + m, width = abi::attn_out_latent(p.geometry);
  const bool is_whole = attn_out_splits(p, abi::kAttnOutA) == 1;
SGL_NO_UNROLL
  for (int32_t n = nth / 8; n < p.rows; n += kConsumerThreads / 8) {
    const Float2 y = slice_tile_sum(scratch, p.rows, n, m);
    if (dialect::planted(dialect::Planted::kWithheldSignal) && unit.row == 0) continue;
    if (is_whole) {
      uint32_t word[1] = {pack_bf16(y.x, y.y)};
      sync::publish(words.latent() + (n * width + column) / 2, word);
    } else {
      uint32_t word[2] = {dialect::float_to_bits(y.x), dialect::float_to_bits(y.y)};
      sync::publish(words.partial() + (static_cast<int64_t>(unit.split) * p.rows + n) * width + column, word);
    }
  }
}

// Two sums of one split of wo_b.
SGL_DEVICE void hand_over_output(const AttentionOutParams& p, const AttnOutWords& words, const SliceUnit& unit, int32_t n, int32_t m, const Float2& y) {
  uint32_t word[2] = {dialect::float_to_bits(y.x), dialect::float_to_bits(y.y)};
  sync::publish(words.output() + (static_cast<int64_t>(unit.split) * p.rows + n) * p.geometry.hidden + unit.row + m, word);
}

// Entry: all consumer threads.
template <int32_t kNTiles>
SGL_DEVICE void run_latent(const AttentionOutParams& p, const SliceShared& s, const AttnOutWords& words, SliceConsumer& state) {
  run_slice_op<kNTiles>(
      fault_sink(p), s, p.rows, abi::kAttnOutA, attn_out_own(p, abi::kAttnOutA), [&](int32_t i) { return attn_out_unit_a(p, i); },
      [&](const SliceUnit& unit) { load_heads_panel(p, s, unit); },
      [&](const SliceUnit& unit, const float* scratch, int32_t nth) { finish_latent_tile(p, words, unit, scratch, nth); }, state);
}
template <int32_t kNTiles>
SGL_DEVICE void run_output(const AttentionOutParams& p, const SliceShared& s, const AttnOutWords& words, SliceConsumer& state) {
  sync_consumers();  // everybody has read wo_a's panel
  run_tall_op<kNTiles>(
      fault_sink(p), s, p.rows, abi::kAttnOutB, p.scales, abi::attn_out_latent(p.geometry) / abi::kSliceScaleBlock, attn_out_own(p, abi::kAttnOutB),
      [&](int32_t i) { return attn_out_unit_b(p, i); }, [&](int32_t k0, int32_t k1) { load_latent_panel(p, s, words, k0, k1); },
      [&](const SliceUnit& unit, int32_t n, int32_t m, const Float2& y) { hand_over_output(p, words, unit, n, m, y); }, state);
}

}  // namespace sgl_lowlatency::stages
