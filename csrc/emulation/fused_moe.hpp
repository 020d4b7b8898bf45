// fused_moe on the host.
#pragma once
#include "emulation/emulation.hpp"
#include "sgl_lowlatency/abi/fused_moe.hpp"

namespace sgl_lowlatency::emulation {

// Runs fused_moe with host pointers, behind an empty kernel: what it touches before await_previous_launch is misuse. Throws std::invalid_argument for
// parameters that check_fused_moe refuses.
Report fused_moe(const abi::FusedMoeParams& params, int32_t grid, const Options& options);

}  // namespace sgl_lowlatency::emulation
