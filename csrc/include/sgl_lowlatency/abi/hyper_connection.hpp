// mHC: a row has kStreams parallel residual streams, and a hyper-connection around a sublayer mixes them with its output. What a kernel that closes
// one is told of it: a member of AttentionOutParams and of FusedMoeParams. Shared by host C++, CUDA, the host dialect and (through the bindings)
// Python.
#pragma once
#include <cstdint>

#include "sgl_lowlatency/abi/decode_step.hpp"

namespace sgl_lowlatency::abi {

constexpr int32_t kStreams = 4;                        // parallel residual streams of a row
constexpr int32_t kMixes = (2 + kStreams) * kStreams;  // coefficients of a row: pre, post, comb
constexpr int32_t kMixColumns = 128;                   // of the flattened streams: a unit of the mix
constexpr int32_t kMixWords = 28;                      // of a row and unit: the mixes' partial sums, that of the squares, zeros up to a vector

// Units of the mix of rows of `hidden` columns, a multiple of kMixColumns.
SGL_ABI_FUNCTION int32_t mix_units(int32_t hidden) { return kStreams * hidden / kMixColumns; }

struct HyperConnection {
  int32_t sinkhorn_iterations;  // at least 1: rows, then columns of comb are normalised so often
  float mix_eps;                // added to pre, to comb and to the sums it is divided by
  float mix_rms_eps;            // of the rms that mixes are divided by

  const bf16* streams;     // [rows, kStreams, hidden]: those that the sublayer's input was combined of
  const float* mix;        // [kMixes, kStreams * hidden]
  const float* mix_scale;  // [3]: of pre, post, comb
  const float* mix_base;   // [kMixes]
  bf16* streams_out;       // [rows, kStreams, hidden]; not streams
  float* coefficients;     // [rows, kMixes], or null
};

}  // namespace sgl_lowlatency::abi
