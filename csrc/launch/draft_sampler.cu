// CUDA side of launch/draft_sampler.hpp.
#include "launch/draft_sampler.hpp"

#include "kernels/nvidia/draft_sampler/draft_sampler.cuh"
#include "launch/cuda_launch.cuh"

namespace sgl_lowlatency::launch {
namespace {

using Kernel = void (*)(abi::DraftSamplerParams);

constexpr char kName[] = "draft_sampler";

Kernel select_kernel(const abi::DraftSamplerParams& p) {
  return with_draft_instance(p, [](auto num_tiles, auto batch_tiles, auto at_once) -> Kernel {
    return kernels::draft_sampler<decltype(num_tiles)::value, decltype(batch_tiles)::value, decltype(at_once)::value>;
  });
}

}  // namespace

void draft_sampler_cuda(const abi::DraftSamplerParams& params, int32_t grid, uintptr_t stream) {
  check_draft_sampler(params, grid);
  launch_cooperative(kName, select_kernel(params), params, {dim3(static_cast<unsigned>(grid)), abi::kNumThreads, params.shared.total_bytes}, stream);
}

int32_t draft_sampler_max_blocks(const abi::DraftSamplerParams& params) {
  return resident_blocks(kName, reinterpret_cast<const void*>(select_kernel(params)), abi::kNumThreads, params.shared.total_bytes);
}

}  // namespace sgl_lowlatency::launch
