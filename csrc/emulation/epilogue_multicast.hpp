// epilogue_multicast on the host dialect: the same source as the GPU's, run by the emulation's scheduler.
#pragma once
#include <vector>

#include "emulation/emulation.hpp"
#include "sgl_lowlatency/abi/epilogue_multicast.hpp"

namespace sgl_lowlatency::emulation {

// What one emulated GPU is given: its launches, one after the other, each of one rank or several virtual ones. No launches: it never comes.
struct EpilogueStream {
  std::vector<abi::EpilogueMulticastParams> launches;
  uint32_t slowness = 1;  // Rank::slowness
};

// Runs the streams at the same time. Parameters as of launch::epilogue_multicast_cuda, with host pointers; parameters' `multicast` is an address
// in options.multicasts. Throws std::invalid_argument as check_epilogue_multicast does.
Report epilogue_multicast(const std::vector<EpilogueStream>& streams, const Options& options);

}  // namespace sgl_lowlatency::emulation
