// Instantiates decode_step of MoE layers for the host dialect.
#include "emulation/decode_step.hpp"

#include "kernels/nvidia/decode_step/decode_step.hpp"

namespace sgl_lowlatency::emulation {
namespace {

template <int32_t kHeadDim, bool kIsVerify, int32_t kExpertWords>
void run_rows(const abi::DecodeStepParams& p) {
  if (p.rows <= 8) return kernels::decode_step_body<1, kHeadDim, 2, kIsVerify, kExpertWords>(p);
  if (p.rows <= 16) return kernels::decode_step_body<2, kHeadDim, 2, kIsVerify, kExpertWords>(p);
  kernels::decode_step_body<4, kHeadDim, 2, kIsVerify, kExpertWords>(p);
}

template <int32_t kHeadDim>
void run_head_dim(const abi::DecodeStepParams& p) {
  const bool is_verify = p.rows_per_request > 1;
  if (p.geometry.num_experts <= 32 * abi::kServedExpertWords) {
    return is_verify ? run_rows<kHeadDim, true, abi::kServedExpertWords>(p) : run_rows<kHeadDim, false, abi::kServedExpertWords>(p);
  }
  is_verify ? run_rows<kHeadDim, true, abi::kExpertWords>(p) : run_rows<kHeadDim, false, abi::kExpertWords>(p);
}

}  // namespace

void run_moe_body(const abi::DecodeStepParams& params) {
  if (params.weights != abi::kWeightsBf16) return run_moe_fp8_body(params);
  params.geometry.head_dim == 64 ? run_head_dim<64>(params) : run_head_dim<128>(params);
}

}  // namespace sgl_lowlatency::emulation
