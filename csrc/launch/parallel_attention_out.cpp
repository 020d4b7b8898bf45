// Parameter checks of a tensor-parallel attention_out, shared by the CUDA launcher and the emulation.
#include "launch/parallel_attention_out.hpp"

#include <cstring>
#include <string>

namespace sgl_lowlatency::launch {

void check_parallel_attention_out(const abi::ParallelAttentionOutParams& p, int32_t grid) {
  check_attention_out(p, grid);
  const SliceCheck check{"attention_out"};
  const abi::SymmetricLayout& at = p.symmetric;
  check.require_within(at.num_ranks, 1, abi::kMaxRanks, "num_ranks");
  check.require_within(p.rank, 0, at.num_ranks - 1, "rank");
  check.require(at.hidden == p.geometry.hidden,
                "the workspaces have hidden " + std::to_string(at.hidden) + ", the layer " + std::to_string(p.geometry.hidden));
  check.require(p.rows <= at.max_rows,
                "rows " + std::to_string(p.rows) + " is outside 1.." + std::to_string(at.max_rows) + ", what the workspaces have room for");
  const abi::SymmetricLayout wanted = abi::symmetric_layout(at.num_ranks, at.max_rows, at.hidden);
  check.require(std::memcmp(&wanted, &at, sizeof(at)) == 0,
                "symmetric is not symmetric_layout of num_ranks, max_rows, hidden and " + std::to_string(abi::kParities));
  for (int32_t rank = 0; rank < at.num_ranks; ++rank) {
    const auto address = reinterpret_cast<uintptr_t>(p.workspaces[rank]);
    check.require(address != 0 && address % 128 == 0,
                  "the address of the workspace of rank " + std::to_string(rank) + " is null or not a multiple of 128");
  }
  check.require_within(p.layer, 0, 0xffff, "layer");
}

}  // namespace sgl_lowlatency::launch
