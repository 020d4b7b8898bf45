// Host entry of bitmap_routing on CUDA: checks and the launch. No device code here.
#pragma once
#include <cstdint>

#include "sgl_lowlatency/abi/bitmap_routing.hpp"

namespace sgl_lowlatency::launch {

// Launches one block on `stream` (a cudaStream_t as an integer), which may begin before the launch in front of it is over and waits
// for that by itself. Capturable in a CUDA graph. Throws std::invalid_argument naming the parameter, or std::runtime_error with the
// CUDA error's name and text.
void bitmap_routing_cuda(const abi::BitmapRoutingParams& params, uintptr_t stream);

// What both the CUDA launcher and the emulation refuse: throws std::invalid_argument.
void check_bitmap_routing(const abi::BitmapRoutingParams& params);

}  // namespace sgl_lowlatency::launch
