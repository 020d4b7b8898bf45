// Instantiates epilogue_multicast for the host dialect.
#include "emulation/epilogue_multicast.hpp"

#include "kernels/nvidia/epilogue_multicast/epilogue_multicast.hpp"
#include "launch/epilogue_multicast.hpp"

namespace sgl_lowlatency::emulation {
namespace {

void run_reduction(const abi::EpilogueMulticastParams& p) {
  if (p.at.num_ranks <= 2) return kernels::reduce_tiles_body<2>(p);
  p.at.num_ranks <= 4 ? kernels::reduce_tiles_body<4>(p) : kernels::reduce_tiles_body<8>(p);
}

void add_kernels(std::vector<Kernel>& stream, const abi::EpilogueMulticastParams& p) {
  launch::check_epilogue_multicast(p);
  const size_t shared_bytes = static_cast<size_t>(p.product.shared.total_bytes);
  stream.push_back({p.ranks_in_launch * p.blocks_per_rank, abi::kNumThreads, shared_bytes, [&p] {
                       p.product.rows <= 8 ? kernels::push_tiles_body<1>(p) : kernels::push_tiles_body<2>(p);
                     }});
  const int32_t threads = abi::reduce_threads(p.at.hidden);
  stream.push_back({p.ranks_in_launch * p.product.rows, threads, static_cast<size_t>(threads / 32 * 4), [&p] { run_reduction(p); }});
}

}  // namespace

Report epilogue_multicast(const std::vector<EpilogueStream>& streams, const Options& options) {
  std::vector<Rank> ranks;
  for (const EpilogueStream& stream : streams) {
    ranks.push_back({{}, stream.slowness});
    for (const abi::EpilogueMulticastParams& launch : stream.launches) add_kernels(ranks.back().kernels, launch);
  }
  return launch_ranks(ranks, options);
}

}  // namespace sgl_lowlatency::emulation
