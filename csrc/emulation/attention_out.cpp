// Instantiates attention_out for the host dialect.
#include "emulation/attention_out.hpp"

#include "kernels/nvidia/attention_out/attention_out.hpp"
#include "launch/attention_out.hpp"

namespace sgl_lowlatency::emulation {

Report attention_out(const abi::AttentionOutParams& params, int32_t grid, const Options& options) {
  launch::check_attention_out(params, grid);
  return launch::with_slice_instance(params.rows, [&](auto n_tiles) {
    const Kernel in_front{1, 32, 0, [] {}};
    const Kernel own{grid, abi::kAttnOutThreads, static_cast<size_t>(params.shared.total_bytes),
                     [&] { kernels::attention_out_body<decltype(n_tiles)::value>(params); }};
    return launch_ranks({Rank{{in_front, own}}}, options);
  });
}

}  // namespace sgl_lowlatency::emulation
