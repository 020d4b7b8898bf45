// What the launches of tensor-parallel decode_step have in common: parallel_step.cu, timed_step.cu.
#pragma once
#include <stdexcept>
#include <string>

#include "launch/cuda_launch.cuh"
#include "launch/decode_step_kernel.hpp"
#include "launch/parallel_step.hpp"

namespace sgl_lowlatency::launch {

constexpr char kStepName[] = "decode_step";

// Throws std::invalid_argument where no instance has sizes like these.
inline void require(bool is_met, const std::string& what) {
  if (!is_met) throw std::invalid_argument("decode_step: " + what + " on CUDA");
}

// Of a launch of num_ranks ranks, `grid` blocks each.
inline LaunchShape step_shape(const abi::ParallelStepParams& p, int32_t grid, size_t num_ranks) {
  return {dim3(static_cast<unsigned>(grid), static_cast<unsigned>(num_ranks)), abi::kNumThreads, p.shared.total_bytes};
}

}  // namespace sgl_lowlatency::launch
