// The consumers of an attention_in block: pieces of rows in front of, between and behind its two products.
#pragma once
#include "sgl_lowlatency/stages/kv_row.hpp"
#include "sgl_lowlatency/stages/slice_launch.hpp"
#include "sgl_lowlatency/stages/split_sums.hpp"
#include "sgl_lowlatency/stages/tall_op.hpp"

namespace sgl_lowlatency::stages {

constexpr int32_t kPanelPerRow = 5;   // vectors that a lane asks for at a time of a row: all 1,280 columns
constexpr int32_t kJoinBatch = 10;    // splits of wqkv_a likewise: 9 of 132 blocks, 10 of 148
constexpr int32_t kKeysBatch = 2;     // the same where a lane has four vectors of a split

// Hands over a lane's four values of a piece, rounded, and with lane 0 the sum of the piece's squares. Entry: all lanes of a warp.
SGL_DEVICE void publish_piece(uint32_t* pairs, uint32_t* squares, int32_t width, int32_t row, int32_t piece, const float (&values)[4]) {
  const int32_t lane = dialect::thread_idx() % 32;
  uint32_t word[2] = {pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3])};
  float sum = 0.0f;
SGL_UNROLL
  for (int32_t i = 0; i < 2; ++i) sum += low_float(word[i]) * low_float(word[i]) + high_float(word[i]) * high_float(word[i]);
SGL_UNROLL
  for (int32_t mask = 16; mask > 0; mask /= 2) sum += dialect::shuffle_xor(sum, mask);
  uint32_t total[1] = {dialect::float_to_bits(sum)};
  if (!(dialect::planted(dialect::Planted::kWithheldSignal) && row == 0 && piece == 0)) {
    sync::publish(pairs + row * (width / 2) + piece * (abi::kPieceColumns / 2) + lane * 2, word);
  }
  if (lane == 0) sync::publish(squares + row * (width / abi::kPieceColumns) + piece, total);
}

// combined = sum_k pre[k] streams[k], or stream 0. Entry: all consumer threads.
SGL_DEVICE void combine_streams(const AttentionInParams& p, const AttnInWords& words) {
  const int32_t lane = dialect::thread_idx() % 32, hidden = p.geometry.hidden;
  visit_pieces(p.rows, hidden, [&](int32_t row, int32_t piece) {
    const bf16* const from = p.streams + static_cast<int64_t>(row) * abi::kStreams * hidden + piece * abi::kPieceColumns + lane * 4;
    Vec16 pre{};
    if (p.pre != nullptr) pre = dialect::load_plain(reinterpret_cast<const Vec16*>(p.pre + static_cast<int64_t>(row) * p.pre_stride));
    float values[4] = {};
SGL_UNROLL
    for (int32_t k = 0; k < abi::kStreams; ++k) {
      if (p.pre == nullptr && k > 0) continue;
      const float factor = p.pre == nullptr ? 1.0f : dialect::bits_to_float(pre.w[k]);
      const uint32_t* const pair = reinterpret_cast<const uint32_t*>(from + static_cast<int64_t>(k) * hidden);
SGL_UNROLL
      for (int32_t i = 0; i < 2; ++i) {
        const uint32_t word = dialect::load_plain(pair + i);
        values[2 * i] += factor * low_float(word);
        values[2 * i + 1] += factor * high_float(word);
      }
    }
    publish_piece(words.combined(), words.squares(), hidden, row, piece, values);
  });
}

// 1 / rms of a row of `of`. Entry: all lanes of a warp.
SGL_DEVICE float await_factor(const AttentionInParams& p, const NormedWords& of, int32_t row) {
  return await_factor(fault_sink(p), of.squares_edge, of.squares, row, of.width, of.eps);
}

SGL_DEVICE uint32_t normed_pair(uint32_t pair, float factor, uint32_t weight) {
  return pack_bf16(low_float(pair) * factor * low_float(weight), high_float(pair) * factor * high_float(weight));
}

// Columns [k0, k1) of a vector of each row, normed, as soon as they are there; of more than eight rows a warp has one after the other, beside which
// the sums of several N tiles stay in registers. Entry: all consumer threads; the panel is free. Ends with a consumer barrier.
SGL_DEVICE void load_normed_panel(const AttentionInParams& p, const SliceShared& s, const NormedWords& of, int32_t k0, int32_t k1) {
  const int32_t pitch = abi::panel_row_bytes(p.shared.panel_k);
  visit_panel<kPanelPerRow, 1>(p.rows, (k1 - k0) / 8, [&](const PanelBatch<kPanelPerRow, 1>& batch) {
    Vec16 weights[kPanelPerRow];  // asked for before the waits
SGL_UNROLL
    for (int32_t i = 0; i < kPanelPerRow; ++i) {
      if (batch.is_there(i)) weights[i] = dialect::load_constant(reinterpret_cast<const Vec16*>(of.weight + k0) + batch.vector(i));
    }
    uint32_t values[kPanelPerRow][4];
    await_vectors(fault_sink(p), of.pairs_edge, of.pairs, [&](int32_t i) { return batch.is_there(i); },
                  [&](int32_t i) { return batch.row(i) * (of.width / 2) + k0 / 2 + batch.vector(i) * 4; }, values);
    dialect::sync_warp();
    const float factor = await_factor(p, of, batch.first_row);
SGL_UNROLL
    for (int32_t i = 0; i < kPanelPerRow; ++i) {
      if (!batch.is_there(i)) continue;
SGL_UNROLL
      for (int32_t w = 0; w < 4; ++w) values[i][w] = normed_pair(values[i][w], factor, weights[i].w[w]);
      store_panel_vector<1>(s.panel() + batch.first_row * pitch, batch.vector(i), values[i]);
    }
  });
  sync_consumers();
}

