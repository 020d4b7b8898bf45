// CUDA side of launch/epilogue_multicast.hpp.
#include "launch/epilogue_multicast.hpp"

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "kernels/nvidia/epilogue_multicast/epilogue_multicast.cuh"

namespace sgl_lowlatency::launch {
namespace {

using Kernel = void (*)(abi::EpilogueMulticastParams);

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("epilogue_multicast: ") + call + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

Kernel select_reduction(int32_t num_ranks) {
  if (num_ranks <= 2) return kernels::reduce_tiles<2>;
  return num_ranks <= 4 ? kernels::reduce_tiles<4> : kernels::reduce_tiles<8>;
}

// May begin before the launch in front is over: it waits by itself.
void launch_early(Kernel kernel, const abi::EpilogueMulticastParams& params, int32_t grid, int32_t threads, int32_t shared_bytes, uintptr_t stream) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  config.attrs = &early;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, params), "cudaLaunchKernelEx");
}

}  // namespace

void epilogue_multicast_cuda(const abi::EpilogueMulticastParams& params, uintptr_t stream) {
  check_epilogue_multicast(params);
  const abi::DecodeStepParams& product = params.product;
  const Kernel push = product.rows <= 8 ? kernels::push_tiles<1> : kernels::push_tiles<2>;
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(push), cudaFuncAttributeMaxDynamicSharedMemorySize, product.shared.total_bytes),
        "cudaFuncSetAttribute(shared memory)");
  launch_early(push, params, params.ranks_in_launch * params.blocks_per_rank, abi::kNumThreads, product.shared.total_bytes, stream);
  const int32_t threads = abi::reduce_threads(params.at.hidden);
  launch_early(select_reduction(params.at.num_ranks), params, params.ranks_in_launch * product.rows, threads, threads / 32 * 4, stream);
}

}  // namespace sgl_lowlatency::launch
