// CUDA entry of bitmap_routing; the body and its contract are in bitmap_routing.hpp.
#pragma once
#include "kernels/nvidia/bitmap_routing/bitmap_routing.hpp"

namespace sgl_lowlatency::kernels {

template <int32_t kWords, class Logit>
__global__ void __launch_bounds__(abi::kMaxRows * 32, 1) bitmap_routing(const __grid_constant__ abi::BitmapRoutingParams params) {
  bitmap_routing_body<kWords, Logit>(params);
}

}  // namespace sgl_lowlatency::kernels
