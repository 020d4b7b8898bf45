// The instance of draft_sampler for a launch's parameters.
#pragma once
#include "kernels/nvidia/draft_sampler/draft_sampler.cuh"
#include "launch/draft_sampler.hpp"

namespace sgl_lowlatency::launch {

using DraftKernel = void (*)(abi::DraftSamplerParams);

template <class Clock>
DraftKernel draft_kernel(const abi::DraftSamplerParams& p) {
  return with_draft_instance(p, [](auto num_tiles, auto batch_tiles, auto at_once) -> DraftKernel {
    return kernels::draft_sampler<decltype(num_tiles)::value, decltype(batch_tiles)::value, decltype(at_once)::value, Clock>;
  });
}

// Of instances that are timed, compiled in a file of their own.
DraftKernel timed_draft_kernel(const abi::DraftSamplerParams& p);

}  // namespace sgl_lowlatency::launch
