// Host entry of fused_moe on CUDA: checks, shared-memory attribute, launch that may overlap its neighbours. No device code here.
#pragma once
#include <cstdint>

#include "sgl_lowlatency/abi/fused_moe.hpp"

namespace sgl_lowlatency::launch {

// Launches on `stream` (a cudaStream_t as an integer). Capturable in a CUDA graph. Throws std::invalid_argument naming the parameter, or
// std::runtime_error with the CUDA error's name and text.
void fused_moe_cuda(const abi::FusedMoeParams& params, int32_t grid, uintptr_t stream);

// Blocks of fused_moe that the current device holds at once, with so much shared memory.
int32_t fused_moe_max_blocks(int32_t shared_bytes);

// What both the CUDA launcher and the emulation refuse: throws std::invalid_argument.
void check_fused_moe(const abi::FusedMoeParams& params, int32_t grid);

}  // namespace sgl_lowlatency::launch
