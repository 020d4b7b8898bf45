// CUDA side of launch/attention_out.hpp.
#include "launch/attention_out.hpp"

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "kernels/nvidia/attention_out/attention_out.cuh"

namespace sgl_lowlatency::launch {
namespace {

using Kernel = void (*)(abi::AttentionOutParams);

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("attention_out: ") + call + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

// The rows' instance with its shared-memory limit raised.
Kernel prepare(int32_t rows, int32_t shared_bytes) {
  const Kernel kernel = with_slice_instance(rows, [](auto n_tiles) -> Kernel { return kernels::attention_out<decltype(n_tiles)::value>; });
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        "cudaFuncSetAttribute(shared memory)");
  return kernel;
}

}  // namespace

void attention_out_cuda(const abi::AttentionOutParams& params, int32_t grid, uintptr_t stream) {
  check_attention_out(params, grid);
  const Kernel kernel = prepare(params.rows, params.shared.total_bytes);
  cudaLaunchAttribute early{};  // may begin before the launch in front is over: it waits by itself
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(abi::kAttnOutThreads);
  config.dynamicSmemBytes = static_cast<size_t>(params.shared.total_bytes);
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  config.attrs = &early;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, params), "cudaLaunchKernelEx");
}

int32_t attention_out_max_blocks(int32_t rows, int32_t shared_bytes) {
  const Kernel kernel = prepare(rows, shared_bytes);
  int32_t per_sm = 0, device = 0, num_sms = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, reinterpret_cast<const void*>(kernel), abi::kAttnOutThreads,
                                                      static_cast<size_t>(shared_bytes)),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return per_sm * num_sms;
}

}  // namespace sgl_lowlatency::launch
