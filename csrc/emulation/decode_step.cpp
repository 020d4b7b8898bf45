// Instantiates decode_step for the host dialect.
#include "emulation/decode_step.hpp"

#include "kernels/nvidia/decode_step/decode_step.hpp"
#include "launch/decode_step.hpp"

namespace sgl_lowlatency::emulation {
namespace {

template <int32_t kHeadDim, int32_t kElementBytes, bool kIsVerify>
void run_rows(const abi::DecodeStepParams& p) {
  if (p.rows <= 8) return kernels::decode_step_body<1, kHeadDim, kElementBytes, kIsVerify>(p);
  p.rows <= 16 ? kernels::decode_step_body<2, kHeadDim, kElementBytes, kIsVerify>(p) : kernels::decode_step_body<4, kHeadDim, kElementBytes, kIsVerify>(p);
}

template <int32_t kHeadDim>
void run_body(const abi::DecodeStepParams& p) {
  const bool is_verify = p.rows_per_request > 1;
  if (p.weights == abi::kWeightsBf16) return is_verify ? run_rows<kHeadDim, 2, true>(p) : run_rows<kHeadDim, 2, false>(p);
  is_verify ? run_rows<kHeadDim, 1, true>(p) : run_rows<kHeadDim, 1, false>(p);
}

}  // namespace

Report decode_step(const abi::DecodeStepParams& params, int32_t grid, const Options& options) {
  launch::check_decode_step(params, grid);
  if (params.geometry.num_experts > 0 && params.weights != abi::kWeightsBf16) check_moe_fp8(params);
  const size_t shared_bytes = static_cast<size_t>(params.shared.total_bytes);
  return launch(grid, abi::kNumThreads, shared_bytes, [&] {
    if (params.geometry.num_experts > 0) return run_moe_body(params);
    params.geometry.head_dim == 64 ? run_body<64>(params) : run_body<128>(params);
  }, options);
}

}  // namespace sgl_lowlatency::emulation
