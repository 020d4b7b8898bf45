// attention_out on the host.
#pragma once
#include "emulation/emulation.hpp"
#include "sgl_lowlatency/abi/attention_out.hpp"

namespace sgl_lowlatency::emulation {

// Runs attention_out with host pointers, behind an empty kernel: what it touches before await_previous_launch is misuse. Throws std::invalid_argument
// for parameters that check_attention_out refuses.
Report attention_out(const abi::AttentionOutParams& params, int32_t grid, const Options& options);

}  // namespace sgl_lowlatency::emulation
