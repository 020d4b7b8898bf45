// Instantiates tensor-parallel attention_out for the host dialect.
#include "emulation/parallel_attention_out.hpp"

#include "kernels/nvidia/attention_out/attention_out.hpp"
#include "launch/parallel_attention_out.hpp"

namespace sgl_lowlatency::emulation {
namespace {

Kernel kernel_of(const abi::ParallelAttentionOutParams& p, int32_t grid) {
  launch::check_parallel_attention_out(p, grid);
  return launch::with_slice_instance(p.rows, [&](auto n_tiles) -> Kernel {
    return {grid, abi::kAttnOutThreads, static_cast<size_t>(p.shared.total_bytes),
            [&p] { kernels::attention_out_body<decltype(n_tiles)::value>(p); }};
  });
}

}  // namespace

Report parallel_attention_out(const std::vector<StepStream<abi::ParallelAttentionOutParams>>& streams, const Options& options) {
  std::vector<Rank> ranks;
  for (const StepStream<abi::ParallelAttentionOutParams>& stream : streams) {
    ranks.push_back({{}, stream.slowness});
    if (!stream.launches.empty()) ranks.back().kernels.push_back({1, 32, 0, [] {}});
    for (const abi::ParallelAttentionOutParams& launch : stream.launches) ranks.back().kernels.push_back(kernel_of(launch, stream.grid));
  }
  return launch_ranks(ranks, options);
}

}  // namespace sgl_lowlatency::emulation
