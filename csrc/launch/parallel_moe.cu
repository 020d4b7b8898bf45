// CUDA side of launch/parallel_moe.hpp.
#include "launch/parallel_moe.hpp"

#include "kernels/nvidia/fused_moe/fused_moe_parallel.cuh"
#include "launch/cuda_launch.cuh"

namespace sgl_lowlatency::launch {
namespace {

constexpr char kName[] = "fused_moe";

}  // namespace

void parallel_moe_cuda(const abi::ParallelMoeParams& params, int32_t grid, uintptr_t stream) {
  check_parallel_moe(params, grid);
  launch_early(kName, kernels::fused_moe_parallel, params, {dim3(static_cast<unsigned>(grid)), abi::kMoeThreads, params.shared.total_bytes}, stream);
}

void virtual_moe_cuda(const std::vector<abi::ParallelMoeParams>& ranks, int32_t grid, uintptr_t stream) {
  const abi::VirtualMoeRanks all = virtual_moe_ranks(ranks, grid);
  const dim3 blocks(static_cast<unsigned>(grid), static_cast<unsigned>(ranks.size()));
  launch_early(kName, kernels::fused_moe_virtual, all, {blocks, abi::kMoeThreads, ranks[0].shared.total_bytes}, stream);
}

int32_t parallel_moe_max_blocks(int32_t shared_bytes, bool is_virtual) {
  const void* const kernel =
      is_virtual ? reinterpret_cast<const void*>(kernels::fused_moe_virtual) : reinterpret_cast<const void*>(kernels::fused_moe_parallel);
  return resident_blocks(kName, kernel, abi::kMoeThreads, shared_bytes);
}

}  // namespace sgl_lowlatency::launch
