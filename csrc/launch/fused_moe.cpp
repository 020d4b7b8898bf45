// Parameter checks shared by the CUDA launcher and the emulation. They see the parameters, not the device memory behind pointers.
#include "launch/fused_moe.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

#include "launch/hyper_connection.hpp"

namespace sgl_lowlatency::launch {
namespace {

void require(bool is_met, const std::string& what) {
  if (!is_met) throw std::invalid_argument("fused_moe: " + what);
}

void require_within(int64_t value, int64_t least, int64_t most, const std::string& name) {
  require(value >= least && value <= most, name + " " + std::to_string(value) + " is outside " + std::to_string(least) + ".." + std::to_string(most));
}

void require_multiple(int32_t value, int32_t of, const std::string& name) {
  require(value > 0 && value % of == 0, name + " " + std::to_string(value) + " is not a positive multiple of " + std::to_string(of));
}

}  // namespace

void check_fused_moe(const abi::FusedMoeParams& p, int32_t grid) {
  const abi::MoeGeometry& g = p.geometry;
  require_within(p.rows, 1, abi::kMoeMaxRows, "rows");
  require_multiple(g.hidden, abi::kMoeStepK, "hidden");
  require_multiple(g.intermediate, abi::kMoeStepK, "intermediate");
  require_within(g.hidden, abi::kMoeStepK, abi::kMoeMaxHidden, "hidden");
  require_within(g.intermediate, abi::kMoeStepK, abi::kMoeMaxIntermediate, "intermediate");
  require_multiple(g.num_experts, 16, "num_experts");
  require_within(g.num_experts, 16, abi::kMaxExperts, "num_experts");
  require_within(g.top_k, 1, abi::kMoeMaxTopK, "top_k");
  require(grid >= 1, "grid " + std::to_string(grid) + " is below 1");
  const int64_t most_units = static_cast<int64_t>(p.rows) * g.top_k * (abi::moe_tiles(g, abi::kMoeGateUp) + abi::moe_tiles(g, abi::kMoeDown)) * 4;
  require(most_units * grid < int64_t{1} << 32, "grid " + std::to_string(grid) + " has shares that 32 bits do not hold");
  require(p.swiglu_limit > 0.0f, "swiglu_limit is not positive");
  require((p.bias_alt == nullptr) == (p.token_ids == nullptr), "token_ids are there with bias_alt, and null without");
  require((p.out_ids == nullptr) == (p.out_weights == nullptr) && (p.out_ids == nullptr) == (p.out_logits == nullptr),
          "out_ids, out_weights and out_logits are there together");
  const abi::MoeSmem shared = abi::moe_smem(g, p.rows, p.shared.limit_bytes);
  require(std::memcmp(&shared, &p.shared, sizeof(shared)) == 0, "shared is not moe_smem of geometry and rows");
  require(p.generation_words % 4 == 0 && p.generation_words >= abi::moe_used_words(abi::moe_handover(g, p.rows), p.hyper.streams != nullptr),
          "generation_words are too few for the rows");
  require(p.deadline_ns > 0, "deadline_ns is 0");
  const void* const pointers[] = {p.x, p.bias, p.maps, p.gate_up_scale, p.down_scale, p.shared_gate_up_scale, p.shared_down_scale, p.workspace,
                                  p.state, p.fault};
  for (const void* pointer : pointers) require(pointer != nullptr, "a pointer of the parameters is null");
  require(p.out != nullptr || p.hyper.streams != nullptr, "out is null in a launch without streams");
  if (p.hyper.streams != nullptr) check_hyper_connection("fused_moe", p.hyper);
  require(p.hyper.streams != nullptr || (p.hyper.streams_out == nullptr && p.hyper.coefficients == nullptr),
          "streams_out and coefficients are there with streams, and null without");
}

}  // namespace sgl_lowlatency::launch
