// attention_in on the host.
#pragma once
#include "emulation/emulation.hpp"
#include "sgl_lowlatency/abi/attention_in.hpp"

namespace sgl_lowlatency::emulation {

// Runs attention_in with host pointers, behind an empty kernel: what it touches before await_previous_launch is misuse. Throws std::invalid_argument
// for parameters that check_attention_in refuses.
Report attention_in(const abi::AttentionInParams& params, int32_t grid, const Options& options);

}  // namespace sgl_lowlatency::emulation
