// CUDA side of launch/epilogue_multicast.hpp.
#include "launch/epilogue_multicast.hpp"

#include "kernels/nvidia/epilogue_multicast/epilogue_multicast.cuh"
#include "launch/cuda_launch.cuh"

namespace sgl_lowlatency::launch {
namespace {

using Kernel = void (*)(abi::EpilogueMulticastParams);

constexpr char kName[] = "epilogue_multicast";

Kernel select_reduction(int32_t num_ranks) {
  if (num_ranks <= 2) return kernels::reduce_tiles<2>;
  return num_ranks <= 4 ? kernels::reduce_tiles<4> : kernels::reduce_tiles<8>;
}

}  // namespace

void epilogue_multicast_cuda(const abi::EpilogueMulticastParams& params, uintptr_t stream) {
  check_epilogue_multicast(params);
  const abi::DecodeStepParams& product = params.product;
  const Kernel push = product.rows <= 8 ? kernels::push_tiles<1> : kernels::push_tiles<2>;
  const dim3 push_blocks(static_cast<unsigned>(params.ranks_in_launch * params.blocks_per_rank));
  launch_early(kName, push, params, {push_blocks, abi::kNumThreads, product.shared.total_bytes}, stream);
  const dim3 rows_of_ranks(static_cast<unsigned>(params.ranks_in_launch * product.rows));
  const int32_t threads = abi::reduce_threads(params.at.hidden);
  launch_early(kName, select_reduction(params.at.num_ranks), params, {rows_of_ranks, threads, threads / 32 * 4}, stream);
}

}  // namespace sgl_lowlatency::launch
