// CUDA entry of attention_in; the body, its contract and its phases are in attention_in.hpp.
#pragma once
#include "kernels/nvidia/attention_in/attention_in.hpp"

namespace sgl_lowlatency::kernels {

template <int32_t kNTiles>
__global__ void __launch_bounds__(abi::kAttnInThreads, 1) attention_in(const __grid_constant__ abi::AttentionInParams params) {
  attention_in_body<kNTiles>(params);
}

}  // namespace sgl_lowlatency::kernels
