// What the launches of tensor-parallel decode_step have in common: parallel_step.cu, trial_step.cu.
#pragma once
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "launch/decode_step_kernel.hpp"
#include "launch/parallel_step.hpp"

namespace sgl_lowlatency::launch {

inline void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("decode_step: ") + call + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

// Throws std::invalid_argument where no instance has sizes like these.
inline void require(bool is_met, const std::string& what) {
  if (!is_met) throw std::invalid_argument("decode_step: " + what + " on CUDA");
}

template <class Params>
void launch_cooperatively(void (*kernel)(Params), const Params& params, dim3 grid, int32_t shared_bytes, uintptr_t stream) {
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        "cudaFuncSetAttribute(shared memory)");
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;  // the launch fails rather than hangs when the blocks do not fit at once
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(abi::kNumThreads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  config.attrs = &cooperative;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, params), "cudaLaunchKernelEx");
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

// Blocks of a kernel that the current device holds at once.
inline int32_t max_blocks(const void* kernel, int32_t shared_bytes) {
  int32_t per_sm = 0, device = 0, num_sms = 0;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), "cudaFuncSetAttribute(shared memory)");
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, abi::kNumThreads, static_cast<size_t>(shared_bytes)),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return per_sm * num_sms;
}

}  // namespace sgl_lowlatency::launch
