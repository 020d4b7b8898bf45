// Parameter checks of a tensor-parallel decode_step, shared by the CUDA launcher and the emulation.
#include "launch/parallel_step.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

#include "launch/decode_step.hpp"

namespace sgl_lowlatency::launch {
namespace {

void require(bool is_met, const std::string& what) {
  if (!is_met) throw std::invalid_argument("decode_step: " + what);
}

}  // namespace

void check_parallel_step(const abi::ParallelStepParams& p, int32_t grid) {
  check_decode_step(p, grid);
  const auto text = [](int64_t v) { return std::to_string(v); };
  const abi::SymmetricLayout& at = p.symmetric;
  require(at.num_ranks >= 1 && at.num_ranks <= abi::kMaxRanks, "num_ranks " + text(at.num_ranks) + " is outside 1.." + text(abi::kMaxRanks));
  require(p.rank >= 0 && p.rank < at.num_ranks, "rank " + text(p.rank) + " is not below num_ranks " + text(at.num_ranks));
  require(at.hidden == p.geometry.hidden, "the workspaces have hidden " + text(at.hidden) + ", the model " + text(p.geometry.hidden));
  const int32_t most = at.max_rows < abi::kMaxParallelRows ? at.max_rows : abi::kMaxParallelRows;
  require(p.rows <= most, "rows " + text(p.rows) + " is above " + text(most));
  const abi::SymmetricLayout wanted = abi::symmetric_layout(at.num_ranks, at.max_rows, at.hidden, abi::kPeerCopies);
  require(std::memcmp(&wanted, &at, sizeof(at)) == 0,
          "symmetric is not symmetric_layout of num_ranks, max_rows, hidden and " + text(abi::kPeerCopies));
  for (int32_t rank = 0; rank < at.num_ranks; ++rank) {
    const auto address = reinterpret_cast<uintptr_t>(p.workspaces[rank]);
    require(address != 0 && address % 128 == 0, "the address of the workspace of rank " + text(rank) + " is null or not a multiple of 128");
  }
  require(p.vocab_shard > 0 && static_cast<int64_t>(p.vocab_shard) * at.num_ranks >= p.num_tokens && p.num_tokens > 0,
          text(at.num_ranks) + " shards of " + text(p.vocab_shard) + " rows do not hold a vocabulary of " + text(p.num_tokens));
  require(p.geometry.num_experts <= 32 * abi::kServedExpertWords, "num_experts " + text(p.geometry.num_experts) + " of a tensor-parallel step is above " +
          text(32 * abi::kServedExpertWords));
  require(p.geometry.num_experts == 0 || p.weights == abi::kWeightsBf16, "MoE layers of a tensor-parallel step are bf16, weights is " + text(p.weights));
  require(p.geometry.num_layers <= 0xffff, "num_layers " + text(p.geometry.num_layers) + " is above 65535");
}

}  // namespace sgl_lowlatency::launch
