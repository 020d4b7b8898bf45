// Parameter checks of k1 and k2, shared by the HIP launcher and the emulation.
#pragma once
#include "sgl_lowlatency/abi/monokernel.hpp"

namespace sgl_lowlatency::launch {

// Throw std::invalid_argument, naming what does not fit.
void check_k1(const abi::K1Params& params);
void check_k2(const abi::K2Params& params);

// On CUDA (monokernel.cu), asynchronously on a cudaStream_t. Throw as the checks do, std::runtime_error naming the CUDA error.
void k1_cuda(const abi::K1Params& params, uintptr_t stream);
void k2_cuda(const abi::K2Params& params, uintptr_t stream);
// Blocks of the current device that run at once.
int32_t monokernel_max_blocks();

}  // namespace sgl_lowlatency::launch
