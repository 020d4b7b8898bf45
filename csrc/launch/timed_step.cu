// CUDA side of launch/timed_step.hpp, and its instance.
#include "launch/timed_step.hpp"

#include <string>

#include "kernels/nvidia/decode_step/decode_step_timed.cuh"
#include "launch/parallel_launch.cuh"

namespace sgl_lowlatency::launch {
namespace {

void check_instance(const abi::TimedStepParams& p) {
  require_hopper(p);
  require(p.geometry.head_dim == 128, "head_dim " + std::to_string(p.geometry.head_dim) + " of a tensor-parallel step is not 128");
}

}  // namespace

void timed_step_cuda(const abi::TimedStepParams& params, int32_t grid, uintptr_t stream) {
  check_timed_step(params, grid);
  check_instance(params);
  launch_cooperative(kStepName, kernels::decode_step_timed, params, step_shape(params, grid, 1), stream);
}

int32_t timed_step_max_blocks(const abi::TimedStepParams& p) {
  check_instance(p);
  return resident_blocks(kStepName, reinterpret_cast<const void*>(kernels::decode_step_timed), abi::kNumThreads, p.shared.total_bytes);
}

}  // namespace sgl_lowlatency::launch
