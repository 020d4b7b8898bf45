// Parameter checks of k1 and k2, shared by the HIP launcher and the emulation.
#pragma once
#include "sgl_lowlatency/abi/monokernel.hpp"

namespace sgl_lowlatency::launch {

// Throw std::invalid_argument, naming what does not fit.
void check_k1(const abi::K1Params& params);
void check_k2(const abi::K2Params& params);

}  // namespace sgl_lowlatency::launch
