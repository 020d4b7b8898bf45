// Instantiates attention_in for the host dialect.
#include "emulation/attention_in.hpp"

#include "kernels/nvidia/attention_in/attention_in.hpp"
#include "launch/attention_in.hpp"

namespace sgl_lowlatency::emulation {

Report attention_in(const abi::AttentionInParams& params, int32_t grid, const Options& options) {
  launch::check_attention_in(params, grid);
  return launch::with_slice_instance(params.rows, [&](auto n_tiles) {
    const Kernel in_front{1, 32, 0, [] {}};
    const Kernel own{grid, abi::kAttnInThreads, static_cast<size_t>(params.shared.total_bytes),
                     [&] { kernels::attention_in_body<decltype(n_tiles)::value>(params); }};
    return launch_ranks({Rank{{in_front, own}}}, options);
  });
}

}  // namespace sgl_lowlatency::emulation
