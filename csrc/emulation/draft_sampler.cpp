// Instantiates draft_sampler for the host dialect.
#include "emulation/draft_sampler.hpp"

#include "kernels/nvidia/draft_sampler/draft_sampler.hpp"
#include "launch/draft_sampler.hpp"

namespace sgl_lowlatency::emulation {

Report draft_sampler(const abi::DraftSamplerParams& params, int32_t grid, const Options& options) {
  launch::check_draft_sampler(params, grid);
  return launch(grid, abi::kDraftThreads, static_cast<size_t>(params.shared.total_bytes), [&] {
    launch::with_draft_instance(params, [&](auto num_tiles, auto batch_tiles, auto at_once) {
      constexpr int32_t kNTiles = decltype(num_tiles)::value, kBatchTiles = decltype(batch_tiles)::value, kAtOnce = decltype(at_once)::value;
      if (params.timeline != nullptr) {
        kernels::draft_sampler_body<kNTiles, kBatchTiles, kAtOnce, stages::DraftClock>(params);
      } else {
        kernels::draft_sampler_body<kNTiles, kBatchTiles, kAtOnce, stages::NoDraftClock>(params);
      }
    });
  }, options);
}

}  // namespace sgl_lowlatency::emulation
