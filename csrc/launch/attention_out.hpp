// Host entry of attention_out on CUDA: checks, shared-memory attribute, launch that may overlap its neighbours. No device code here.
#pragma once
#include <cstdint>
#include <type_traits>

#include "sgl_lowlatency/abi/attention_out.hpp"

namespace sgl_lowlatency::launch {

// Calls call(std::integral_constant<int32_t, kNTiles>) with the instance that takes so many rows.
template <class Call>
auto with_attention_out_instance(int32_t rows, const Call& call) {
  switch (abi::slice_n_tiles(rows)) {
    case 1: return call(std::integral_constant<int32_t, 1>{});
    case 2: return call(std::integral_constant<int32_t, 2>{});
    case 4: return call(std::integral_constant<int32_t, 4>{});
    default: return call(std::integral_constant<int32_t, 6>{});
  }
}

// Launches on `stream` (a cudaStream_t as an integer). Capturable in a CUDA graph. Throws std::invalid_argument naming the parameter, or
// std::runtime_error with the CUDA error's name and text.
void attention_out_cuda(const abi::AttentionOutParams& params, int32_t grid, uintptr_t stream);

// Blocks of the instance for so many rows that the current device holds at once, with so much shared memory.
int32_t attention_out_max_blocks(int32_t rows, int32_t shared_bytes);

// What both the CUDA launcher and the emulation refuse: throws std::invalid_argument.
void check_attention_out(const abi::AttentionOutParams& params, int32_t grid);

}  // namespace sgl_lowlatency::launch
