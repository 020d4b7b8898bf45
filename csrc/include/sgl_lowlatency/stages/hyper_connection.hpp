// What the stages of a hyper-connection see of a launch, whichever kernel's it is, and its post: the streams behind a sublayer whose output is y.
//
//   R'[i] = bf16(post[i] bf16(y) + sum_j comb[j][i] R[j])
//
// stages/hyper_mix.hpp makes the coefficients.
#pragma once
#include "sgl_lowlatency/abi/hyper_connection.hpp"
#include "sgl_lowlatency/stages/await_vectors.hpp"
#include "sgl_lowlatency/stages/numbers.hpp"

namespace sgl_lowlatency::stages {

// A launch's hyper-connection, and where its blocks hand over what they make of it.
struct HyperView {
  const abi::HyperConnection& hyper;
  int32_t rows;
  int32_t hidden;
  sync::FaultSink sink;
  uint32_t* mix;           // [mix_units, rows, kMixWords] fp32
  uint32_t* coefficients;  // [rows, kMixes] fp32: pre, post, comb[j][i] at 8 + 4 j + i
  int32_t mix_edge;        // for fault records
  int32_t coefficients_edge;
};

// First of a thread's four columns of stream j of a row.
SGL_DEVICE int64_t stream_column(const HyperView& v, int32_t row, int32_t j, int32_t column) {
  return (static_cast<int64_t>(row) * abi::kStreams + j) * v.hidden + column;
}

// R of a row's columns column .. column + 3: pairs of bf16. To be asked for in front of waits. Entry: behind the launch in front.
SGL_DEVICE void load_streams(const HyperView& v, int32_t row, int32_t column, uint32_t (&pair)[abi::kStreams][2]) {
SGL_UNROLL
  for (int32_t j = 0; j < abi::kStreams; ++j) {
SGL_UNROLL
    for (int32_t i = 0; i < 2; ++i) {
      pair[j][i] = dialect::load_plain(reinterpret_cast<const uint32_t*>(v.hyper.streams + stream_column(v, row, j, column)) + i);
    }
  }
}

// A row's coefficients: pre, post, comb. Each calling thread polls by itself.
SGL_DEVICE void await_coefficients(const HyperView& v, int32_t row, float (&c)[abi::kMixes]) {
  uint32_t part[abi::kMixes / 4][4];
  await_vectors(v.sink, v.coefficients_edge, v.coefficients, [](int32_t) { return true; },
                [&](int32_t i) { return row * abi::kMixes + i * 4; }, part);
SGL_UNROLL
  for (int32_t i = 0; i < abi::kMixes; ++i) c[i] = dialect::bits_to_float(part[i / 4][i % 4]);
}

// Stores R' of a row's columns column .. column + 3, of which y is the sublayer's output, fp32 still, and pair is R; y is rounded in place. each(k, i,
// word): columns 2i and 2i + 1 of stream k as they are stored.
template <class Each>
SGL_DEVICE void store_streams(const HyperView& v, int32_t row, int32_t column, const float (&c)[abi::kMixes],
                              const uint32_t (&pair)[abi::kStreams][2], float (&y)[4], const Each& each) {
  float r[abi::kStreams][4];
SGL_UNROLL
  for (int32_t i = 0; i < 4; ++i) {
    y[i] = dialect::to_float(dialect::to_bf16(y[i]));
SGL_UNROLL
    for (int32_t j = 0; j < abi::kStreams; ++j) r[j][i] = i % 2 == 0 ? low_float(pair[j][i / 2]) : high_float(pair[j][i / 2]);
  }
SGL_UNROLL
  for (int32_t k = 0; k < abi::kStreams; ++k) {
    float next[4];
SGL_UNROLL
    for (int32_t i = 0; i < 4; ++i) {
      next[i] = c[abi::kStreams + k] * y[i];
SGL_UNROLL
      for (int32_t j = 0; j < abi::kStreams; ++j) {
        next[i] += c[2 * abi::kStreams + (dialect::planted(dialect::Planted::kTransposedMix) ? k * 4 + j : j * 4 + k)] * r[j][i];
      }
    }
    uint32_t* const to = reinterpret_cast<uint32_t*>(v.hyper.streams_out + stream_column(v, row, k, column));
SGL_UNROLL
    for (int32_t i = 0; i < 2; ++i) {
      const uint32_t word = pack_bf16(next[2 * i], next[2 * i + 1]);
      dialect::store_plain(to + i, word);
      each(k, i, word);
    }
  }
}

}  // namespace sgl_lowlatency::stages