// Two sums of one split of wqkv_a.
SGL_DEVICE void hand_over_qkv(const AttentionInParams& p, const AttnInWords& words, const SliceUnit& unit, int32_t n, int32_t m, const Float2& y) {
  uint32_t word[2] = {dialect::float_to_bits(y.x), dialect::float_to_bits(y.y)};
  sync::publish(words.partial() + (static_cast<int64_t>(unit.split) * p.rows + n) * abi::attn_in_rows_a(p.geometry) + unit.row + m, word);
}

// The queries' latent rows: sums over splits. Entry: all consumer threads.
SGL_DEVICE void join_queries(const AttentionInParams& p, const AttnInWords& words) {
  const int32_t lane = dialect::thread_idx() % 32, width = abi::attn_in_rows_a(p.geometry);
  visit_pieces(p.rows, p.geometry.lora, [&](int32_t row, int32_t piece) {
    float sum[4];
    await_split_sums<kJoinBatch>(fault_sink(p), abi::kAttnInEdgePartial, words.partial(), row * width + piece * abi::kPieceColumns + lane * 4,
                                 p.rows * width, attn_in_splits(p, abi::kAttnInA), sum);
    publish_piece(words.latent(), words.latent_squares(), p.geometry.lora, row, piece, sum);
  });
}

// Cosine and sine of a pair of a head's rotated values, number i, at the row's position.
SGL_DEVICE Float2 turn_of(const AttentionInParams& p, const SliceShared& s, int32_t row, int32_t i) {
  int32_t position = s.positions()[row];
  if (dialect::planted(dialect::Planted::kWrongRope)) position = position > 0 ? position - 1 : 1;
  const float* const at = p.freqs + static_cast<int64_t>(position) * abi::kHeadRope + 2 * i;
  return {dialect::load_constant(at), dialect::load_constant(at + 1)};
}

// Two values of the queries, rounded, and of a head's last values rotated and rounded again.
SGL_DEVICE void store_queries(const AttentionInParams& p, const SliceShared& s, const SliceUnit& unit, int32_t n, int32_t m, const Float2& y) {
  const int32_t column = unit.row + m, rotated = column % abi::kHeadDim - (abi::kHeadDim - abi::kHeadRope);
  uint32_t pair = pack_bf16(y.x, y.y);
  if (rotated >= 0) {
    const Float2 turn = turn_of(p, s, n, rotated / 2);
    const float a = low_float(pair), b = high_float(pair);
    pair = pack_bf16(a * turn.x - b * turn.y, a * turn.y + b * turn.x);
  }
  dialect::store_plain(reinterpret_cast<uint32_t*>(p.q + static_cast<int64_t>(n) * p.q_stride + column), pair);
}

// A row's keys: sums over splits, rounded, normed, rotated and stored. Entry: all lanes of a warp.
SGL_DEVICE void write_kv_row(const AttentionInParams& p, const SliceShared& s, const AttnInWords& words, int32_t row) {
  const int32_t lane = dialect::thread_idx() % 32, width = abi::attn_in_rows_a(p.geometry);
  int32_t slot = dialect::load_plain(p.slots + row);
  if (dialect::planted(dialect::Planted::kOffByOnePage)) slot = (slot + 1) % (p.num_pages * p.page_size);
  float values[16], squares = 0.0f;
  await_split_sums<kKeysBatch>(fault_sink(p), abi::kAttnInEdgePartial, words.partial(), row * width + p.geometry.lora + lane * 16, p.rows * width,
                               attn_in_splits(p, abi::kAttnInA), values);
SGL_UNROLL
  for (int32_t i = 0; i < 16; ++i) {
    values[i] = dialect::to_float(dialect::to_bf16(values[i]));
    squares += values[i] * values[i];
  }
  dialect::sync_warp();
SGL_UNROLL
  for (int32_t mask = 16; mask > 0; mask /= 2) squares += dialect::shuffle_xor(squares, mask);
  const float factor = dialect::rsqrt(squares / static_cast<float>(abi::kHeadDim) + p.kv_norm_eps);
SGL_UNROLL
  for (int32_t v = 0; v < 2; ++v) {
    const Vec16 weight = dialect::load_constant(reinterpret_cast<const Vec16*>(p.kv_norm) + lane * 2 + v);
SGL_UNROLL
    for (int32_t i = 0; i < 4; ++i) {
      float& a = values[v * 8 + 2 * i];
      float& b = values[v * 8 + 2 * i + 1];
      a = a * factor * low_float(weight.w[i]);
      b = b * factor * high_float(weight.w[i]);
      const int32_t rotated = lane * 16 + v * 8 + 2 * i - (abi::kHeadDim - abi::kHeadRope);
      if (rotated < 0) continue;
      const Float2 turn = turn_of(p, s, row, rotated / 2);
      const float x = a;
      a = x * turn.x - b * turn.y;
      b = x * turn.y + b * turn.x;
    }
  }
  if (slot < 0) return;  // of the whole warp
  if (slot >= p.num_pages * p.page_size) {
    sync::raise_fault(p.fault, p.rank, abi::kFaultBadSlot, 0, row, static_cast<uint32_t>(p.num_pages * p.page_size), static_cast<uint32_t>(slot),
                      static_cast<uint64_t>(slot));
  }
  store_kv_row(p, slot, values);
}

