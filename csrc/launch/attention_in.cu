// CUDA side of launch/attention_in.hpp.
#include "launch/attention_in.hpp"

#include "kernels/nvidia/attention_in/attention_in.cuh"
#include "launch/cuda_launch.cuh"

namespace sgl_lowlatency::launch {
namespace {

using Kernel = void (*)(abi::AttentionInParams);

constexpr char kName[] = "attention_in";

Kernel select_kernel(int32_t rows) {
  return with_slice_instance(rows, [](auto n_tiles) -> Kernel { return kernels::attention_in<decltype(n_tiles)::value>; });
}

}  // namespace

void attention_in_cuda(const abi::AttentionInParams& params, int32_t grid, uintptr_t stream) {
  check_attention_in(params, grid);
  const LaunchShape shape{dim3(static_cast<unsigned>(grid)), abi::kAttnInThreads, params.shared.total_bytes};
  launch_early(kName, select_kernel(params.rows), params, shape, stream);
}

int32_t attention_in_max_blocks(int32_t rows, int32_t shared_bytes) {
  return resident_blocks(kName, reinterpret_cast<const void*>(select_kernel(rows)), abi::kAttnInThreads, shared_bytes);
}

}  // namespace sgl_lowlatency::launch
