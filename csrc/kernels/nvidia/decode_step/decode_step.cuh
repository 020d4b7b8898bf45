// CUDA entry of decode_step; the body, its contract and its phases are in decode_step.hpp.
#pragma once
#include "kernels/nvidia/decode_step/decode_step.hpp"

namespace sgl_lowlatency::kernels {

template <int32_t kNTiles, int32_t kHeadDim, int32_t kElementBytes, bool kIsVerify, int32_t kExpertWords = 0>
__global__ void __launch_bounds__(abi::kNumThreads, 1) decode_step(const __grid_constant__ abi::DecodeStepParams params) {
  decode_step_body<kNTiles, kHeadDim, kElementBytes, kIsVerify, kExpertWords>(params);
}

}  // namespace sgl_lowlatency::kernels
