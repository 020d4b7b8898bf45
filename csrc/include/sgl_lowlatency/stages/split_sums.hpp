// Between the products of a slice: sums over splits of K, and pieces of rows that warps take.
#pragma once
#include "sgl_lowlatency/stages/slice_state.hpp"

namespace sgl_lowlatency::stages {

constexpr int32_t kSplitBatch = 4;  // splits that a lane asks for at a time

// Four consecutive floats of `splits` buffers that are `stride` words apart, added up in their order. Each calling thread polls by itself.
SGL_DEVICE void await_split_sums(sync::FaultSink sink, int32_t edge, const uint32_t* buffer, int32_t first, int32_t stride, int32_t splits,
                                 float (&sum)[4]) {
  sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
SGL_NO_UNROLL
  for (int32_t begin = 0; begin < splits; begin += kSplitBatch) {
    uint32_t part[kSplitBatch][4];
SGL_UNROLL
    for (int32_t i = 0; i < kSplitBatch; ++i) part[i][0] = part[i][1] = part[i][2] = part[i][3] = begin + i < splits ? abi::kUnwritten : 0u;
    sync::wait_until(
        sink, abi::kFaultEdgeDeadline, 0, edge, static_cast<uint32_t>(first + begin * stride),
        [&] {
          bool is_complete = true;
SGL_UNROLL
          for (int32_t i = 0; i < kSplitBatch; ++i) {
            if (!sync::is_written(part[i])) dialect::load_words(part[i], buffer + first + static_cast<int64_t>(begin + i) * stride);
          }
SGL_UNROLL
          for (int32_t i = 0; i < kSplitBatch; ++i) is_complete = is_complete && sync::is_written(part[i]);
          return is_complete || dialect::planted(dialect::Planted::kMissingAwait);
        },
        [] { return abi::kUnwritten; });
SGL_UNROLL
    for (int32_t i = 0; i < kSplitBatch; ++i) {
SGL_UNROLL
      for (int32_t j = 0; j < 4; ++j) sum[j] += dialect::bits_to_float(part[i][j]);
    }
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
