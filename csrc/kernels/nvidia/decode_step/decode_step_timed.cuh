// CUDA entry of a rank's launch of a timed tensor-parallel decode_step: bf16 dense layers, heads of 128, up to kMaxTimedRows rows; on Hopper alone.
#pragma once
#include "kernels/nvidia/decode_step/decode_step.cuh"

namespace sgl_lowlatency::kernels {

__global__ void __launch_bounds__(abi::kNumThreads, 1) decode_step_timed(const __grid_constant__ abi::TimedStepParams params) {
  if constexpr (kIsHopper) {
    decode_step_body<1, 128, 2, false>(params);
  } else {
    dialect::trap();
  }
}

}  // namespace sgl_lowlatency::kernels
