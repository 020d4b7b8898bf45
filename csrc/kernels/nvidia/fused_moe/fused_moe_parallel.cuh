// CUDA entries of a tensor-parallel fused_moe: a rank's launch on its own GPU, and the launch of several virtual ranks on one.
#pragma once
#include "kernels/nvidia/fused_moe/fused_moe.hpp"

namespace sgl_lowlatency::kernels {

__global__ void __launch_bounds__(abi::kMoeThreads, 1) fused_moe_parallel(const __grid_constant__ abi::ParallelMoeParams params) {
  fused_moe_body(params);
}

// The ranks are the grid's rows: block_idx and grid_dim are a rank's own, as on a GPU of its own.
__global__ void __launch_bounds__(abi::kMoeThreads, 1) fused_moe_virtual(const __grid_constant__ abi::VirtualMoeRanks ranks) {
  fused_moe_body(ranks.of[blockIdx.y]);
}

}  // namespace sgl_lowlatency::kernels
