// Parameter checks of a tensor-parallel decode_step, shared by the CUDA launcher and the emulation.
#include "launch/parallel_step.hpp"

#include <stdexcept>
#include <string>

#include "launch/decode_step.hpp"
#include "launch/rank_check.hpp"

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
  check_ranks("decode_step", at, p.rank, p.workspaces, p.rows, abi::kMaxParallelRows, p.geometry.hidden, abi::kPeerCopies);
  require(p.vocab_shard > 0 && static_cast<int64_t>(p.vocab_shard) * at.num_ranks >= p.num_tokens && p.num_tokens > 0,
          text(at.num_ranks) + " shards of " + text(p.vocab_shard) + " rows do not hold a vocabulary of " + text(p.num_tokens));
  require(p.geometry.num_experts <= 32 * abi::kServedExpertWords, "num_experts " + text(p.geometry.num_experts) + " of a tensor-parallel step is above " +
          text(32 * abi::kServedExpertWords));
  require(p.geometry.num_experts == 0 || p.weights == abi::kWeightsBf16, "MoE layers of a tensor-parallel step are bf16, weights is " + text(p.weights));
  require(p.geometry.num_layers <= 0xffff, "num_layers " + text(p.geometry.num_layers) + " is above 65535");
}

}  // namespace sgl_lowlatency::launch
