// CUDA side of launch/read_bytes.hpp.
#include "launch/read_bytes.hpp"

#include <stdexcept>
#include <string>

#include "launch/cuda_launch.cuh"

namespace sgl_lowlatency::launch {
namespace {

constexpr int kThreads = 512, kBlocksPerSm = 2, kLoads = 4;  // loads under way in a thread

// One launch reads all of x: a grid of two blocks an SM, kLoads independent streaming loads a thread.
__global__ void __launch_bounds__(kThreads) read_bytes(const uint4* x, size_t num_vecs, uint32_t* out) {
  const size_t stride = static_cast<size_t>(gridDim.x) * kThreads;
  uint32_t found = 0;
  size_t i = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (; i + (kLoads - 1) * stride < num_vecs; i += kLoads * stride) {
    uint4 v[kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u) v[u] = __ldcs(x + i + u * stride);
#pragma unroll
    for (int u = 0; u < kLoads; ++u) found ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  for (; i < num_vecs; i += stride) {
    const uint4 v = __ldcs(x + i);
    found ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  found = __reduce_xor_sync(0xffffffffu, found);
  if (threadIdx.x % 32 == 0) atomicXor(out, found);
}

constexpr char kName[] = "read_bytes";

}  // namespace

void read_bytes_cuda(uintptr_t begin, size_t bytes, uintptr_t out, uintptr_t stream) {
  if (begin % 16 != 0 || bytes % 16 != 0) throw std::invalid_argument("read_bytes: address or size is not a multiple of 16");
  int device = 0, num_sms = 0;
  check(kName, cudaGetDevice(&device), "cudaGetDevice");
  check(kName, cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  const auto cuda_stream = reinterpret_cast<cudaStream_t>(stream);
  check(kName, cudaMemsetAsync(reinterpret_cast<void*>(out), 0, sizeof(uint32_t), cuda_stream), "cudaMemsetAsync");
  read_bytes<<<static_cast<unsigned>(num_sms * kBlocksPerSm), kThreads, 0, cuda_stream>>>(reinterpret_cast<const uint4*>(begin), bytes / 16,
                                                                                         reinterpret_cast<uint32_t*>(out));
  check(kName, cudaGetLastError(), "launch");
}

}  // namespace sgl_lowlatency::launch
