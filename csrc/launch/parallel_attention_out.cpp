// Parameter checks of a tensor-parallel attention_out, shared by the CUDA launcher and the emulation.
#include "launch/parallel_attention_out.hpp"

#include "launch/rank_check.hpp"

namespace sgl_lowlatency::launch {

void check_parallel_attention_out(const abi::ParallelAttentionOutParams& p, int32_t grid) {
  check_attention_out(p, grid);
  check_ranks("attention_out", p.symmetric, p.rank, p.workspaces, p.rows, abi::kSliceMaxRows, p.geometry.hidden, abi::kParities);
  const SliceCheck check{"attention_out"};
  check.require_within(p.layer, 0, 0xffff, "layer");
}

}  // namespace sgl_lowlatency::launch
