// Parameter checks shared by the CUDA launcher and the emulation.
#include "launch/epilogue_multicast.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

#include "sgl_lowlatency/abi/weight_map.hpp"

namespace sgl_lowlatency::launch {
namespace {

void require(bool is_met, const std::string& what) {
  if (!is_met) throw std::invalid_argument("epilogue_multicast: " + what);
}

std::string text(int64_t value) { return std::to_string(value); }

void require_address(const void* pointer, const std::string& name) {
  require(pointer != nullptr && reinterpret_cast<uintptr_t>(pointer) % 16 == 0, "the address of " + name + " is null or not a multiple of 16");
}

void check_product(const abi::DecodeStepParams& p, const abi::SymmetricLayout& at) {
  const int32_t most = at.max_rows < abi::kMaxPushedRows ? at.max_rows : abi::kMaxPushedRows;
  require(p.rows >= 1 && p.rows <= most, "rows " + text(p.rows) + " is outside 1.." + text(most));
  const abi::OpPlan& op = p.ops[abi::kOpOutProj];
  require(op.k_extent >= abi::chunk_k(2) && op.k_extent % abi::chunk_k(2) == 0, "K " + text(op.k_extent) + " is not a multiple of 64");
  require(op.k_panel == op.k_extent || (op.k_panel > 0 && op.k_panel < op.k_extent && op.k_panel % abi::stage_k(2) == 0),
          "k_panel " + text(op.k_panel) + " is neither K nor a multiple of " + text(abi::stage_k(2)));
  require(op.num_tiles == at.hidden / abi::kTileRows, "num_tiles is not hidden / " + text(abi::kTileRows));
  require(p.num_stages >= 2 && p.num_stages <= abi::kMaxStages, "num_stages " + text(p.num_stages) + " is outside 2.." + text(abi::kMaxStages));
  require(p.max_panel_bytes >= p.rows * abi::panel_row_bytes(op.k_panel), "max_panel_bytes is less than a panel");
  const abi::SmemLayout shared = abi::smem_layout(p.rows, p.max_panel_bytes, p.max_tiles_multi_panel, p.num_stages, 0);
  require(std::memcmp(&shared, &p.shared, sizeof(shared)) == 0, "the shared memory's layout is not that of rows, panel and stages");
  require(p.weights == abi::kWeightsBf16, "weights are not bf16");
  require(p.deadline_ns > 0, "deadline_ns is 0");
  require(p.fault != nullptr, "there is no fault record");
  require(p.maps != nullptr, "there are no weight maps");
}

}  // namespace

void check_epilogue_multicast(const abi::EpilogueMulticastParams& p) {
  const abi::SymmetricLayout at = abi::symmetric_layout(p.at.num_ranks, p.at.max_rows, p.at.hidden);
  require(p.at.num_ranks >= 1 && p.at.num_ranks <= abi::kMaxRanks, "num_ranks " + text(p.at.num_ranks) + " is outside 1.." + text(abi::kMaxRanks));
  require(p.at.hidden >= abi::kTileRows && p.at.hidden % abi::kTileRows == 0 && p.at.hidden <= abi::kMaxReducedHidden,
          "hidden " + text(p.at.hidden) + " is not a multiple of 16 up to " + text(abi::kMaxReducedHidden));
  require(std::memcmp(&at, &p.at, sizeof(at)) == 0, "the workspace's layout is not that of num_ranks, max_rows and hidden");
  check_product(p.product, p.at);
  const int32_t first = p.product.rank, last = first + p.ranks_in_launch - 1;
  require(p.ranks_in_launch >= 1 && first >= 0 && last < p.at.num_ranks,
          "ranks " + text(first) + ".." + text(last) + " are not among the " + text(p.at.num_ranks));
  require(p.blocks_per_rank >= 1 && p.blocks_per_rank * p.ranks_in_launch <= 1024, "blocks_per_rank " + text(p.blocks_per_rank) + " is out of range");
  const int32_t tiles = p.at.hidden / abi::kTileRows, most_tiles = (tiles + p.blocks_per_rank - 1) / p.blocks_per_rank;
  const abi::OpPlan& op = p.product.ops[abi::kOpOutProj];
  require(op.k_panel == op.k_extent || p.product.max_tiles_multi_panel >= most_tiles, "a block's tiles have no accumulators");
  require(p.layer >= 0 && p.layer <= 0xffff, "layer " + text(p.layer) + " is outside 0..65535");
  require_address(p.norm_weight, "norm_weight");
  for (int32_t r = 0; r < p.at.num_ranks; ++r) require_address(p.workspaces[r], "the workspace of rank " + text(r));
  for (int32_t r = 0; r < p.ranks_in_launch; ++r) {
    const std::string of = " of rank " + text(first + r);
    require_address(p.tensors[r].input, "input" + of);
    require_address(p.tensors[r].residual, "residual" + of);
    require_address(p.tensors[r].sum, "sum" + of);
    require_address(p.tensors[r].normed, "normed" + of);
  }
}

}  // namespace sgl_lowlatency::launch
