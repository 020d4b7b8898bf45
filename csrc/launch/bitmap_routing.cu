// CUDA side of launch/bitmap_routing.hpp.
#include "launch/bitmap_routing.hpp"

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "kernels/nvidia/bitmap_routing/bitmap_routing.cuh"

namespace sgl_lowlatency::launch {
namespace {

using Kernel = void (*)(abi::BitmapRoutingParams);

template <class Logit>
Kernel select_words(const abi::BitmapRoutingParams& p) {
  if (p.num_experts <= 128) return kernels::bitmap_routing<4, Logit>;
  return p.num_experts <= 256 ? kernels::bitmap_routing<8, Logit> : kernels::bitmap_routing<abi::kExpertWords, Logit>;
}

}  // namespace

void bitmap_routing_cuda(const abi::BitmapRoutingParams& params, uintptr_t stream) {
  check_bitmap_routing(params);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;  // the kernel begins with await_previous_launch
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(static_cast<unsigned>(abi::routing_warps(params.rows) * 32));
  config.dynamicSmemBytes = static_cast<size_t>(params.at.total_bytes);  // below the 48 KiB that need no attribute
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  config.attrs = &early;
  config.numAttrs = 1;
  const Kernel kernel = params.logits_type == abi::kLogitsBf16 ? select_words<abi::bf16>(params) : select_words<float>(params);
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, params);
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("bitmap_routing: cudaLaunchKernelEx: ") + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

}  // namespace sgl_lowlatency::launch
