// CUDA entries of a tensor-parallel decode_step: a rank's launch on its own GPU, of decode and of verify, and the launch of several virtual ranks on
// one, of decode. Heads of 128.
#pragma once
#include "kernels/nvidia/decode_step/decode_step.cuh"

namespace sgl_lowlatency::kernels {

template <int32_t kNTiles, int32_t kElementBytes, bool kIsVerify, int32_t kExpertWords>
__global__ void __launch_bounds__(abi::kNumThreads, 1) decode_step_parallel(const __grid_constant__ abi::ParallelStepParams params) {
  if constexpr (has_body(kElementBytes, kExpertWords)) {
    decode_step_body<kNTiles, 128, kElementBytes, kIsVerify, kExpertWords>(params);
  } else {
    dialect::trap();
  }
}

// The ranks are the grid's rows: block_idx and grid_dim are a rank's own, as on a GPU of its own.
template <int32_t kNTiles, int32_t kExpertWords>
__global__ void __launch_bounds__(abi::kNumThreads, 1) decode_step_virtual(const __grid_constant__ abi::VirtualRanks ranks) {
  if constexpr (has_body(2, kExpertWords)) {
    decode_step_body<kNTiles, 128, 2, false, kExpertWords>(ranks.of[blockIdx.y]);
  } else {
    dialect::trap();
  }
}

}  // namespace sgl_lowlatency::kernels
