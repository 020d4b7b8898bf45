// What the launchers of CUDA kernels share: errors by the kernel's name, the limit of dynamic shared memory, the two ways to launch, co-resident blocks.
// `name` is the kernel's, for errors; std::runtime_error names it, the call and CUDA's error.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace sgl_lowlatency::launch {

inline void check(const char* name, cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(name) + ": " + call + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

// Raises the kernel's limit of dynamic shared memory to `bytes` and never lowers it: a graph holds launches of several sizes and may be instantiated again.
inline void allow_shared(const char* name, const void* kernel, int32_t bytes) {
  cudaFuncAttributes now{};
  check(name, cudaFuncGetAttributes(&now, kernel), "cudaFuncGetAttributes");
  if (now.maxDynamicSharedSizeBytes >= bytes) return;
  check(name, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "cudaFuncSetAttribute(shared memory)");
}

// A launch's extents; shared_bytes of dynamic shared memory.
struct LaunchShape {
  dim3 grid;
  int32_t threads, shared_bytes;
};

template <class Params>
void launch_with(const char* name, void (*kernel)(Params), const Params& params, const LaunchShape& shape, cudaLaunchAttribute attribute,
                 uintptr_t stream) {
  allow_shared(name, reinterpret_cast<const void*>(kernel), shape.shared_bytes);
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(name, cudaLaunchKernelEx(&config, kernel, params), "cudaLaunchKernelEx");
}

// All blocks at once, or the launch fails: blocks that wait for each other cannot hang for want of room.
template <class Params>
void launch_cooperative(const char* name, void (*kernel)(Params), const Params& params, const LaunchShape& shape, uintptr_t stream) {
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  launch_with(name, kernel, params, shape, cooperative, stream);
}

// May begin before the launch in front is over (PDL): the kernel waits by itself.
template <class Params>
void launch_early(const char* name, void (*kernel)(Params), const Params& params, const LaunchShape& shape, uintptr_t stream) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  launch_with(name, kernel, params, shape, early, stream);
}

// Blocks of the kernel that the current device runs at once.
inline int32_t resident_blocks(const char* name, const void* kernel, int32_t threads, int32_t shared_bytes) {
  allow_shared(name, kernel, shared_bytes);
  int32_t per_sm = 0, device = 0, num_sms = 0;
  check(name, cudaGetDevice(&device), "cudaGetDevice");
  check(name, cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  check(name, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, threads, static_cast<size_t>(shared_bytes)),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return per_sm * num_sms;
}

}  // namespace sgl_lowlatency::launch
