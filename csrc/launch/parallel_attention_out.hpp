// Host entry of a tensor-parallel attention_out on CUDA. No device code here.
#pragma once
#include <cstdint>
#include <vector>

#include "launch/attention_out.hpp"
#include "sgl_lowlatency/abi/parallel_attention_out.hpp"

namespace sgl_lowlatency::launch {

// A rank's launch, as attention_out_cuda; all ranks of the group launch the same rows in the same order.
void parallel_attention_out_cuda(const abi::ParallelAttentionOutParams& params, int32_t grid, uintptr_t stream);

// One launch of virtual ranks on the current device, `grid` blocks each; they are all ranks of their group.
void virtual_attention_out_cuda(const std::vector<abi::ParallelAttentionOutParams>& ranks, int32_t grid, uintptr_t stream);

// Blocks of the instance for so many rows that the current device holds at once, of a rank's launch or of one of virtual ranks.
int32_t parallel_attention_out_max_blocks(int32_t rows, int32_t shared_bytes);
int32_t virtual_attention_out_max_blocks(int32_t rows, int32_t shared_bytes);

// What both the CUDA launcher and the emulation refuse: throws std::invalid_argument, also as check_attention_out.
void check_parallel_attention_out(const abi::ParallelAttentionOutParams& params, int32_t grid);

}  // namespace sgl_lowlatency::launch
