// Instantiates decode_step for the host dialect.
#include "emulation/decode_step.hpp"

#include "kernels/nvidia/decode_step/decode_step.hpp"
#include "launch/decode_step.hpp"

namespace sgl_lowlatency::emulation {

namespace {

template <int32_t kHeadDim, bool kIsVerify>
void run_body(const abi::DecodeStepParams& p) {
  if (p.rows <= 8) return kernels::decode_step_body<1, kHeadDim, kIsVerify>(p);
  p.rows <= 16 ? kernels::decode_step_body<2, kHeadDim, kIsVerify>(p) : kernels::decode_step_body<4, kHeadDim, kIsVerify>(p);
}

}  // namespace

Report decode_step(const abi::DecodeStepParams& params, int32_t grid, const Options& options) {
  launch::check_decode_step(params, grid);
  const size_t shared_bytes = static_cast<size_t>(params.shared.total_bytes);
  return launch(grid, abi::kNumThreads, shared_bytes, [&] {
    const bool is_verify = params.rows_per_request > 1;
    if (params.geometry.head_dim == 64) {
      is_verify ? run_body<64, true>(params) : run_body<64, false>(params);
    } else {
      is_verify ? run_body<128, true>(params) : run_body<128, false>(params);
    }
  }, options);
}

}  // namespace sgl_lowlatency::emulation
