// CUDA side of launch/fused_moe.hpp.
#include "launch/fused_moe.hpp"

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "kernels/nvidia/fused_moe/fused_moe.cuh"

namespace sgl_lowlatency::launch {
namespace {

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("fused_moe: ") + call + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

// The kernel with its shared-memory limit raised.
const void* prepare(int32_t shared_bytes) {
  const void* const kernel = reinterpret_cast<const void*>(kernels::fused_moe);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), "cudaFuncSetAttribute(shared memory)");
  return kernel;
}

}  // namespace

void fused_moe_cuda(const abi::FusedMoeParams& params, int32_t grid, uintptr_t stream) {
  check_fused_moe(params, grid);
  prepare(params.shared.total_bytes);
  cudaLaunchAttribute early{};  // may begin before the launch in front is over: it waits by itself
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(abi::kMoeThreads);
  config.dynamicSmemBytes = static_cast<size_t>(params.shared.total_bytes);
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  config.attrs = &early;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernels::fused_moe, params), "cudaLaunchKernelEx");
}

int32_t fused_moe_max_blocks(int32_t shared_bytes) {
  const void* const kernel = prepare(shared_bytes);
  int32_t per_sm = 0, device = 0, num_sms = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, abi::kMoeThreads, static_cast<size_t>(shared_bytes)),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return per_sm * num_sms;
}

}  // namespace sgl_lowlatency::launch
