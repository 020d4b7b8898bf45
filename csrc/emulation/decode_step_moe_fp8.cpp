// Instantiates decode_step of MoE layers with FP8 weights for the host dialect: what CUDA has, and no more.
#include <stdexcept>
#include <string>

#include "emulation/decode_step.hpp"

#include "kernels/nvidia/decode_step/decode_step.hpp"

namespace sgl_lowlatency::emulation {
namespace {

constexpr int32_t kHeadDim = 128, kMaxMoeRows = 16;

template <bool kIsVerify>
void run_rows(const abi::DecodeStepParams& p) {
  if (p.rows <= 8) return kernels::decode_step_body<1, kHeadDim, 1, kIsVerify, abi::kServedExpertWords>(p);
  kernels::decode_step_body<2, kHeadDim, 1, kIsVerify, abi::kServedExpertWords>(p);
}

}  // namespace

void check_moe_fp8(const abi::DecodeStepParams& p) {
  const auto require = [](bool is_met, const std::string& what) {
    if (!is_met) throw std::invalid_argument("decode_step: of MoE layers in FP8, " + what);
  };
  require(p.geometry.head_dim == kHeadDim, "head_dim " + std::to_string(p.geometry.head_dim) + " is not 128");
  require(p.rows <= kMaxMoeRows, "rows " + std::to_string(p.rows) + " is above 16");
  require(p.geometry.num_experts <= 32 * abi::kServedExpertWords, "num_experts " + std::to_string(p.geometry.num_experts) + " is above 128");
}

void run_moe_fp8_body(const abi::DecodeStepParams& params) { params.rows_per_request > 1 ? run_rows<true>(params) : run_rows<false>(params); }

}  // namespace sgl_lowlatency::emulation
