// CUDA side of launch/decode_step.hpp.
#include "launch/decode_step.hpp"

#include <cuda_runtime.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/nvidia/decode_step/decode_step.cuh"
#include "launch/decode_step_kernel.hpp"

namespace sgl_lowlatency::launch {
namespace {

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("decode_step: ") + call + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

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
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  if (major == 9) return;
  throw std::invalid_argument("decode_step: FP8 weights and MoE layers have kernels for sm_90 alone, this GPU is of compute capability " +
                              std::to_string(major) + ".x");
}

namespace {

// The kernel with its shared-memory limit raised, and the bytes it needs.
DecodeStepKernel prepare(const abi::DecodeStepParams& p, int32_t& shared_bytes) {
  shared_bytes = p.shared.total_bytes;
  require_hopper(p);
  const DecodeStepKernel kernel = select_kernel(p);
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        "cudaFuncSetAttribute(shared memory)");
  return kernel;
}

}  // namespace

void decode_step_cuda(const abi::DecodeStepParams& params, int32_t grid, uintptr_t stream) {
  check_decode_step(params, grid);
  int32_t shared_bytes = 0;
  const DecodeStepKernel kernel = prepare(params, shared_bytes);
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;  // the launch fails rather than hangs when the blocks do not fit at once
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(abi::kNumThreads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  config.attrs = &cooperative;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, params), "cudaLaunchKernelEx");
}

int32_t decode_step_max_blocks(const abi::DecodeStepParams& params) {
  int32_t shared_bytes = 0, per_sm = 0, device = 0, num_sms = 0;
  const DecodeStepKernel kernel = prepare(params, shared_bytes);
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, reinterpret_cast<const void*>(kernel), abi::kNumThreads,
                                                      static_cast<size_t>(shared_bytes)),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return per_sm * num_sms;
}

uintptr_t allocate_host_visible(size_t bytes) {
  void* pointer = nullptr;
  check(cudaHostAlloc(&pointer, bytes, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
  std::memset(pointer, 0, bytes);
  return reinterpret_cast<uintptr_t>(pointer);
}

void free_host_visible(uintptr_t pointer) { check(cudaFreeHost(reinterpret_cast<void*>(pointer)), "cudaFreeHost"); }

}  // namespace sgl_lowlatency::launch
