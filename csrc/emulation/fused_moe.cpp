// Instantiates fused_moe for the host dialect.
#include "emulation/fused_moe.hpp"

#include "kernels/nvidia/fused_moe/fused_moe.hpp"
#include "launch/fused_moe.hpp"

namespace sgl_lowlatency::emulation {

Report fused_moe(const abi::FusedMoeParams& params, int32_t grid, const Options& options) {
  launch::check_fused_moe(params, grid);
  const Kernel in_front{1, 32, 0, [] {}};
  const Kernel own{grid, abi::kMoeThreads, static_cast<size_t>(params.shared.total_bytes), [&] { kernels::fused_moe_body(params); }};
  return launch_ranks({Rank{{in_front, own}}}, options);
}

}  // namespace sgl_lowlatency::emulation
