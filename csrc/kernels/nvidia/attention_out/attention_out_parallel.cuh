// CUDA entries of a tensor-parallel attention_out: a rank's launch on its own GPU, and the launch of several virtual ranks on one.
#pragma once
#include "kernels/nvidia/attention_out/attention_out.hpp"

namespace sgl_lowlatency::kernels {

template <int32_t kNTiles>
__global__ void __launch_bounds__(abi::kAttnOutThreads, 1) attention_out_parallel(const __grid_constant__ abi::ParallelAttentionOutParams params) {
  attention_out_body<kNTiles>(params);
}

// The ranks are the grid's rows: block_idx and grid_dim are a rank's own, as on a GPU of its own.
template <int32_t kNTiles>
__global__ void __launch_bounds__(abi::kAttnOutThreads, 1) attention_out_virtual(const __grid_constant__ abi::VirtualAttentionOut ranks) {
  attention_out_body<kNTiles>(ranks.of[blockIdx.y]);
}

}  // namespace sgl_lowlatency::kernels
