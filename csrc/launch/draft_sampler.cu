// CUDA side of launch/draft_sampler.hpp.
#include "launch/draft_sampler.hpp"

#include "launch/cuda_launch.cuh"
#include "launch/draft_sampler_kernel.cuh"

namespace sgl_lowlatency::launch {
namespace {

constexpr char kName[] = "draft_sampler";

DraftKernel select_kernel(const abi::DraftSamplerParams& p) {
  return p.timeline != nullptr ? timed_draft_kernel(p) : draft_kernel<stages::NoDraftClock>(p);
}

}  // namespace

void draft_sampler_cuda(const abi::DraftSamplerParams& params, int32_t grid, bool is_early, uintptr_t stream) {
  check_draft_sampler(params, grid);
  const LaunchShape shape{dim3(static_cast<unsigned>(grid)), abi::kDraftThreads, params.shared.total_bytes};
  if (is_early) {
    launch_early(kName, select_kernel(params), params, shape, stream);
  } else {
    launch_cooperative(kName, select_kernel(params), params, shape, stream);
  }
}

int32_t draft_sampler_max_blocks(const abi::DraftSamplerParams& params) {
  return resident_blocks(kName, reinterpret_cast<const void*>(select_kernel(params)), abi::kDraftThreads, params.shared.total_bytes);
}

}  // namespace sgl_lowlatency::launch
