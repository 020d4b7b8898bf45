// Instantiates decode_step for the host dialect.
#include "emulation/decode_step.hpp"

#include "kernels/nvidia/decode_step/decode_step.hpp"
#include "launch/decode_step.hpp"

namespace sgl_lowlatency::emulation {

Report decode_step(const abi::DecodeStepParams& params, int32_t grid, const Options& options) {
  launch::check_decode_step(params, grid);
  const size_t shared_bytes = static_cast<size_t>(params.shared.total_bytes);
  return launch(grid, abi::kNumThreads, shared_bytes, [&] {
    const bool is_narrow = params.rows <= 8;
    if (params.geometry.head_dim == 64) {
      is_narrow ? kernels::decode_step_body<1, 64>(params) : kernels::decode_step_body<2, 64>(params);
    } else {
      is_narrow ? kernels::decode_step_body<1, 128>(params) : kernels::decode_step_body<2, 128>(params);
    }
  }, options);
}

}  // namespace sgl_lowlatency::emulation
