// CUDA side of launch/parallel_attention_out.hpp.
#include "launch/parallel_attention_out.hpp"

#include <stdexcept>
#include <string>

#include "kernels/nvidia/attention_out/attention_out_parallel.cuh"
#include "launch/cuda_launch.cuh"

namespace sgl_lowlatency::launch {
namespace {

using Kernel = void (*)(abi::ParallelAttentionOutParams);
using VirtualKernel = void (*)(abi::VirtualAttentionOut);

constexpr char kName[] = "attention_out";

Kernel select_kernel(int32_t rows) {
  return with_slice_instance(rows, [](auto n_tiles) -> Kernel { return kernels::attention_out_parallel<decltype(n_tiles)::value>; });
}
VirtualKernel select_virtual_kernel(int32_t rows) {
  return with_slice_instance(rows, [](auto n_tiles) -> VirtualKernel { return kernels::attention_out_virtual<decltype(n_tiles)::value>; });
}

LaunchShape shape_of(const abi::ParallelAttentionOutParams& p, int32_t grid, size_t num_ranks) {
  return {dim3(static_cast<unsigned>(grid), static_cast<unsigned>(num_ranks)), abi::kAttnOutThreads, p.shared.total_bytes};
}

// The parameters of one launch. Throws std::invalid_argument for ranks that are not 0, 1, .. of a group, with launches alike.
abi::VirtualAttentionOut virtual_ranks(const std::vector<abi::ParallelAttentionOutParams>& ranks, int32_t grid) {
  const SliceCheck check{kName};
  check.require_within(static_cast<int64_t>(ranks.size()), 1, abi::kMaxRanks, "number of virtual ranks");
  abi::VirtualAttentionOut all{};
  for (size_t i = 0; i < ranks.size(); ++i) {
    check_parallel_attention_out(ranks[i], grid);
    check.require(ranks[i].rank == static_cast<int32_t>(i), "virtual rank " + std::to_string(i) + " has rank " + std::to_string(ranks[i].rank));
    check.require(ranks[i].rows == ranks[0].rows && ranks[i].shared.total_bytes == ranks[0].shared.total_bytes,
                  "virtual ranks of one launch have different rows or sizes");
    all.of[i] = ranks[i];
  }
  return all;
}

}  // namespace

void parallel_attention_out_cuda(const abi::ParallelAttentionOutParams& params, int32_t grid, uintptr_t stream) {
  check_parallel_attention_out(params, grid);
  launch_early(kName, select_kernel(params.rows), params, shape_of(params, grid, 1), stream);
}

void virtual_attention_out_cuda(const std::vector<abi::ParallelAttentionOutParams>& ranks, int32_t grid, uintptr_t stream) {
  const abi::VirtualAttentionOut all = virtual_ranks(ranks, grid);
  launch_early(kName, select_virtual_kernel(ranks[0].rows), all, shape_of(ranks[0], grid, ranks.size()), stream);
}

int32_t parallel_attention_out_max_blocks(int32_t rows, int32_t shared_bytes) {
  return resident_blocks(kName, reinterpret_cast<const void*>(select_kernel(rows)), abi::kAttnOutThreads, shared_bytes);
}
int32_t virtual_attention_out_max_blocks(int32_t rows, int32_t shared_bytes) {
  return resident_blocks(kName, reinterpret_cast<const void*>(select_virtual_kernel(rows)), abi::kAttnOutThreads, shared_bytes);
}

}  // namespace sgl_lowlatency::launch
