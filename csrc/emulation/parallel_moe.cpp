// Instantiates tensor-parallel fused_moe for the host dialect.
#include "emulation/parallel_moe.hpp"

#include "kernels/nvidia/fused_moe/fused_moe.hpp"
#include "launch/parallel_moe.hpp"

namespace sgl_lowlatency::emulation {

Report parallel_moe(const std::vector<MoeStream>& streams, const Options& options) {
  std::vector<Rank> ranks;
  for (const MoeStream& stream : streams) {
    ranks.push_back({{}, stream.slowness});
    std::vector<Kernel>& kernels = ranks.back().kernels;
    if (!stream.launches.empty()) kernels.push_back({1, 32, 0, [] {}});
    for (const abi::ParallelMoeParams& launch : stream.launches) {
      launch::check_parallel_moe(launch, stream.grid);
      const size_t shared_bytes = static_cast<size_t>(launch.shared.total_bytes);
      kernels.push_back({stream.grid, abi::kMoeThreads, shared_bytes, [&launch] { kernels::fused_moe_body(launch); }});
    }
  }
  return launch_ranks(ranks, options);
}

}  // namespace sgl_lowlatency::emulation
