// Parameter checks of a tensor-parallel fused_moe, shared by the CUDA launcher and the emulation.
#include "launch/parallel_moe.hpp"

#include <stdexcept>
#include <string>

#include "launch/fused_moe.hpp"
#include "launch/rank_check.hpp"

namespace sgl_lowlatency::launch {
namespace {

void require(bool is_met, const std::string& what) {
  if (!is_met) throw std::invalid_argument("fused_moe: " + what);
}

}  // namespace

void check_parallel_moe(const abi::ParallelMoeParams& p, int32_t grid) {
  check_fused_moe(p, grid);
  check_ranks("fused_moe", p.symmetric, p.rank, p.workspaces, p.rows, abi::kMoeMaxRows, p.geometry.hidden, abi::kParities);
  require(p.layer >= 0 && p.layer <= 0xffff, "layer " + std::to_string(p.layer) + " is outside 0..65535");
}

abi::VirtualMoeRanks virtual_moe_ranks(const std::vector<abi::ParallelMoeParams>& ranks, int32_t grid) {
  const size_t num_ranks = ranks.size();
  require(num_ranks >= 1 && num_ranks <= abi::kMaxRanks, std::to_string(num_ranks) + " virtual ranks are not 1.." + std::to_string(abi::kMaxRanks));
  abi::VirtualMoeRanks all{};
  for (size_t i = 0; i < num_ranks; ++i) {
    check_parallel_moe(ranks[i], grid);
    require(ranks[i].rank == static_cast<int32_t>(i), "virtual rank " + std::to_string(i) + " of a launch is rank " + std::to_string(ranks[i].rank));
    require(ranks[i].rows == ranks[0].rows && ranks[i].shared.total_bytes == ranks[0].shared.total_bytes,
            "virtual ranks of one launch have different rows or sizes");
    all.of[i] = ranks[i];
  }
  return all;
}

}  // namespace sgl_lowlatency::launch
