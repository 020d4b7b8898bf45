// CUDA side of launch/fused_moe.hpp.
#include "launch/fused_moe.hpp"

#include "kernels/nvidia/fused_moe/fused_moe.cuh"
#include "launch/cuda_launch.cuh"

namespace sgl_lowlatency::launch {
namespace {

constexpr char kName[] = "fused_moe";

}  // namespace

void fused_moe_cuda(const abi::FusedMoeParams& params, int32_t grid, uintptr_t stream) {
  check_fused_moe(params, grid);
  launch_early(kName, kernels::fused_moe, params, {dim3(static_cast<unsigned>(grid)), abi::kMoeThreads, params.shared.total_bytes}, stream);
}

int32_t fused_moe_max_blocks(int32_t shared_bytes) {
  return resident_blocks(kName, reinterpret_cast<const void*>(kernels::fused_moe), abi::kMoeThreads, shared_bytes);
}

}  // namespace sgl_lowlatency::launch
