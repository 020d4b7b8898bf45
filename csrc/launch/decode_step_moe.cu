// CUDA instances of decode_step with MoE layers: up to 16 rows, here of heads of 128 and up to 128 experts. Others: decode_step_moe_wide.cu.
#include <stdexcept>
#include <string>

#include "kernels/nvidia/decode_step/decode_step.cuh"
#include "launch/decode_step_kernel.hpp"

namespace sgl_lowlatency::launch {
namespace {

constexpr int32_t kHeadDim = 128, kMaxMoeRows = 16, kMaxMoeExperts = 32 * abi::kServedExpertWords;

void require(bool is_met, const char* name, int32_t value, const std::string& wanted, bool is_fp8 = false) {
  if (is_met) return;
  const std::string whose = is_fp8 ? " of MoE layers in FP8 is not " : " of MoE layers is not ";
  throw std::invalid_argument(std::string("decode_step: ") + name + " " + std::to_string(value) + whose + wanted + " on CUDA");
}

template <int32_t kElementBytes, bool kIsVerify>
DecodeStepKernel select_tiles(const abi::DecodeStepParams& p) {
  return p.rows <= 8 ? kernels::decode_step<1, kHeadDim, kElementBytes, kIsVerify, abi::kServedExpertWords>
                     : kernels::decode_step<2, kHeadDim, kElementBytes, kIsVerify, abi::kServedExpertWords>;
}

template <int32_t kElementBytes>
DecodeStepKernel select_mode(const abi::DecodeStepParams& p) {
  return p.rows_per_request > 1 ? select_tiles<kElementBytes, true>(p) : select_tiles<kElementBytes, false>(p);
}

}  // namespace

DecodeStepKernel select_moe_kernel(const abi::DecodeStepParams& p) {
  require(p.rows <= kMaxMoeRows, "rows", p.rows, "1.." + std::to_string(kMaxMoeRows));
  const bool is_here = p.geometry.head_dim == kHeadDim && p.geometry.num_experts <= kMaxMoeExperts;
  if (p.weights == abi::kWeightsBf16) return is_here ? select_mode<2>(p) : select_wide_moe_kernel(p);
  require(p.geometry.head_dim == kHeadDim, "head_dim", p.geometry.head_dim, std::to_string(kHeadDim), true);
  require(p.geometry.num_experts <= kMaxMoeExperts, "num_experts", p.geometry.num_experts, "up to " + std::to_string(kMaxMoeExperts), true);
  return select_mode<1>(p);
}

}  // namespace sgl_lowlatency::launch
