// CUDA side of launch/symmetric_workspace.hpp.
#include "launch/symmetric_workspace.hpp"

#include <cuda_runtime.h>

#include <cstring>
#include <stdexcept>

namespace sgl_lowlatency::launch {
namespace {

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("symmetric memory: ") + call + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

}  // namespace

uintptr_t allocate_symmetric(size_t bytes) {
  void* pointer = nullptr;
  check(cudaMalloc(&pointer, bytes), "cudaMalloc");
  check(cudaMemset(pointer, 0xff, bytes), "cudaMemset");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  return reinterpret_cast<uintptr_t>(pointer);
}

void free_symmetric(uintptr_t pointer) { check(cudaFree(reinterpret_cast<void*>(pointer)), "cudaFree"); }

std::string ipc_handle(uintptr_t pointer) {
  cudaIpcMemHandle_t handle;
  check(cudaIpcGetMemHandle(&handle, reinterpret_cast<void*>(pointer)), "cudaIpcGetMemHandle");
  return std::string(reinterpret_cast<const char*>(&handle), sizeof(handle));
}

uintptr_t open_ipc(const std::string& bytes) {
  cudaIpcMemHandle_t handle;
  if (bytes.size() != sizeof(handle)) throw std::invalid_argument("symmetric memory: " + std::to_string(bytes.size()) + " bytes are no IPC handle");
  std::memcpy(&handle, bytes.data(), sizeof(handle));
  void* pointer = nullptr;
  check(cudaIpcOpenMemHandle(&pointer, handle, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
  return reinterpret_cast<uintptr_t>(pointer);
}

void close_ipc(uintptr_t pointer) { check(cudaIpcCloseMemHandle(reinterpret_cast<void*>(pointer)), "cudaIpcCloseMemHandle"); }

void copy_to_device(uintptr_t to, const std::string& bytes) {
  check(cudaMemcpy(reinterpret_cast<void*>(to), bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
}

std::string copy_from_device(uintptr_t from, size_t num_bytes) {
  std::string bytes(num_bytes, '\0');
  check(cudaMemcpy(&bytes[0], reinterpret_cast<const void*>(from), num_bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  return bytes;
}

}  // namespace sgl_lowlatency::launch
