// Reads device memory and does nothing with it: the bandwidth that a floor is measured against.
#pragma once
#include <cstddef>
#include <cstdint>

namespace sgl_lowlatency::launch {

// out[0] = exclusive or of all 32-bit words of [begin, begin + bytes), with 16-byte loads, on `stream`. begin: aligned to 16; bytes: a
// multiple of 16; out: one uint32 on the device. Throws std::invalid_argument or std::runtime_error with the CUDA error's text.
void read_bytes_cuda(uintptr_t begin, size_t bytes, uintptr_t out, uintptr_t stream);

}  // namespace sgl_lowlatency::launch
