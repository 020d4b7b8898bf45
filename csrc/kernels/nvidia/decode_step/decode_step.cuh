// CUDA entry of decode_step; the body, its contract and its phases are in decode_step.hpp.
#pragma once
#include "kernels/nvidia/decode_step/decode_step.hpp"

namespace sgl_lowlatency::kernels {

// FP8 weights and MoE layers are served on sm_90 alone. Elsewhere their instances are empty, which saves half of the build; the launchers refuse them
// there (launch/decode_step_kernel.hpp).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool kIsHopper = false;
#else
constexpr bool kIsHopper = true;
#endif
constexpr bool has_body(int32_t element_bytes, int32_t expert_words) { return kIsHopper || (element_bytes == 2 && expert_words == 0); }

template <int32_t kNTiles, int32_t kHeadDim, int32_t kElementBytes, bool kIsVerify, int32_t kExpertWords = 0>
__global__ void __launch_bounds__(abi::kNumThreads, 1) decode_step(const __grid_constant__ abi::DecodeStepParams params) {
  if constexpr (has_body(kElementBytes, kExpertWords)) {
    decode_step_body<kNTiles, kHeadDim, kElementBytes, kIsVerify, kExpertWords>(params);
  } else {
    dialect::trap();
  }
}

}  // namespace sgl_lowlatency::kernels
