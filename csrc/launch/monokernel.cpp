// Parameter checks shared by the HIP launcher and the emulation.
#include "launch/monokernel.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

namespace sgl_lowlatency::launch {
namespace {

void require(bool is_met, const std::string& what) {
  if (!is_met) throw std::invalid_argument("monokernel: " + what);
}

std::string text(int64_t value) { return std::to_string(value); }

void require_address(const void* pointer, const std::string& name) {
  require(pointer != nullptr && reinterpret_cast<uintptr_t>(pointer) % 16 == 0, "the address of " + name + " is null or not a multiple of 16");
}

void require_multiple(int32_t value, int32_t of, const std::string& name) {
  require(value > 0 && value % of == 0, name + " " + text(value) + " is not a multiple of " + text(of));
}

void check_geometry(const abi::Geometry& g) {
  require(g.head_dim == 64 || g.head_dim == 128, "head_dim " + text(g.head_dim) + " is neither 64 nor 128");
  require(g.num_kv_heads > 0 && g.num_q_heads > 0 && g.num_q_heads % g.num_kv_heads == 0, "query heads are not shared by KV heads evenly");
  require(g.num_q_heads / g.num_kv_heads <= abi::kItemColumns, "a KV head has more than " + text(abi::kItemColumns) + " query heads");
  require_multiple(g.hidden, abi::kMfmaK, "hidden");
  if (g.num_experts == 0) return require_multiple(g.intermediate, abi::kMfmaK, "intermediate");
  require_multiple(g.moe_intermediate, abi::kMfmaK, "moe_intermediate");
  require_multiple(g.num_experts, abi::kTileRows, "num_experts");
  require(g.num_experts <= abi::kMaxMonoExperts, "num_experts " + text(g.num_experts) + " is above " + text(abi::kMaxMonoExperts));
  require(g.top_k >= 1 && g.top_k <= g.num_experts && g.top_k <= abi::kMaxMonoTopK, "top_k " + text(g.top_k) + " is out of range");
}

void check_launch(const abi::MonoLaunch& l) {
  check_geometry(l.geometry);
  require(l.isa == abi::kGfx950 || l.isa == abi::kGfx942, "isa " + text(l.isa) + " is neither 950 nor 942");
  require(l.grid >= 1 && l.grid <= 1024, "grid " + text(l.grid) + " is outside 1..1024");
  require(l.rows >= 1 && l.rows <= abi::kMaxMonoRows, "rows " + text(l.rows) + " is outside 1.." + text(abi::kMaxMonoRows));
  require(l.rows_per_request >= 1 && l.rows % l.rows_per_request == 0, "rows are not a multiple of rows_per_request");
  require(l.layer >= 0 && l.layer <= 0xffff, "layer " + text(l.layer) + " is outside 0..65535");
  require(l.deadline_ns > 0, "deadline_ns is 0");
  const abi::MonoHandover at = abi::mono_handover(l.geometry, l.rows, l.symmetric.max_rows, l.grid, l.rows_per_request);
  require(std::memcmp(&at, &l.at, sizeof(at)) == 0, "the hand-over's layout is not that of the step");
  const abi::SymmetricLayout symmetric = abi::symmetric_layout(l.symmetric.num_ranks, l.symmetric.max_rows, l.symmetric.hidden);
  require(std::memcmp(&symmetric, &l.symmetric, sizeof(symmetric)) == 0, "the workspace's layout is not that of its ranks, rows and columns");
  require(l.symmetric.num_ranks >= 1 && l.symmetric.num_ranks <= abi::kMaxRanks, "num_ranks " + text(l.symmetric.num_ranks) + " is out of range");
  require(l.symmetric.hidden == abi::kMonoExchanges * l.geometry.hidden && l.symmetric.max_rows >= l.rows,
          "the workspace is not of this model and step");
  require(l.rank >= 0 && l.rank < l.symmetric.num_ranks, "rank " + text(l.rank) + " is not among the " + text(l.symmetric.num_ranks));
  require_address(l.handover, "the hand-over");
  require_address(l.state, "the state");
  require(l.fault != nullptr, "there is no fault record");
  for (int32_t r = 0; r < l.symmetric.num_ranks; ++r) require_address(l.workspaces[r], "the workspace of rank " + text(r));
}

}  // namespace

void check_k1(const abi::K1Params& p) {
  check_launch(p.launch);
  require((p.residual == nullptr) == (p.residual_out == nullptr), "residual and residual_out go together");
  require(p.residual == nullptr || p.residual_out != p.residual, "residual_out is residual, which other workgroups still read");
  require_address(p.x, "x");
  require_address(p.input_norm, "input_norm");
  require_address(p.qkv, "qkv");
  require_address(p.q_norm, "q_norm");
  require_address(p.k_norm, "k_norm");
  require_address(p.cos_sin, "cos_sin");
  require_address(p.k_pool, "k_pool");
  require_address(p.v_pool, "v_pool");
  require_address(p.q_out, "q_out");
  require(p.positions != nullptr && p.out_cache_loc != nullptr, "positions or out_cache_loc is null");
}

void check_k2(const abi::K2Params& p) {
  check_launch(p.launch);
  const bool is_moe = p.launch.geometry.num_experts > 0;
  require((p.router != nullptr) == is_moe, is_moe ? "a MoE layer has a router" : "a dense layer has no router");
  require(p.counted_tokens == 0 || p.counted_tokens == p.launch.rows_per_request, "counted_tokens is neither 0 nor rows_per_request");
  require_address(p.q, "q");
  require_address(p.k_pool, "k_pool");
  require_address(p.v_pool, "v_pool");
  require_address(p.out_proj, "out_proj");
  require_address(p.post_norm, "post_norm");
  require_address(p.gate_up, "gate_up");
  require_address(p.down, "down");
  require_address(p.residual, "residual");
  require_address(p.residual_out, "residual_out");
  require_address(p.x_out, "x_out");
  if (is_moe) require_address(p.router, "router");
  require(p.seq_lens != nullptr && p.req_pool_indices != nullptr && p.req_to_token != nullptr, "seq_lens, req_pool_indices or req_to_token is null");
  require(p.executed_mirror != nullptr, "there is no mirror of the counters");
}

}  // namespace sgl_lowlatency::launch
