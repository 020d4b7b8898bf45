// Host entry of attention_out on CUDA: checks, shared-memory attribute, launch that may overlap its neighbours. No device code here.
#pragma once
#include <cstdint>

#include "launch/slice.hpp"
#include "sgl_lowlatency/abi/attention_out.hpp"

namespace sgl_lowlatency::launch {

// Launches on `stream` (a cudaStream_t as an integer). Capturable in a CUDA graph. Throws std::invalid_argument naming the parameter, or
// std::runtime_error with the CUDA error's name and text.
void attention_out_cuda(const abi::AttentionOutParams& params, int32_t grid, uintptr_t stream);

// Blocks of the instance for so many rows that the current device holds at once, with so much shared memory.
int32_t attention_out_max_blocks(int32_t rows, int32_t shared_bytes);

// What both the CUDA launcher and the emulation refuse: throws std::invalid_argument.
void check_attention_out(const abi::AttentionOutParams& params, int32_t grid);

}  // namespace sgl_lowlatency::launch
