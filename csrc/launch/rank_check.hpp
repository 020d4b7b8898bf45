// Checks of what a rank of a tensor-parallel kernel is told of the others, shared by the kernels' launchers and emulations.
#pragma once
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "sgl_lowlatency/abi/symmetric_workspace.hpp"

namespace sgl_lowlatency::launch {

// Throws std::invalid_argument, which names the kernel and the parameter, unless `rank` is one of the symmetric layout's, that has `copies` copies of
// `hidden` columns and room for the rows, and every rank's workspace is there. most_rows: of a launch of the kernel.
inline void check_ranks(const std::string& kernel, const abi::SymmetricLayout& at, int32_t rank, char* const* workspaces, int32_t rows,
                        int32_t most_rows, int32_t hidden, int32_t copies) {
  const auto require = [&](bool is_met, const std::string& what) {
    if (!is_met) throw std::invalid_argument(kernel + ": " + what);
  };
  const auto text = [](int64_t v) { return std::to_string(v); };
  require(at.num_ranks >= 1 && at.num_ranks <= abi::kMaxRanks, "num_ranks " + text(at.num_ranks) + " is outside 1.." + text(abi::kMaxRanks));
  require(rank >= 0 && rank < at.num_ranks, "rank " + text(rank) + " is not below num_ranks " + text(at.num_ranks));
  require(at.hidden == hidden, "the workspaces have hidden " + text(at.hidden) + ", the layer " + text(hidden));
  const int32_t most = at.max_rows < most_rows ? at.max_rows : most_rows;
  require(rows <= most, "rows " + text(rows) + " is above " + text(most) + ", the most of the kernel and of its workspaces");
  const abi::SymmetricLayout wanted = abi::symmetric_layout(at.num_ranks, at.max_rows, at.hidden, copies);
  require(std::memcmp(&wanted, &at, sizeof(at)) == 0, "symmetric is not symmetric_layout of num_ranks, max_rows, hidden and " + text(copies));
  for (int32_t r = 0; r < at.num_ranks; ++r) {
    const auto address = reinterpret_cast<uintptr_t>(workspaces[r]);
    require(address != 0 && address % 128 == 0, "the address of the workspace of rank " + text(r) + " is null or not a multiple of 128");
  }
}

}  // namespace sgl_lowlatency::launch
