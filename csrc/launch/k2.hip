// The code object of k2, for gfx950 and gfx942. A workgroup takes all of a CU's LDS, and of its registers two waves a SIMD.
#include "kernels/amd/k2/k2.hpp"

using namespace sgl_lowlatency;

extern "C" __attribute__((global, amdgpu_flat_work_group_size(512, 512), amdgpu_waves_per_eu(2, 2))) void k2(abi::K2Params) {
  kernels::k2_body<dialect::kIsa>(dialect::kernel_params<abi::K2Params>());
}
