// CUDA entry of draft_sampler; the body, its contract and its phases are in draft_sampler.hpp.
#pragma once
#include "kernels/nvidia/draft_sampler/draft_sampler.hpp"

namespace sgl_lowlatency::kernels {

template <int32_t kNTiles, int32_t kBatchTiles, int32_t kAtOnce>
__global__ void __launch_bounds__(abi::kNumThreads, 1) draft_sampler(const __grid_constant__ abi::DraftSamplerParams params) {
  draft_sampler_body<kNTiles, kBatchTiles, kAtOnce>(params);
}

}  // namespace sgl_lowlatency::kernels
