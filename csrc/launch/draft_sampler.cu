// CUDA side of launch/draft_sampler.hpp.
#include "launch/draft_sampler.hpp"

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "kernels/nvidia/draft_sampler/draft_sampler.cuh"

namespace sgl_lowlatency::launch {
namespace {

using Kernel = void (*)(abi::DraftSamplerParams);

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("draft_sampler: ") + call + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

// The kernel with its shared-memory limit raised.
Kernel prepare(const abi::DraftSamplerParams& p) {
  const Kernel kernel = with_draft_instance(p, [](auto num_tiles, auto batch_tiles, auto at_once) -> Kernel {
    return kernels::draft_sampler<decltype(num_tiles)::value, decltype(batch_tiles)::value, decltype(at_once)::value>;
  });
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, p.shared.total_bytes),
        "cudaFuncSetAttribute(shared memory)");
  return kernel;
}

}  // namespace

void draft_sampler_cuda(const abi::DraftSamplerParams& params, int32_t grid, uintptr_t stream) {
  check_draft_sampler(params, grid);
  const Kernel kernel = prepare(params);
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;  // the launch fails rather than hangs when the blocks do not fit at once
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(abi::kNumThreads);
  config.dynamicSmemBytes = static_cast<size_t>(params.shared.total_bytes);
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  config.attrs = &cooperative;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, params), "cudaLaunchKernelEx");
}

int32_t draft_sampler_max_blocks(const abi::DraftSamplerParams& params) {
  const Kernel kernel = prepare(params);
  int32_t per_sm = 0, device = 0, num_sms = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, reinterpret_cast<const void*>(kernel), abi::kNumThreads,
                                                      static_cast<size_t>(params.shared.total_bytes)),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return per_sm * num_sms;
}

}  // namespace sgl_lowlatency::launch
