// Between the products of a slice: sums over splits of K that a warp's threads poll for, and pieces of rows that warps take.
#pragma once
#include "sgl_lowlatency/stages/await_vectors.hpp"
#include "sgl_lowlatency/stages/slice_state.hpp"

namespace sgl_lowlatency::stages {

constexpr int32_t kSplitBatch = 4;  // splits that a lane asks for at a time

// kWidth consecutive floats, whole vectors, of `splits` buffers that are `stride` words apart, added up in their order; kBatch splits are asked for
// at a time. Each calling thread polls by itself.
template <int32_t kBatch = kSplitBatch, int32_t kWidth>
SGL_DEVICE void await_split_sums(sync::FaultSink sink, int32_t edge, const uint32_t* buffer, int32_t first, int32_t stride, int32_t splits,
                                 float (&sum)[kWidth]) {
  constexpr int32_t kVectors = kWidth / 4;
SGL_UNROLL
  for (int32_t j = 0; j < kWidth; ++j) sum[j] = 0.0f;
SGL_NO_UNROLL
  for (int32_t begin = 0; begin < splits; begin += kBatch) {
    uint32_t part[kBatch * kVectors][4];
    await_vectors(sink, edge, buffer, [&](int32_t i) { return begin + i / kVectors < splits; },
                  [&](int32_t i) { return first + static_cast<int64_t>(begin + i / kVectors) * stride + i % kVectors * 4; }, part);
SGL_UNROLL
    for (int32_t i = 0; i < kBatch * kVectors; ++i) {
SGL_UNROLL
      for (int32_t j = 0; j < 4; ++j) sum[i % kVectors * 4 + j] += dialect::bits_to_float(part[i][j]);
    }
  }
}

// 1 / rms of a row of `width` columns, from its pieces' sums of squares. Entry: all lanes of a warp.
SGL_DEVICE float await_factor(sync::FaultSink sink, int32_t edge, const uint32_t* squares, int32_t row, int32_t width, float eps) {
  const int32_t lane = dialect::thread_idx() % 32, pieces = width / abi::kPieceColumns;
  float sum = 0.0f;
SGL_NO_UNROLL
  for (int32_t i = lane; i < pieces; i += 32) {
    uint32_t word[1];
    sync::wait_until(
        sink, abi::kFaultEdgeDeadline, 0, edge, static_cast<uint32_t>(row * pieces + i),
        [&] {
          dialect::load_words(word, squares + row * pieces + i);
          return sync::is_written(word) || dialect::planted(dialect::Planted::kMissingAwait);
        },
        [] { return abi::kUnwritten; });
    sum += dialect::bits_to_float(word[0]);
  }
  dialect::sync_warp();
SGL_UNROLL
  for (int32_t mask = 16; mask > 0; mask /= 2) sum += dialect::shuffle_xor(sum, mask);
  if (dialect::planted(dialect::Planted::kSkippedNorm)) return 1.0f;
  return dialect::rsqrt(sum / static_cast<float>(width) + eps);
}

// What a lane fills of a panel at a time: vectors, eight columns each, lane and every 32nd on, kPerRow of a row of the warp's and of the kRows - 1
// next ones. Number i is vector vector(i) of row row(i), where is_there(i).
template <int32_t kPerRow, int32_t kRows>
struct PanelBatch {
  static constexpr int32_t kCount = kPerRow * kRows;
  int32_t first_row, first_vector, rows, width;
  SGL_DEVICE int32_t row(int32_t i) const { return first_row + i / kPerRow * abi::kNumConsumerWarps; }
  SGL_DEVICE int32_t vector(int32_t i) const { return first_vector + i % kPerRow * 32; }
  SGL_DEVICE bool is_there(int32_t i) const { return row(i) < rows && vector(i) < width; }
};

// The warp's rows of a panel [rows, width vectors], every eighth: visit(batch) for each PanelBatch. Entry: all lanes of a consumer warp; all of them
// visit.
template <int32_t kPerRow, int32_t kRows, class Visit>
SGL_DEVICE void visit_panel(int32_t rows, int32_t width, const Visit& visit) {
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32;
SGL_NO_UNROLL
  for (int32_t row = warp; row < rows; row += kRows * abi::kNumConsumerWarps) {
SGL_NO_UNROLL
    for (int32_t vector = 0; vector < width; vector += kPerRow * 32) visit(PanelBatch<kPerRow, kRows>{row, vector + lane, rows, width});
  }
}

// The warp's pieces, 128 columns of a row each, of matrices [rows, width]: number i is piece i % (width / 128) of row i / (width / 128).
template <class Visit>
SGL_DEVICE void visit_pieces(int32_t rows, int32_t width, const Visit& visit) {
  const int32_t warp = dialect::thread_idx() / 32, pieces = width / abi::kPieceColumns;
SGL_NO_UNROLL
  for (int32_t i = dialect::block_idx() + warp * dialect::grid_dim(); i < rows * pieces; i += dialect::grid_dim() * abi::kNumConsumerWarps) {
    visit(i / pieces, i % pieces);
  }
}

}  // namespace sgl_lowlatency::stages
