// The consumers of an attention_out block: its units of wo_a and wo_b, from panel to hand-over words.
#pragma once
#include "sgl_lowlatency/stages/attention_out_state.hpp"
#include "sgl_lowlatency/stages/slice_op.hpp"
#include "sgl_lowlatency/stages/split_sums.hpp"
#include "sgl_lowlatency/stages/tall_op.hpp"

namespace sgl_lowlatency::stages {

// Vectors that a lane asks for at a time, of a row and of rows: of heads, which are in memory, a panel's row; of latent rows, which are in L2, a
// split's.
template <int32_t kNTiles>
struct AttnOutBatch {
  static constexpr int32_t kHeadsPerRow = kNTiles == 1 ? 16 : kNTiles == 2 ? 8 : 4, kHeadsRows = kNTiles == 1 ? 1 : kNTiles == 2 ? 2 : 3;
  static constexpr int32_t kLatentPerRow = kNTiles == 1 ? 11 : kNTiles == 2 ? 8 : 4, kLatentRows = kNTiles < 4 ? 1 : 2;
};
// Turns that a thread asks for at a time.
constexpr int32_t kTurnBatch = 2;

// Cosines and sines of eight values of a head, from value `begin` of the rotated ones on, at the row's position.
SGL_DEVICE void load_turns(const AttentionOutParams& p, const SliceShared& s, int32_t row, int32_t begin, Vec16 (&turns)[2]) {
  int32_t position = s.positions()[row];
  if (dialect::planted(dialect::Planted::kWrongRope)) position = position > 0 ? position - 1 : 1;
  const Vec16* const at = reinterpret_cast<const Vec16*>(p.freqs + static_cast<int64_t>(position) * p.geometry.rope_dim + begin);
SGL_UNROLL
  for (int32_t i = 0; i < 2; ++i) turns[i] = dialect::load_constant(at + i);
}

// Eight values of a head rotated back: (a, b) of an angle become (a cos + b sin, b cos - a sin), rounded to bf16 as SGLang stores them.
SGL_DEVICE void rotate_back(Vec16& values, const Vec16 (&turns)[2]) {
SGL_UNROLL
  for (int32_t i = 0; i < 4; ++i) {
    const float cosine = dialect::bits_to_float(turns[i / 2].w[i % 2 * 2]), sine = dialect::bits_to_float(turns[i / 2].w[i % 2 * 2 + 1]);
    const float a = low_float(values.w[i]), b = high_float(values.w[i]);
    values.w[i] = pack_bf16(a * cosine + b * sine, b * cosine - a * sine);
  }
}

// Columns [k0, k1) of the heads of a group, rotated back: first as they are, then those that are rotated, in place, with turns that are asked for in
// front of all else. Entry: all consumer threads; the panel is free. Ends with a consumer barrier.
template <int32_t kNTiles>
SGL_DEVICE void load_heads_panel(const AttentionOutParams& p, const SliceShared& s, const SliceUnit& unit) {
  const int32_t thread = dialect::thread_idx();
  const int32_t width = (unit.k1 - unit.k0) / 8, pitch = abi::panel_row_bytes(p.shared.panel_k);
  const int32_t head = p.geometry.head_dim / 8, rope = p.geometry.rope_dim / 8, begin = unit.group * abi::attn_out_group_k(p.geometry) + unit.k0;
  const int32_t first_head = unit.k0 / p.geometry.head_dim, heads = (unit.k1 + p.geometry.head_dim - 1) / p.geometry.head_dim - first_head;
  const int32_t row_turns = heads * rope, all_turns = p.rows * row_turns;
  // Of rotated vector number `number` of the panel: the vector in its row, below 0 or from `width` on where the panel begins or ends within its head.
  const auto vector_of = [&](int32_t number) {
    const int32_t nth = number % row_turns;
    return (first_head + nth / rope) * head + head - rope + nth % rope - unit.k0 / 8;
  };
  const auto is_turned = [&](int32_t number) { return number < all_turns && vector_of(number) >= 0 && vector_of(number) < width; };
  Vec16 turns[kTurnBatch][2];
  const auto ask_for_turns = [&](int32_t first) {
SGL_UNROLL
    for (int32_t i = 0; i < kTurnBatch; ++i) {
      const int32_t number = first + i * kConsumerThreads;
      if (is_turned(number)) load_turns(p, s, number / row_turns, number % row_turns % rope * 8, turns[i]);
    }
  };
  ask_for_turns(thread);
  using Batch = AttnOutBatch<kNTiles>;
  visit_panel<Batch::kHeadsPerRow, Batch::kHeadsRows>(p.rows, width, [&](const PanelBatch<Batch::kHeadsPerRow, Batch::kHeadsRows>& batch) {
    constexpr int32_t kCount = Batch::kHeadsPerRow * Batch::kHeadsRows;
    Vec16 values[kCount];
SGL_UNROLL
    for (int32_t i = 0; i < kCount; ++i) {
      if (!batch.is_there(i)) continue;
      const bf16* const from = p.x + static_cast<int64_t>(batch.row(i)) * p.x_stride + begin;
      values[i] = dialect::load_plain(reinterpret_cast<const Vec16*>(from) + batch.vector(i));
    }
SGL_UNROLL
    for (int32_t i = 0; i < kCount; ++i) {
      if (batch.is_there(i)) reinterpret_cast<Vec16*>(s.panel() + batch.row(i) * pitch)[batch.vector(i)] = values[i];
    }
  });
  sync_consumers();
SGL_NO_UNROLL
  for (int32_t first = thread; first < all_turns; first += kTurnBatch * kConsumerThreads) {
    if (first != thread) ask_for_turns(first);
SGL_UNROLL
    for (int32_t i = 0; i < kTurnBatch; ++i) {
      const int32_t number = first + i * kConsumerThreads;
      if (is_turned(number)) rotate_back(reinterpret_cast<Vec16*>(s.panel() + number / row_turns * pitch)[vector_of(number)], turns[i]);
    }
  }
  sync_consumers();
}

// Columns [k0, k1) of the latent rows, as soon as they are there. Entry and end: as load_heads_panel.
template <int32_t kNTiles>
SGL_DEVICE void load_latent_panel(const AttentionOutParams& p, const SliceShared& s, const AttnOutWords& words, int32_t k0, int32_t k1) {
  using Batch = AttnOutBatch<kNTiles>;
  const int32_t pitch = abi::panel_row_bytes(p.shared.panel_k), row_words = abi::attn_out_latent(p.geometry) / 2;
  visit_panel<Batch::kLatentPerRow, Batch::kLatentRows>(
      p.rows, (k1 - k0) / 8, [&](const PanelBatch<Batch::kLatentPerRow, Batch::kLatentRows>& batch) {
        constexpr int32_t kCount = Batch::kLatentPerRow * Batch::kLatentRows;
        uint32_t values[kCount][4];
        await_vectors(fault_sink(p), abi::kAttnOutEdgeLatent, words.latent(), [&](int32_t i) { return batch.is_there(i); },
                      [&](int32_t i) { return batch.row(i) * row_words + k0 / 2 + batch.vector(i) * 4; }, values);
SGL_UNROLL
        for (int32_t i = 0; i < kCount; ++i) {
          if (batch.is_there(i)) store_panel_vector<1>(s.panel() + batch.row(i) * pitch, batch.vector(i), values[i]);
        }
      });
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
SGL_DEVICE void hand_over_output(const AttentionOutParams& p, const AttnOutWords& words, const SliceUnit& unit, int32_t n, int32_t m,
                                 const Float2& y) {
  uint32_t word[2] = {dialect::float_to_bits(y.x), dialect::float_to_bits(y.y)};
  sync::publish(words.output() + (static_cast<int64_t>(unit.split) * p.rows + n) * p.geometry.hidden + unit.row + m, word);
}

// Entry: all consumer threads.
template <int32_t kNTiles>
SGL_DEVICE void run_latent(const AttentionOutParams& p, const SliceShared& s, const AttnOutWords& words, SliceConsumer& state) {
  run_slice_op<kNTiles>(
      fault_sink(p), s, p.rows, abi::kAttnOutA, attn_out_own(p, abi::kAttnOutA), [&](int32_t i) { return attn_out_unit_a(p, i); },
      [&](const SliceUnit& unit) { load_heads_panel<kNTiles>(p, s, unit); },
      [&](const SliceUnit& unit, const float* scratch, int32_t nth) { finish_latent_tile(p, words, unit, scratch, nth); }, state);
}
template <int32_t kNTiles>
SGL_DEVICE void run_output(const AttentionOutParams& p, const SliceShared& s, const AttnOutWords& words, SliceConsumer& state) {
  sync_consumers();  // everybody has read wo_a's panel
  run_tall_op<kNTiles>(
      fault_sink(p), s, p.rows, abi::kAttnOutB, p.scales, abi::attn_out_latent(p.geometry) / abi::kSliceScaleBlock, attn_out_own(p, abi::kAttnOutB),
      [&](int32_t i) { return attn_out_unit_b(p, i); }, [&](int32_t k0, int32_t k1) { load_latent_panel<kNTiles>(p, s, words, k0, k1); },
      [&](const SliceUnit& unit, int32_t n, int32_t m, const Float2& y) { hand_over_output(p, words, unit, n, m, y); }, state);
}

}  // namespace sgl_lowlatency::stages
