// k1 and k2 on the host dialect: the same source as the GPU's, run by the emulation's scheduler with waves of 64.
#pragma once
#include <variant>
#include <vector>

#include "emulation/emulation.hpp"
#include "sgl_lowlatency/abi/monokernel.hpp"

namespace sgl_lowlatency::emulation {

using MonoStep = std::variant<abi::K1Params, abi::K2Params>;

// One emulated GPU and its launches, in order.
struct MonoStream {
  std::vector<MonoStep> launches;
  uint32_t slowness = 1;
};

// Runs the streams of several ranks at the same time. Throws std::invalid_argument as check_k1 and check_k2 do.
Report monokernel(const std::vector<MonoStream>& streams, Options options);

}  // namespace sgl_lowlatency::emulation
