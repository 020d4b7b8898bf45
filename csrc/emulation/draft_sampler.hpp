// draft_sampler on the host dialect: the same source as the GPU's, run by the emulation's scheduler.
#pragma once
#include "emulation/emulation.hpp"
#include "sgl_lowlatency/abi/draft_sampler.hpp"

namespace sgl_lowlatency::emulation {

// Same parameters as launch::draft_sampler_cuda, with host pointers. Throws std::invalid_argument as check_draft_sampler does.
Report draft_sampler(const abi::DraftSamplerParams& params, int32_t grid, const Options& options);

}  // namespace sgl_lowlatency::emulation
