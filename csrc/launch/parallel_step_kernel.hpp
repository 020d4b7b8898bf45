// The instances of tensor-parallel decode_step on CUDA, compiled in two files; parallel_step.cu launches them.
#pragma once
#include "sgl_lowlatency/abi/parallel_step.hpp"

namespace sgl_lowlatency::launch {

using ParallelStepKernel = void (*)(abi::ParallelStepParams);

// The instance of a rank's verify step: bf16 and FP8 weights, MoE layers. Entry: parallel_step.cu's check_instance has passed.
ParallelStepKernel select_parallel_verify_kernel(const abi::ParallelStepParams& params);

}  // namespace sgl_lowlatency::launch
