// CUDA instances of tensor-parallel decode_step for verify steps, a file of their own so that a build compiles them beside parallel_step.cu's.
#include "kernels/nvidia/decode_step/decode_step_parallel.cuh"
#include "launch/parallel_step_kernel.hpp"

namespace sgl_lowlatency::launch {
namespace {

template <int32_t kNTiles>
ParallelStepKernel select_layers(const abi::ParallelStepParams& p) {
  if (p.geometry.num_experts > 0) return kernels::decode_step_parallel<kNTiles, 2, true, abi::kServedExpertWords>;
  return p.weights == abi::kWeightsBf16 ? kernels::decode_step_parallel<kNTiles, 2, true, 0> : kernels::decode_step_parallel<kNTiles, 1, true, 0>;
}

}  // namespace

ParallelStepKernel select_parallel_verify_kernel(const abi::ParallelStepParams& p) { return p.rows <= 8 ? select_layers<1>(p) : select_layers<2>(p); }

}  // namespace sgl_lowlatency::launch
