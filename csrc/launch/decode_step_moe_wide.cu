// CUDA instances of decode_step with MoE layers in bf16 beyond those of decode_step_moe.cu: heads of 64, or more than 128 experts.
#include "kernels/nvidia/decode_step/decode_step.cuh"
#include "launch/decode_step_kernel.hpp"

namespace sgl_lowlatency::launch {
namespace {

template <int32_t kHeadDim, bool kIsVerify, int32_t kExpertWords>
DecodeStepKernel select_tiles(const abi::DecodeStepParams& p) {
  return p.rows <= 8 ? kernels::decode_step<1, kHeadDim, 2, kIsVerify, kExpertWords> : kernels::decode_step<2, kHeadDim, 2, kIsVerify, kExpertWords>;
}

template <int32_t kHeadDim, int32_t kExpertWords>
DecodeStepKernel select_mode(const abi::DecodeStepParams& p) {
  return p.rows_per_request > 1 ? select_tiles<kHeadDim, true, kExpertWords>(p) : select_tiles<kHeadDim, false, kExpertWords>(p);
}

}  // namespace

DecodeStepKernel select_wide_moe_kernel(const abi::DecodeStepParams& p) {
  const bool is_served = p.geometry.num_experts <= 32 * abi::kServedExpertWords;
  if (p.geometry.head_dim == 64) return is_served ? select_mode<64, abi::kServedExpertWords>(p) : select_mode<64, abi::kExpertWords>(p);
  return select_mode<128, abi::kExpertWords>(p);
}

}  // namespace sgl_lowlatency::launch
