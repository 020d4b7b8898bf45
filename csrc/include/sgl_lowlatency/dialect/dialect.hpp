// Chooses the dialect (README.md). Stages and kernel bodies include this file and never a vendor's.
#pragma once
#if defined(__HIP__)
#include "sgl_lowlatency/dialect/hip.hpp"
#elif defined(__CUDACC__) && defined(SGL_WAVES)
#include "sgl_lowlatency/dialect/cuda_waves.cuh"
#elif defined(__CUDACC__)
#include "sgl_lowlatency/dialect/cuda.cuh"
#else
#include "sgl_lowlatency/dialect/host.hpp"
#endif
