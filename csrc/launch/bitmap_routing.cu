// CUDA side of launch/bitmap_routing.hpp.
#include "launch/bitmap_routing.hpp"

#include "kernels/nvidia/bitmap_routing/bitmap_routing.cuh"
#include "launch/cuda_launch.cuh"

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
  const Kernel kernel = params.logits_type == abi::kLogitsBf16 ? select_words<abi::bf16>(params) : select_words<float>(params);
  // the kernel begins with await_previous_launch
  launch_early("bitmap_routing", kernel, params, {dim3(1), abi::routing_warps(params.rows) * 32, params.at.total_bytes}, stream);
}

}  // namespace sgl_lowlatency::launch
