// Parameter checks of a tensor-parallel fused_moe, shared by the CUDA launcher and the emulation.
#include "launch/parallel_moe.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

#include "launch/fused_moe.hpp"

namespace sgl_lowlatency::launch {
namespace {

void require(bool is_met, const std::string& what) {
  if (!is_met) throw std::invalid_argument("fused_moe: " + what);
}

}  // namespace

void check_parallel_moe(const abi::ParallelMoeParams& p, int32_t grid) {
  check_fused_moe(p, grid);
  const auto text = [](int64_t v) { return std::to_string(v); };
  const abi::SymmetricLayout& at = p.symmetric;
  require(at.num_ranks >= 1 && at.num_ranks <= abi::kMaxRanks, "num_ranks " + text(at.num_ranks) + " is outside 1.." + text(abi::kMaxRanks));
  require(p.rank >= 0 && p.rank < at.num_ranks, "rank " + text(p.rank) + " is not below num_ranks " + text(at.num_ranks));
  require(at.hidden == p.geometry.hidden, "the workspaces have hidden " + text(at.hidden) + ", the layer " + text(p.geometry.hidden));
  require(p.rows <= at.max_rows, "rows " + text(p.rows) + " is above " + text(at.max_rows) + ", the workspaces' most");
  const abi::SymmetricLayout wanted = abi::symmetric_layout(at.num_ranks, at.max_rows, at.hidden);
  require(std::memcmp(&wanted, &at, sizeof(at)) == 0, "symmetric is not symmetric_layout of num_ranks, max_rows, hidden and " + text(abi::kParities));
  require(p.layer >= 0 && p.layer <= 0xffff, "layer " + text(p.layer) + " is outside 0..65535");
  for (int32_t rank = 0; rank < at.num_ranks; ++rank) {
    const auto address = reinterpret_cast<uintptr_t>(p.workspaces[rank]);
    require(address != 0 && address % 128 == 0, "the address of the workspace of rank " + text(rank) + " is null or not a multiple of 128");
  }
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
