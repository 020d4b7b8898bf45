// CUDA side of launch/symmetric_workspace.hpp.
#include "launch/symmetric_workspace.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

#include "launch/cuda_launch.cuh"

namespace sgl_lowlatency::launch {
namespace {

constexpr char kName[] = "symmetric memory";

// What the driver maps at a time: smaller allocations share a block of this size, and another process that opens a handle of one of them gets the
// block's beginning. Whole blocks are nobody else's.
constexpr size_t kBlockBytes = size_t{2} << 20;

}  // namespace

uintptr_t allocate_symmetric(size_t bytes) {
  void* pointer = nullptr;
  bytes = (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
  check(kName, cudaMalloc(&pointer, bytes), "cudaMalloc");
  check(kName, cudaMemset(pointer, 0xff, bytes), "cudaMemset");
  check(kName, cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  return reinterpret_cast<uintptr_t>(pointer);
}

void free_symmetric(uintptr_t pointer) { check(kName, cudaFree(reinterpret_cast<void*>(pointer)), "cudaFree"); }

std::string ipc_handle(uintptr_t pointer) {
  cudaIpcMemHandle_t handle;
  check(kName, cudaIpcGetMemHandle(&handle, reinterpret_cast<void*>(pointer)), "cudaIpcGetMemHandle");
  return std::string(reinterpret_cast<const char*>(&handle), sizeof(handle));
}

uintptr_t open_ipc(const std::string& bytes) {
  cudaIpcMemHandle_t handle;
  if (bytes.size() != sizeof(handle)) throw std::invalid_argument("symmetric memory: " + std::to_string(bytes.size()) + " bytes are no IPC handle");
  std::memcpy(&handle, bytes.data(), sizeof(handle));
  void* pointer = nullptr;
  check(kName, cudaIpcOpenMemHandle(&pointer, handle, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
  return reinterpret_cast<uintptr_t>(pointer);
}

void close_ipc(uintptr_t pointer) { check(kName, cudaIpcCloseMemHandle(reinterpret_cast<void*>(pointer)), "cudaIpcCloseMemHandle"); }

void copy_to_device(uintptr_t to, const std::string& bytes) {
  check(kName, cudaMemcpy(reinterpret_cast<void*>(to), bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
}

std::string copy_from_device(uintptr_t from, size_t num_bytes) {
  std::string bytes(num_bytes, '\0');
  check(kName, cudaMemcpy(&bytes[0], reinterpret_cast<const void*>(from), num_bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  return bytes;
}

}  // namespace sgl_lowlatency::launch
