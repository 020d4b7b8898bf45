// Instantiates draft_sampler for the host dialect.
#include "emulation/draft_sampler.hpp"

#include "kernels/nvidia/draft_sampler/draft_sampler.hpp"
#include "launch/draft_sampler.hpp"

namespace sgl_lowlatency::emulation {

Report draft_sampler(const abi::DraftSamplerParams& params, int32_t grid, const Options& options) {
  launch::check_draft_sampler(params, grid);
  return launch(grid, abi::kNumThreads, static_cast<size_t>(params.shared.total_bytes), [&] {
    launch::with_draft_instance(params, [&](auto num_tiles, auto batch_tiles, auto at_once) {
      kernels::draft_sampler_body<decltype(num_tiles)::value, decltype(batch_tiles)::value, decltype(at_once)::value>(params);
    });
  }, options);
}

}  // namespace sgl_lowlatency::emulation
