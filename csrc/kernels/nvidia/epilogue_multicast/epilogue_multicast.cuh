// CUDA entries of epilogue_multicast; the bodies and their contract are in epilogue_multicast.hpp.
#pragma once
#include "kernels/nvidia/epilogue_multicast/epilogue_multicast.hpp"

namespace sgl_lowlatency::kernels {

template <int32_t kNTiles>
__global__ void __launch_bounds__(abi::kNumThreads, 1) push_tiles(const __grid_constant__ abi::EpilogueMulticastParams params) {
  push_tiles_body<kNTiles>(params);
}

template <int32_t kRanks>
__global__ void __launch_bounds__(abi::kMaxReduceThreads, 1) reduce_tiles(const __grid_constant__ abi::EpilogueMulticastParams params) {
  reduce_tiles_body<kRanks>(params);
}

}  // namespace sgl_lowlatency::kernels
