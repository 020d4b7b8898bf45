// Parameter checks shared by the CUDA launcher and the emulation. They see the parameters, not the device tables behind pointers.
#include <cstring>
#include <stdexcept>
#include <string>

#include "launch/decode_step.hpp"

namespace sgl_lowlatency::launch {
namespace {

void require(bool is_met, const std::string& what) {
  if (!is_met) throw std::invalid_argument("decode_step: " + what);
}

// What MoE layers ask for beyond a dense step.
void check_moe(const abi::DecodeStepParams& p, int32_t grid) {
  const abi::Geometry& g = p.geometry;
  const auto text = [](int64_t v) { return std::to_string(v); };
  require(g.num_experts > 0 && g.num_experts <= abi::kMaxExperts && g.num_experts % abi::kTileRows == 0,
          "num_experts " + text(g.num_experts) + " is not a multiple of " + text(abi::kTileRows) + " up to " + text(abi::kMaxExperts));
  require(g.top_k >= 1 && g.top_k <= abi::kMaxTopK && g.top_k <= g.num_experts,
          "top_k " + text(g.top_k) + " is outside 1.." + text(abi::kMaxTopK < g.num_experts ? abi::kMaxTopK : g.num_experts));
  require(p.weights != abi::kWeightsFp8Channel, "MoE layers are bf16 or FP8 in blocks, weights is " + text(p.weights));
  // Else some hand over nothing that every block reads (stages/generations.hpp), or fill no stage in a layer (route_rows).
  require(grid <= g.hidden / abi::kTileRows,
          "grid " + text(grid) + " leaves blocks without tiles of down: there are " + text(g.hidden / abi::kTileRows));
  require(static_cast<int64_t>(g.num_experts) * p.ops[abi::kOpGateUp].num_tiles * grid <= UINT32_MAX,
          text(g.num_experts) + " experts of " + text(p.ops[abi::kOpGateUp].num_tiles) + " tiles on " + text(grid) + " blocks: even_share overflows");
  require(p.panel_pairs >= p.rows, "panel_pairs " + text(p.panel_pairs) + " does not hold the " + text(p.rows) + " pairs that an expert may have");
}

}  // namespace

void check_decode_step(const abi::DecodeStepParams& p, int32_t grid) {
  const abi::Geometry& g = p.geometry;
  const auto text = [](int64_t v) { return std::to_string(v); };
  require(grid >= 1, "grid " + text(grid) + " is below 1");
  require(p.rows >= 1 && p.rows <= abi::kMaxRows, "rows " + text(p.rows) + " is outside 1.." + text(abi::kMaxRows));
  require(p.rows_per_request >= 1 && p.rows % p.rows_per_request == 0,
          "rows " + text(p.rows) + " is not a multiple of rows_per_request " + text(p.rows_per_request));
  require(p.counted_tokens == 0 || p.counted_tokens == p.rows_per_request,
          "counted_tokens " + text(p.counted_tokens) + " is neither 0 nor all new tokens of a request");
  require(g.req_to_token_stride >= p.rows_per_request,
          "req_to_token_stride " + text(g.req_to_token_stride) + " does not hold the " + text(p.rows_per_request) + " new tokens of a request");
  require(g.num_layers >= 1, "num_layers " + text(g.num_layers) + " is below 1");
  require(g.head_dim == 64 || g.head_dim == 128, "head_dim " + text(g.head_dim) + " is not 64 or 128");
  require(g.num_kv_heads >= 1 && g.num_q_heads % g.num_kv_heads == 0,
          "num_q_heads " + text(g.num_q_heads) + " is not a multiple of num_kv_heads " + text(g.num_kv_heads));
  require(g.hidden % 64 == 0 && g.hidden > 0, "hidden " + text(g.hidden) + " is not a multiple of 64");
  const bool is_moe = g.num_experts != 0;
  const int32_t intermediate = is_moe ? g.moe_intermediate : g.intermediate;
  require(intermediate % 64 == 0 && intermediate > 0, "intermediate " + text(intermediate) + " is not a multiple of 64");
  if (is_moe) check_moe(p, grid);
  require(g.kv_slot_stride >= g.num_kv_heads * g.head_dim && g.kv_slot_stride % 8 == 0,
          "kv_slot_stride " + text(g.kv_slot_stride) + " does not hold a slot in 16-byte units");
  require(p.num_stages >= 2 && p.num_stages <= abi::kMaxStages, "num_stages " + text(p.num_stages) + " is outside 2.." + text(abi::kMaxStages));
  require(p.deadline_ns > 0, "deadline_ns is 0");
  require(p.weights >= 0 && p.weights < abi::kNumWeightFormats, "weights " + text(p.weights) + " is no WeightFormat");
  const bool is_fp8 = p.weights != abi::kWeightsBf16;
  const int32_t q_size = g.num_q_heads * g.head_dim;
  const int32_t k_extent[abi::kNumOps] = {g.hidden, q_size, g.hidden, intermediate};
  const int32_t num_tiles[abi::kNumOps] = {(g.num_q_heads + 2 * g.num_kv_heads) * g.head_dim / abi::kTileRows, g.hidden / abi::kTileRows,
                                           2 * intermediate / abi::kTileRows, g.hidden / abi::kTileRows};
  const auto check_op = [&](int32_t op, int32_t wanted_k, int32_t wanted_tiles, int32_t stage_k) {
    const abi::OpPlan& o = p.ops[op];
    const std::string name = "ops[" + text(op) + "].";
    require(o.k_extent == wanted_k, name + "k_extent " + text(o.k_extent) + " is not " + text(wanted_k));
    require(o.num_tiles == wanted_tiles, name + "num_tiles " + text(o.num_tiles) + " is not " + text(wanted_tiles));
    require(o.k_panel == o.k_extent || (o.k_panel > 0 && o.k_panel < o.k_extent && o.k_panel % stage_k == 0),
            name + "k_panel " + text(o.k_panel) + " is neither all of K nor a multiple of " + text(stage_k));
    const int32_t panel_rows = is_moe && op == abi::kOpDown ? p.panel_pairs : p.rows;
    require(panel_rows * abi::panel_row_bytes(o.k_panel) <= p.max_panel_bytes, name + "panel exceeds max_panel_bytes " + text(p.max_panel_bytes));
  };
  for (int32_t op = 0; op < abi::kNumOps; ++op) {
    check_op(op, k_extent[op], num_tiles[op], abi::stage_k(abi::element_bytes(p.weights)));
    const abi::OpPlan& o = p.ops[op];
    const std::string name = "ops[" + text(op) + "].";
    require(!is_fp8 || o.k_extent % abi::kScaleBlock == 0, name + "k_extent " + text(o.k_extent) + " is not a multiple of " + text(abi::kScaleBlock));
    require(!is_fp8 || o.k_panel <= abi::kMaxScaledPanelK, name + "k_panel " + text(o.k_panel) + " is above " + text(abi::kMaxScaledPanelK));
  }
  if (is_moe) {
    check_op(abi::kOpRouter, g.hidden, g.num_experts / abi::kTileRows, abi::stage_k(2));
    for (const int32_t op : {abi::kOpGateUp, abi::kOpDown, abi::kOpRouter}) {
      require(p.ops[op].k_panel == p.ops[op].k_extent, "ops[" + text(op) + "] of a MoE layer has several panels");
    }
  }
  const abi::OpPlan& head = p.ops[abi::kOpHead];
  require(p.logits == nullptr || head.num_tiles > 0, "logits are asked for, and ops[" + text(abi::kOpHead) + "] has no tiles");
  if (head.num_tiles != 0) {
    check_op(abi::kOpHead, g.hidden, (g.vocab + abi::kTileRows - 1) / abi::kTileRows, abi::stage_k(2));
    require(head.k_panel == head.k_extent || p.max_tiles_multi_panel > 0, "the LM head has several panels and no accumulators");
  }
  require(abi::attention_panel_bytes(g.head_dim) <= p.max_panel_bytes, "attention exceeds max_panel_bytes " + text(p.max_panel_bytes));
  const abi::MoeLayout moe = is_moe ? abi::moe_layout(p.rows, g.num_experts, g.top_k) : abi::MoeLayout{};
  require(std::memcmp(&moe, &p.moe, sizeof(moe)) == 0, "moe is not moe_layout of rows, num_experts and top_k");
  const abi::SmemLayout shared = abi::smem_layout(p.rows, p.max_panel_bytes, p.max_tiles_multi_panel, p.num_stages, moe.total_bytes);
  require(std::memcmp(&shared, &p.shared, sizeof(shared)) == 0,
          "shared is not smem_layout of rows, max_panel_bytes, max_tiles_multi_panel, num_stages and moe");
  const abi::HandoverLayout at = abi::handover_layout(g, p.rows, grid, p.rows_per_request);
  require(std::memcmp(&at, &p.at, sizeof(at)) == 0, "at is not handover_layout of geometry, rows, grid and rows_per_request");
  const abi::StreamLayout stream = abi::stream_layout(g, p.rows);
  require(std::memcmp(&stream, &p.stream, sizeof(stream)) == 0, "stream is not stream_layout of geometry and rows");
  require(p.generation_bytes >= at.total_bytes && p.generation_bytes % 128 == 0,
          "generation_bytes " + text(p.generation_bytes) + " does not hold the " + text(at.total_bytes) + " bytes of a generation in 128-byte units");
  require(p.aux_columns >= 0 && p.aux_columns % g.hidden == 0 && p.aux_columns / g.hidden <= g.num_layers,
          "aux_columns " + text(p.aux_columns) + " are not those of 0.." + text(g.num_layers) + " layers of " + text(g.hidden));
  require((p.aux_out != nullptr) == (p.aux_columns > 0), "aux_out is there where layers are captured, and null elsewhere");
  require((p.routed_ids != nullptr) == (p.routed_logits != nullptr), "routed_ids and routed_logits are there together");
  require(p.routed_ids == nullptr || is_moe, "routed_ids are asked for, and the layers are dense");
  require((p.scales != nullptr) == is_fp8, "scales are there for FP8 weights, and null for bf16");
  const void* const pointers[] = {
      p.layers, p.maps, p.kv, p.tiles, p.embedding, p.final_norm, p.cos_sin,
      p.input_ids, p.positions, p.seq_lens, p.req_pool_indices, p.out_cache_loc, p.req_to_token,
      p.handover, p.hidden_out,
      p.sync, p.fault, p.executed_mirror,
  };
  for (const void* pointer : pointers) {
    require(pointer != nullptr, "a pointer of the parameters is null");
  }
}

}  // namespace sgl_lowlatency::launch
