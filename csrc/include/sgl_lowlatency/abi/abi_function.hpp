// SGL_ABI_FUNCTION: a function of sizes that host, CUDA, the host dialect and Python share.
#pragma once

#if defined(__CUDACC__)
#define SGL_ABI_FUNCTION __host__ __device__ constexpr
#else
#define SGL_ABI_FUNCTION constexpr
#endif
