// Instantiates tensor-parallel decode_step for the host dialect.
#include "emulation/parallel_step.hpp"

#include "kernels/nvidia/decode_step/decode_step.hpp"
#include "launch/parallel_step.hpp"

namespace sgl_lowlatency::emulation {
namespace {

template <int32_t kHeadDim, int32_t kElementBytes, bool kIsVerify>
void run_rows(const abi::ParallelStepParams& p) {
  if (p.rows <= 8) return kernels::decode_step_body<1, kHeadDim, kElementBytes, kIsVerify>(p);
  kernels::decode_step_body<2, kHeadDim, kElementBytes, kIsVerify>(p);
}

template <int32_t kHeadDim>
void run_body(const abi::ParallelStepParams& p) {
  const bool is_verify = p.rows_per_request > 1;
  if (p.weights == abi::kWeightsBf16) return is_verify ? run_rows<kHeadDim, 2, true>(p) : run_rows<kHeadDim, 2, false>(p);
  is_verify ? run_rows<kHeadDim, 1, true>(p) : run_rows<kHeadDim, 1, false>(p);
}

Kernel kernel_of(const abi::ParallelStepParams& p, int32_t grid) {
  launch::check_parallel_step(p, grid);
  return {grid, abi::kNumThreads, static_cast<size_t>(p.shared.total_bytes), [&p] {
            dialect::await_previous_launch();  // launched without an early begin: the stream's order is the launcher's
            if (p.geometry.num_experts > 0) return run_parallel_moe_body(p);
            p.geometry.head_dim == 64 ? run_body<64>(p) : run_body<128>(p);
          }};
}

}  // namespace

Report parallel_step(const std::vector<StepStream<abi::ParallelStepParams>>& streams, const Options& options) {
  std::vector<Rank> ranks;
  for (const StepStream<abi::ParallelStepParams>& stream : streams) {
    ranks.push_back({{}, stream.slowness});
    for (const abi::ParallelStepParams& launch : stream.launches) ranks.back().kernels.push_back(kernel_of(launch, stream.grid));
  }
  return launch_ranks(ranks, options);
}

}  // namespace sgl_lowlatency::emulation
