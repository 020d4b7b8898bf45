// CUDA side of launch/decode_step.hpp.
#include "launch/decode_step.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/nvidia/decode_step/decode_step.cuh"
#include "launch/cuda_launch.cuh"
#include "launch/decode_step_kernel.hpp"

namespace sgl_lowlatency::launch {
namespace {

constexpr char kName[] = "decode_step";

template <int32_t kHeadDim, int32_t kElementBytes, bool kIsVerify>
DecodeStepKernel select_tiles(const abi::DecodeStepParams& p) {
  if (p.rows <= 8) return kernels::decode_step<1, kHeadDim, kElementBytes, kIsVerify>;
  return p.rows <= 16 ? kernels::decode_step<2, kHeadDim, kElementBytes, kIsVerify> : kernels::decode_step<4, kHeadDim, kElementBytes, kIsVerify>;
}

template <int32_t kHeadDim>
DecodeStepKernel select_format(const abi::DecodeStepParams& p) {
  const bool is_verify = p.rows_per_request > 1;
  if (p.weights == abi::kWeightsBf16) return is_verify ? select_tiles<kHeadDim, 2, true>(p) : select_tiles<kHeadDim, 2, false>(p);
  return is_verify ? select_tiles<kHeadDim, 1, true>(p) : select_tiles<kHeadDim, 1, false>(p);
}

DecodeStepKernel select_kernel(const abi::DecodeStepParams& p) {
  if (p.geometry.num_experts > 0) return select_moe_kernel(p);
  return p.geometry.head_dim == 64 ? select_format<64>(p) : select_format<128>(p);
}

}  // namespace

void require_hopper(const abi::DecodeStepParams& p) {
  if (p.weights == abi::kWeightsBf16 && p.geometry.num_experts == 0) return;
  int32_t device = 0, major = 0;
  check(kName, cudaGetDevice(&device), "cudaGetDevice");
  check(kName, cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  if (major == 9) return;
  throw std::invalid_argument("decode_step: FP8 weights and MoE layers have kernels for sm_90 alone, this GPU is of compute capability " +
                              std::to_string(major) + ".x");
}

void decode_step_cuda(const abi::DecodeStepParams& params, int32_t grid, uintptr_t stream) {
  check_decode_step(params, grid);
  require_hopper(params);
  const LaunchShape shape{dim3(static_cast<unsigned>(grid)), abi::kNumThreads, params.shared.total_bytes};
  launch_cooperative(kName, select_kernel(params), params, shape, stream);
}

int32_t decode_step_max_blocks(const abi::DecodeStepParams& params) {
  require_hopper(params);
  return resident_blocks(kName, reinterpret_cast<const void*>(select_kernel(params)), abi::kNumThreads, params.shared.total_bytes);
}

uintptr_t allocate_host_visible(size_t bytes) {
  void* pointer = nullptr;
  check(kName, cudaHostAlloc(&pointer, bytes, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
  std::memset(pointer, 0, bytes);
  return reinterpret_cast<uintptr_t>(pointer);
}

void free_host_visible(uintptr_t pointer) { check(kName, cudaFreeHost(reinterpret_cast<void*>(pointer)), "cudaFreeHost"); }

}  // namespace sgl_lowlatency::launch
