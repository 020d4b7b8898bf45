// Device memory that other processes of the host map: allocation, CUDA IPC handles, mapping. No kernels.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace sgl_lowlatency::launch {

// All throw std::runtime_error with the CUDA error's name and text; of the current device.
uintptr_t allocate_symmetric(size_t bytes);  // and up to 2 MiB more, every byte 0xff; not from torch's allocator, whose blocks a handle cannot name
void free_symmetric(uintptr_t pointer);
std::string ipc_handle(uintptr_t pointer);        // the bytes that open_ipc of another process takes
uintptr_t open_ipc(const std::string& handle);    // std::invalid_argument for bytes that are no handle
void close_ipc(uintptr_t pointer);
void copy_to_device(uintptr_t to, const std::string& bytes);
std::string copy_from_device(uintptr_t from, size_t bytes);

}  // namespace sgl_lowlatency::launch
