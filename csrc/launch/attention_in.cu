// CUDA side of launch/attention_in.hpp.
#include "launch/attention_in.hpp"

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "kernels/nvidia/attention_in/attention_in.cuh"

namespace sgl_lowlatency::launch {
namespace {

using Kernel = void (*)(abi::AttentionInParams);

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("attention_in: ") + call + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

// The rows' instance with its shared-memory limit raised.
Kernel prepare(int32_t rows, int32_t shared_bytes) {
  const Kernel kernel = with_slice_instance(rows, [](auto n_tiles) -> Kernel { return kernels::attention_in<decltype(n_tiles)::value>; });
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        "cudaFuncSetAttribute(shared memory)");
  return kernel;
}

}  // namespace

void attention_in_cuda(const abi::AttentionInParams& params, int32_t grid, uintptr_t stream) {
  check_attention_in(params, grid);
  const Kernel kernel = prepare(params.rows, params.shared.total_bytes);
  cudaLaunchAttribute early{};  // may begin before the launch in front is over: it waits by itself
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(abi::kAttnInThreads);
  config.dynamicSmemBytes = static_cast<size_t>(params.shared.total_bytes);
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  config.attrs = &early;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, params), "cudaLaunchKernelEx");
}

int32_t attention_in_max_blocks(int32_t rows, int32_t shared_bytes) {
  const Kernel kernel = prepare(rows, shared_bytes);
  int32_t per_sm = 0, device = 0, num_sms = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, reinterpret_cast<const void*>(kernel), abi::kAttnInThreads,
                                                      static_cast<size_t>(shared_bytes)),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return per_sm * num_sms;
}

}  // namespace sgl_lowlatency::launch
