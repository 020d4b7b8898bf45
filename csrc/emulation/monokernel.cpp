// Instantiates k1 and k2 for the host dialect, of both parts.
#include "emulation/monokernel.hpp"

#include "kernels/amd/k1/k1.hpp"
#include "kernels/amd/k2/k2.hpp"
#include "launch/monokernel.hpp"

namespace sgl_lowlatency::emulation {
namespace {

template <abi::Isa kIsa>
void run(const abi::K1Params& p) { kernels::k1_body<kIsa>(p); }
template <abi::Isa kIsa>
void run(const abi::K2Params& p) { kernels::k2_body<kIsa>(p); }

void check(const abi::K1Params& p) { launch::check_k1(p); }
void check(const abi::K2Params& p) { launch::check_k2(p); }

template <class Params>
Kernel kernel_of(const Params& p) {
  check(p);
  const size_t shared_bytes = static_cast<size_t>(abi::lds_bytes(p.launch.isa));
  return {p.launch.grid, abi::kMonoThreads, shared_bytes, [&p] { p.launch.isa == abi::kGfx950 ? run<abi::kGfx950>(p) : run<abi::kGfx942>(p); }};
}

}  // namespace

Report monokernel(const std::vector<MonoStream>& streams, Options options) {
  options.warp_size = abi::kWaveSize;
  std::vector<Rank> ranks;
  for (const MonoStream& stream : streams) {
    ranks.push_back({{}, stream.slowness});
    for (const MonoStep& step : stream.launches) {
      ranks.back().kernels.push_back(std::visit([](const auto& p) { return kernel_of(p); }, step));
    }
  }
  return launch_ranks(ranks, options);
}

}  // namespace sgl_lowlatency::emulation
