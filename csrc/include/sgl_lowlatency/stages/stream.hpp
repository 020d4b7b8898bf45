// The residual stream between operations: what the owner of a tile hands over, and 1/rms for those who read it scaled.
#pragma once
#include "sgl_lowlatency/stages/panel.hpp"

namespace sgl_lowlatency::stages {

// A layer's stream: `mid` after attention, or `end` after the MLP (of layer -1: the embedding).
struct Stream {
  int32_t layer;
  int32_t at;  // byte offset in the generation
  abi::EdgeIdx edge;
};
SGL_DEVICE Stream mid_stream(const DecodeStepParams& p, int32_t layer) { return {layer, p.at.mid, abi::kEdgeOutProj}; }
SGL_DEVICE Stream end_stream(const DecodeStepParams& p, int32_t layer) { return {layer, p.at.end, abi::kEdgeDown}; }

// offset: StreamLayout's x, scaled or squares.
SGL_DEVICE sync::Awaited stream_words(const DecodeStepParams& p, const Shared& s, const Stream& stream, int32_t offset) {
  return awaited(p, s, stream.layer, stream.at + offset, stream.edge);
}

// Hands over two neighbouring columns of a row: x (two bf16) and x * weight. The eight threads of a row's tile, neighbours in one
// warp, call it together with all lanes of theirs; is_owner: false for lanes that only keep them company.
SGL_DEVICE void publish_stream(const DecodeStepParams& p, const Shared& s, const Stream& stream, int32_t tile, int32_t m, int32_t row, bool is_owner,
                               uint32_t x, uint32_t weight) {
  const int64_t word = (static_cast<int64_t>(row) * p.geometry.hidden + tile * abi::kTileRows + m) / 2;
  const float a = low_float(x), b = high_float(x);
  float squares = a * a + b * b;
SGL_UNROLL
  for (int32_t mask = 1; mask < abi::kTileRows / 2; mask *= 2) squares += dialect::shuffle_xor(squares, mask);
  if (!is_owner) return;
  uint32_t x_words[1] = {x}, scaled_words[1] = {dialect::multiply_bf16x2(x, weight)};
  sync::publish(handover_buffer(p, s, stream.layer, stream.at + p.stream.x) + word, x_words);
  sync::publish(handover_buffer(p, s, stream.layer, stream.at + p.stream.scaled) + word, scaled_words);
  if (m == 0) {
    uint32_t square_words[1] = {dialect::float_to_bits(squares)};
    sync::publish(handover_buffer(p, s, stream.layer, stream.at + p.stream.squares) + row * (p.geometry.hidden / abi::kTileRows) + tile, square_words);
  }
}

// Keeps two neighbouring columns of a row of the stream that enters a layer, where the step captures it. weights: that layer's.
// A plain store: nobody reads it before the launch ends.
SGL_DEVICE void capture_stream(const DecodeStepParams& p, const abi::LayerWeights& weights, int32_t tile, int32_t m, int32_t row, uint32_t x) {
  if (p.aux_out == nullptr || weights.aux_column < 0) return;
  const int64_t element = static_cast<int64_t>(row) * p.aux_columns + weights.aux_column + tile * abi::kTileRows + m;
  dialect::store_plain(reinterpret_cast<uint32_t*>(p.aux_out) + element / 2, x);
}

// Row::inverse_rms of every row: 1 / rms(x), the tiles' squares added in a fixed order.
// Entry: all consumer threads; the next consumer barrier publishes it.
SGL_DEVICE void load_inverse_rms(const DecodeStepParams& p, const Shared& s, const Stream& stream) {
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32, tiles = p.geometry.hidden / abi::kTileRows;
  const sync::Awaited squares = stream_words(p, s, stream, p.stream.squares);
  for (int32_t row = abi::kNumConsumerWarps - 1 - warp; row < p.rows; row += abi::kNumConsumerWarps) {
    float sum = 0.0f;
    for (int32_t i = lane; i < tiles / 4; i += 32) {
      uint32_t words[4];
      sync::await_words(fault_sink(p), squares, static_cast<int64_t>(row) * tiles + i * 4, words);
SGL_UNROLL
      for (int32_t j = 0; j < 4; ++j) sum += dialect::bits_to_float(words[j]);
    }
SGL_UNROLL
    for (int32_t mask = 16; mask > 0; mask /= 2) sum += dialect::shuffle_xor(sum, mask);
    if (lane == 0) s.rows()->row[row].inverse_rms = dialect::rsqrt(sum / static_cast<float>(p.geometry.hidden) + p.geometry.rms_eps);
  }
}

// The embedding as the stream that enters layer 0, whose weights are `first`: its tiles belong to the blocks that own them in `down`.
// Entry: all consumer threads.
SGL_DEVICE void publish_embedding(const DecodeStepParams& p, const Shared& s, const abi::LayerWeights& first) {
  constexpr int32_t kPairs = abi::kTileRows / 2;
  const abi::TileRange own = s.rows()->tiles[abi::kOpDown];
  const int32_t m = dialect::thread_idx() % kPairs * 2, row = dialect::thread_idx() / kPairs;
  for (int32_t tile = own.begin; tile < own.begin + own.count; ++tile) {
    const int32_t column = tile * abi::kTileRows + m;
    uint32_t x = 0, weight = 0;
    if (row < p.rows) {
      const bf16* const embedding = p.embedding + static_cast<int64_t>(s.rows()->row[row].token) * p.geometry.hidden;
      x = dialect::load_constant(reinterpret_cast<const uint32_t*>(embedding + column));
      weight = dialect::load_constant(reinterpret_cast<const uint32_t*>(first.input_norm + column));
    }
    publish_stream(p, s, end_stream(p, -1), tile, m, row, row < p.rows, x, weight);
    if (row < p.rows && !dialect::planted(dialect::Planted::kCapturesOutput)) capture_stream(p, first, tile, m, row, x);
  }
}

}  // namespace sgl_lowlatency::stages
