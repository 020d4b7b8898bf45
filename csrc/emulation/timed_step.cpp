// Instantiates a timed tensor-parallel decode_step for the host dialect.
#include "emulation/parallel_step.hpp"
#include "kernels/nvidia/decode_step/decode_step.hpp"
#include "launch/timed_step.hpp"

namespace sgl_lowlatency::emulation {
namespace {

Kernel kernel_of(const abi::TimedStepParams& p, int32_t grid) {
  launch::check_timed_step(p, grid);
  return {grid, abi::kNumThreads, static_cast<size_t>(p.shared.total_bytes), [&p] {
            dialect::await_previous_launch();  // launched without an early begin: the stream's order is the launcher's
            p.geometry.head_dim == 64 ? kernels::decode_step_body<1, 64, 2, false>(p) : kernels::decode_step_body<1, 128, 2, false>(p);
          }};
}

}  // namespace

Report parallel_step(const std::vector<StepStream<abi::TimedStepParams>>& streams, const Options& options) {
  std::vector<Rank> ranks;
  for (const StepStream<abi::TimedStepParams>& stream : streams) {
    ranks.push_back({{}, stream.slowness});
    for (const abi::TimedStepParams& launch : stream.launches) ranks.back().kernels.push_back(kernel_of(launch, stream.grid));
  }
  return launch_ranks(ranks, options);
}

}  // namespace sgl_lowlatency::emulation
