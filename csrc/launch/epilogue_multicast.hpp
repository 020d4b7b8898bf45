// Host entry of epilogue_multicast on CUDA: checks and the launches. No device code here.
#pragma once
#include <cstdint>

#include "sgl_lowlatency/abi/epilogue_multicast.hpp"

namespace sgl_lowlatency::launch {

// Launches push_tiles and reduce_tiles on `stream` (a cudaStream_t as an integer). Both may begin before the launch in front is over, and wait
// for it by themselves. Capturable in a CUDA graph. Throws std::invalid_argument naming the parameter, or std::runtime_error with the
// CUDA error's name and text.
void epilogue_multicast_cuda(const abi::EpilogueMulticastParams& params, uintptr_t stream);

// What both the CUDA launcher and the emulation refuse: throws std::invalid_argument.
void check_epilogue_multicast(const abi::EpilogueMulticastParams& params);

}  // namespace sgl_lowlatency::launch
