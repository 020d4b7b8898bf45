// k1 and k2 on CUDA, in waves of two warps: to run AMD's stages on hardware that is there, not to be served.
#define SGL_WAVES
#include <algorithm>
#include <stdexcept>

#include "kernels/amd/k1/k1.hpp"
#include "kernels/amd/k2/k2.hpp"
#include "launch/cuda_launch.cuh"
#include "launch/monokernel.hpp"

namespace sgl_lowlatency::launch {
namespace {

__global__ void __launch_bounds__(abi::kMonoThreads, 1) k1(const __grid_constant__ abi::K1Params p) { kernels::k1_body<dialect::kIsa>(p); }
__global__ void __launch_bounds__(abi::kMonoThreads, 1) k2(const __grid_constant__ abi::K2Params p) { kernels::k2_body<dialect::kIsa>(p); }

constexpr char kName[] = "monokernel";

template <class Params>
void launch_one(void (*kernel)(Params), const Params& params, uintptr_t stream) {
  if (params.launch.isa != dialect::kIsa) throw std::invalid_argument("monokernel: on CUDA the shared memory is laid out as of gfx950");
  const LaunchShape shape{dim3(static_cast<unsigned>(params.launch.grid)), abi::kMonoThreads, dialect::kWaveSharedBytes};
  launch_cooperative(kName, kernel, params, shape, stream);
}

template <class Params>
int32_t blocks_of(void (*kernel)(Params)) {
  return resident_blocks(kName, reinterpret_cast<const void*>(kernel), abi::kMonoThreads, dialect::kWaveSharedBytes);
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
