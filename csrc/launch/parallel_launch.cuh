// What the launches of tensor-parallel decode_step have in common: parallel_step.cu, trial_step.cu.
#pragma once
#include <stdexcept>
#include <string>
#include <vector>

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

// The parameters of one launch of virtual ranks, `All`. Throws std::invalid_argument for ranks that are not a launch's.
template <class All, class Params>
All virtual_ranks(const std::vector<Params>& ranks, int32_t grid) {
  const size_t num_ranks = ranks.size();
  if (num_ranks < 1 || num_ranks > abi::kMaxVirtualRanks) {
    throw std::invalid_argument("decode_step: " + std::to_string(num_ranks) + " virtual ranks are not 1.." + std::to_string(abi::kMaxVirtualRanks));
  }
  All all{};
  for (size_t i = 0; i < num_ranks; ++i) {
    check_parallel_step(ranks[i], grid);
    if (ranks[i].rows != ranks[0].rows || ranks[i].shared.total_bytes != ranks[0].shared.total_bytes) {
      throw std::invalid_argument("decode_step: virtual ranks of one launch have different steps");
    }
    all.of[i] = {ranks[i]};
  }
  return all;
}

}  // namespace sgl_lowlatency::launch