// What others read of a vector that was handed over in pieces: normed, in `to`. A lane has eight values of a row at a time. Entry: all lanes of the
// rows' warp.
SGL_DEVICE void store_normed(const AttentionInParams& p, const NormedWords& of, bf16* to) {
  constexpr int32_t kLaneColumns = 8, kWarpColumns = 32 * kLaneColumns;
  const int32_t lane = dialect::thread_idx() % 32, parts = (of.width + kWarpColumns - 1) / kWarpColumns;
SGL_NO_UNROLL
  for (int32_t i = dialect::block_idx(); i < p.rows * parts; i += dialect::grid_dim()) {
    const int32_t row = i / parts, column = i % parts * kWarpColumns + lane * kLaneColumns;
    const int64_t at = (static_cast<int64_t>(row) * of.width + column) / 2;
    const float factor = await_factor(p, of, row);
    uint32_t pairs[1][4];
    await_vectors(fault_sink(p), of.pairs_edge, of.pairs, [&](int32_t) { return column < of.width; }, [&](int32_t) { return at; }, pairs);
    if (column >= of.width) continue;
    const Vec16 weight = dialect::load_constant(reinterpret_cast<const Vec16*>(of.weight + column));
    Vec16 normed;
SGL_UNROLL
    for (int32_t j = 0; j < 4; ++j) normed.w[j] = normed_pair(pairs[0][j], factor, weight.w[j]);
    dialect::store_plain(reinterpret_cast<Vec16*>(to + static_cast<int64_t>(row) * of.width + column), normed);
  }
}

// What nothing in the launch waits for, beside wq_b's stream: x, the rows of keys, which the last blocks have, and q_lora, in the order in which they
// can be made; then it clears words. Entry: all lanes of the rows' warp.
SGL_DEVICE void write_rows(const AttentionInParams& p, const SliceShared& s) {
  const AttnInWords words = attn_in_words(p, s);
  store_normed(p, normed_x(p, words), p.x);
SGL_NO_UNROLL
  for (int32_t row = dialect::grid_dim() - 1 - dialect::block_idx(); row < p.rows; row += dialect::grid_dim()) write_kv_row(p, s, words, row);
  store_normed(p, normed_latent(p, words), p.q_lora);
  clear_slice_words(p, s, dialect::thread_idx() % 32, 32);
}

// Entry: all consumer threads.
template <int32_t kNTiles>
SGL_DEVICE void run_qkv(const AttentionInParams& p, const SliceShared& s, const AttnInWords& words, SliceConsumer& state) {
  run_tall_op<kNTiles>(
      fault_sink(p), s, p.rows, abi::kAttnInA, p.scales[abi::kAttnInA], p.geometry.hidden / abi::kSliceScaleBlock, attn_in_own(p, abi::kAttnInA),
      [&](int32_t i) { return attn_in_unit(p, abi::kAttnInA, i); },
      [&](int32_t k0, int32_t k1) { load_normed_panel(p, s, normed_x(p, words), k0, k1); },
      [&](const SliceUnit& unit, int32_t n, int32_t m, const Float2& y) { hand_over_qkv(p, words, unit, n, m, y); }, state);
}
template <int32_t kNTiles>
SGL_DEVICE void run_queries(const AttentionInParams& p, const SliceShared& s, const AttnInWords& words, SliceConsumer& state) {
  sync_consumers();  // everybody has read wqkv_a's panel
  run_tall_op<kNTiles>(
      fault_sink(p), s, p.rows, abi::kAttnInB, p.scales[abi::kAttnInB], p.geometry.lora / abi::kSliceScaleBlock, attn_in_own(p, abi::kAttnInB),
      [&](int32_t i) { return attn_in_unit(p, abi::kAttnInB, i); },
      [&](int32_t k0, int32_t k1) { load_normed_panel(p, s, normed_latent(p, words), k0, k1); },
      [&](const SliceUnit& unit, int32_t n, int32_t m, const Float2& y) { store_queries(p, s, unit, n, m, y); }, state);
}

}  // namespace sgl_lowlatency::stages
