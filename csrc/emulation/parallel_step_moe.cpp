// Instantiates tensor-parallel decode_step of MoE layers for the host dialect: up to 128 experts, as on CUDA.
#include <stdexcept>

#include "emulation/parallel_step.hpp"
#include "kernels/nvidia/decode_step/decode_step.hpp"

namespace sgl_lowlatency::emulation {
namespace {

template <int32_t kHeadDim, bool kIsVerify>
void run_rows(const abi::ParallelStepParams& p) {
  p.rows <= 8 ? kernels::decode_step_body<1, kHeadDim, 2, kIsVerify, abi::kServedExpertWords>(p)
              : kernels::decode_step_body<2, kHeadDim, 2, kIsVerify, abi::kServedExpertWords>(p);
}

template <int32_t kHeadDim>
void run_head_dim(const abi::ParallelStepParams& p) {
  p.rows_per_request > 1 ? run_rows<kHeadDim, true>(p) : run_rows<kHeadDim, false>(p);
}

}  // namespace

void run_parallel_moe_body(const abi::ParallelStepParams& params) {
  params.geometry.head_dim == 64 ? run_head_dim<64>(params) : run_head_dim<128>(params);
}

}  // namespace sgl_lowlatency::emulation
