// CUDA entry of fused_moe; the body, its contract and its phases are in fused_moe.hpp.
#pragma once
#include "kernels/nvidia/fused_moe/fused_moe.hpp"

namespace sgl_lowlatency::kernels {

__global__ void __launch_bounds__(abi::kMoeThreads, 1) fused_moe(const __grid_constant__ abi::FusedMoeParams params) { fused_moe_body(params); }

}  // namespace sgl_lowlatency::kernels
