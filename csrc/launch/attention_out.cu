// CUDA side of launch/attention_out.hpp.
#include "launch/attention_out.hpp"

#include "kernels/nvidia/attention_out/attention_out.cuh"
#include "launch/cuda_launch.cuh"

namespace sgl_lowlatency::launch {
namespace {

using Kernel = void (*)(abi::AttentionOutParams);

constexpr char kName[] = "attention_out";

Kernel select_kernel(int32_t rows) {
  return with_slice_instance(rows, [](auto n_tiles) -> Kernel { return kernels::attention_out<decltype(n_tiles)::value>; });
}

}  // namespace

void attention_out_cuda(const abi::AttentionOutParams& params, int32_t grid, uintptr_t stream) {
  check_attention_out(params, grid);
  const LaunchShape shape{dim3(static_cast<unsigned>(grid)), abi::kAttnOutThreads, params.shared.total_bytes};
  launch_early(kName, select_kernel(params.rows), params, shape, stream);
}

int32_t attention_out_max_blocks(int32_t rows, int32_t shared_bytes) {
  return resident_blocks(kName, reinterpret_cast<const void*>(select_kernel(rows)), abi::kAttnOutThreads, shared_bytes);
}

}  // namespace sgl_lowlatency::launch
