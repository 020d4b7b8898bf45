// CUDA entry of attention_out; the body, its contract and its phases are in attention_out.hpp.
#pragma once
#include "kernels/nvidia/attention_out/attention_out.hpp"

namespace sgl_lowlatency::kernels {

template <int32_t kNTiles>
__global__ void __launch_bounds__(abi::kAttnOutThreads, 1) attention_out(const __grid_constant__ abi::AttentionOutParams params) {
  attention_out_body<kNTiles>(params);
}

}  // namespace sgl_lowlatency::kernels
