// bitmap_routing on the host dialect: the same source as the GPU's, run by the emulation's scheduler.
#pragma once
#include "emulation/emulation.hpp"
#include "sgl_lowlatency/abi/bitmap_routing.hpp"

namespace sgl_lowlatency::emulation {

// Same parameters as launch::bitmap_routing_cuda, with host pointers. Throws std::invalid_argument as check_bitmap_routing does.
Report bitmap_routing(const abi::BitmapRoutingParams& params, const Options& options);

}  // namespace sgl_lowlatency::emulation
