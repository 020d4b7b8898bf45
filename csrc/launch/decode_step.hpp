// Host entry of decode_step on CUDA: checks, shared-memory attribute, cooperative launch. No device code here.
#pragma once
#include <cstddef>
#include <cstdint>

#include "sgl_lowlatency/abi/decode_step.hpp"

namespace sgl_lowlatency::launch {

// Launches on `stream` (a cudaStream_t as an integer). grid: the plan's, which the tile table and partial_* were sized for.
// Capturable in a CUDA graph. Throws std::invalid_argument naming the parameter, or std::runtime_error with the CUDA error's name
// and text.
void decode_step_cuda(const abi::DecodeStepParams& params, int32_t grid, uintptr_t stream);

// Blocks of decode_step that the current device holds at once, for the params' rows and shared memory.
int32_t decode_step_max_blocks(const abi::DecodeStepParams& params);

// Host memory that the device reads and writes (zeroed), and its release.
uintptr_t allocate_host_visible(size_t bytes);
void free_host_visible(uintptr_t pointer);

// What both the CUDA launcher and the emulation refuse: throws std::invalid_argument.
void check_decode_step(const abi::DecodeStepParams& params, int32_t grid);

}  // namespace sgl_lowlatency::launch
