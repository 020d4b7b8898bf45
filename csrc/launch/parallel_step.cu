// CUDA side of launch/parallel_step.hpp, and its instances of decode steps: heads of 128, up to 16 rows; of MoE layers up to 128 experts. Those of
// verify steps: parallel_verify.cu.
#include "launch/parallel_step.hpp"

#include <stdexcept>
#include <string>

#include "kernels/nvidia/decode_step/decode_step_parallel.cuh"
#include "launch/parallel_launch.cuh"
#include "launch/parallel_step_kernel.hpp"

namespace sgl_lowlatency::launch {
namespace {

using VirtualKernel = void (*)(abi::VirtualRanks);

void check_instance(const abi::ParallelStepParams& p) {
  require_hopper(p);
  const abi::Geometry& g = p.geometry;
  require(g.head_dim == 128, "head_dim " + std::to_string(g.head_dim) + " of a tensor-parallel step is not 128");
  require(g.num_experts <= 32 * abi::kServedExpertWords,
          "num_experts " + std::to_string(g.num_experts) + " is above " + std::to_string(32 * abi::kServedExpertWords));
}

template <int32_t kNTiles>
ParallelStepKernel select_layers(const abi::ParallelStepParams& p) {
  if (p.geometry.num_experts > 0) return kernels::decode_step_parallel<kNTiles, 2, false, abi::kServedExpertWords>;
  return p.weights == abi::kWeightsBf16 ? kernels::decode_step_parallel<kNTiles, 2, false, 0> : kernels::decode_step_parallel<kNTiles, 1, false, 0>;
}

ParallelStepKernel select_kernel(const abi::ParallelStepParams& p) {
  check_instance(p);
  if (p.rows_per_request > 1) return select_parallel_verify_kernel(p);
  return p.rows <= 8 ? select_layers<1>(p) : select_layers<2>(p);
}

template <int32_t kNTiles>
VirtualKernel select_virtual_layers(const abi::ParallelStepParams& p) {
  return p.geometry.num_experts > 0 ? kernels::decode_step_virtual<kNTiles, abi::kServedExpertWords> : kernels::decode_step_virtual<kNTiles, 0>;
}

VirtualKernel select_virtual_kernel(const abi::ParallelStepParams& p) {
  check_instance(p);
  require(p.weights == abi::kWeightsBf16, "a step of virtual ranks with FP8 weights has no kernel");
  require(p.rows_per_request == 1, "a verify step of virtual ranks, all of them in one launch, has no kernel");
  return p.rows <= 8 ? select_virtual_layers<1>(p) : select_virtual_layers<2>(p);
}

// The parameters of one launch of virtual ranks. Throws std::invalid_argument for ranks that are not a launch's.
abi::VirtualRanks virtual_ranks(const std::vector<abi::ParallelStepParams>& ranks, int32_t grid) {
  const size_t num_ranks = ranks.size();
  if (num_ranks < 1 || num_ranks > abi::kMaxVirtualRanks) {
    throw std::invalid_argument("decode_step: " + std::to_string(num_ranks) + " virtual ranks are not 1.." + std::to_string(abi::kMaxVirtualRanks));
  }
  abi::VirtualRanks all{};
  for (size_t i = 0; i < num_ranks; ++i) {
    check_parallel_step(ranks[i], grid);
    if (ranks[i].rows != ranks[0].rows || ranks[i].shared.total_bytes != ranks[0].shared.total_bytes) {
      throw std::invalid_argument("decode_step: virtual ranks of one launch have different steps");
    }
    all.of[i] = ranks[i];
  }
  return all;
}

}  // namespace

void parallel_step_cuda(const abi::ParallelStepParams& params, int32_t grid, uintptr_t stream) {
  check_parallel_step(params, grid);
  launch_cooperative(kStepName, select_kernel(params), params, step_shape(params, grid, 1), stream);
}

void virtual_step_cuda(const std::vector<abi::ParallelStepParams>& ranks, int32_t grid, uintptr_t stream) {
  const abi::VirtualRanks all = virtual_ranks(ranks, grid);
  launch_cooperative(kStepName, select_virtual_kernel(ranks[0]), all, step_shape(ranks[0], grid, ranks.size()), stream);
}

int32_t parallel_step_max_blocks(const abi::ParallelStepParams& p, bool is_virtual) {
  const void* const kernel = is_virtual ? reinterpret_cast<const void*>(select_virtual_kernel(p)) : reinterpret_cast<const void*>(select_kernel(p));
  return resident_blocks(kStepName, kernel, abi::kNumThreads, p.shared.total_bytes);
}

}  // namespace sgl_lowlatency::launch
