// Instances of draft_sampler that read the clock (stages/draft_timeline.hpp).
#include "launch/draft_sampler_kernel.cuh"

namespace sgl_lowlatency::launch {

DraftKernel timed_draft_kernel(const abi::DraftSamplerParams& p) { return draft_kernel<stages::DraftClock>(p); }

}  // namespace sgl_lowlatency::launch
