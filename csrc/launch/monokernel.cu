// k1 and k2 on CUDA, in waves of two warps: to run AMD's stages on hardware that is there, not to be served.
#define SGL_LOWLATENCY_WAVES
#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels/amd/k1/k1.hpp"
#include "kernels/amd/k2/k2.hpp"
#include "launch/monokernel.hpp"

namespace sgl_lowlatency::launch {
namespace {

__global__ void __launch_bounds__(abi::kMonoThreads, 1) k1(const __grid_constant__ abi::K1Params p) { kernels::k1_body<dialect::kIsa>(p); }
__global__ void __launch_bounds__(abi::kMonoThreads, 1) k2(const __grid_constant__ abi::K2Params p) { kernels::k2_body<dialect::kIsa>(p); }

void require_success(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string("monokernel: ") + what + ": " + cudaGetErrorString(status));
}

template <class Params>
void launch_one(void (*kernel)(Params), const Params& params, uintptr_t stream) {
  if (params.launch.isa != dialect::kIsa) throw std::invalid_argument("monokernel: on CUDA the shared memory is laid out as of gfx950");
  require_success(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dialect::kWaveSharedBytes), "shared memory");
  kernel<<<params.launch.grid, abi::kMonoThreads, dialect::kWaveSharedBytes, reinterpret_cast<cudaStream_t>(stream)>>>(params);
  require_success(cudaGetLastError(), "launch");
}

template <class Params>
int32_t blocks_of(void (*kernel)(Params)) {
  int32_t device = 0, units = 0, blocks = 0;
  require_success(cudaGetDevice(&device), "device");
  require_success(cudaDeviceGetAttribute(&units, cudaDevAttrMultiProcessorCount, device), "device");
  require_success(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dialect::kWaveSharedBytes), "shared memory");
  require_success(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, abi::kMonoThreads, dialect::kWaveSharedBytes), "occupancy");
  return units * blocks;
}

}  // namespace

void k1_cuda(const abi::K1Params& params, uintptr_t stream) {
  check_k1(params);
  launch_one(k1, params, stream);
}
void k2_cuda(const abi::K2Params& params, uintptr_t stream) {
  check_k2(params);
  launch_one(k2, params, stream);
}
int32_t monokernel_max_blocks() { return std::min(blocks_of(k1), blocks_of(k2)); }

}  // namespace sgl_lowlatency::launch
