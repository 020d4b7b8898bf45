// Structs and constants that host and device share, of decode_step and of every kernel.
#include "bindings/bindings.hpp"

#include <cstring>
#include <map>
#include <stdexcept>

#include "launch/decode_step.hpp"
#include "launch/weight_map.hpp"

namespace sgl_lowlatency {
namespace {

using MatrixTuple = std::tuple<uintptr_t, int32_t, int32_t, int32_t, int32_t>;  // the fields of abi::WeightMatrix

// An array of T from tuples of integers, each field `Word` wide: the bytes of a device table.
template <class T, class Word, size_t kFields>
py::bytes pack_table(const std::vector<std::vector<Word>>& entries) {
  static_assert(sizeof(T) == sizeof(Word) * kFields, "a table entry is its fields and nothing else");
  std::string bytes(entries.size() * sizeof(T), '\0');
  for (size_t i = 0; i < entries.size(); ++i) {
    if (entries[i].size() != kFields) {
      throw std::invalid_argument("entry " + std::to_string(i) + " has " + std::to_string(entries[i].size()) + " fields, not " +
                                  std::to_string(kFields));
    }
    std::memcpy(&bytes[i * sizeof(T)], entries[i].data(), sizeof(T));
  }
  return py::bytes(bytes);
}

// A device table of WeightMaps.
py::bytes pack_weight_maps(const std::vector<MatrixTuple>& matrices, bool is_cuda, abi::WeightBox box) {
  std::string bytes(matrices.size() * sizeof(abi::WeightMap), '\0');
  for (size_t i = 0; i < matrices.size(); ++i) {
    const auto& [weight, num_rows, k_extent, num_parts, element_bytes] = matrices[i];
    const abi::WeightMatrix matrix{reinterpret_cast<const void*>(weight), num_rows, k_extent, num_parts, element_bytes, box};
#ifdef SGL_LOWLATENCY_WITH_CUDA
    const abi::WeightMap map = is_cuda ? launch::encode_weight_map_cuda(matrix) : launch::encode_weight_map_host(matrix);
#else
    if (is_cuda) throw std::invalid_argument("this build has no CUDA kernels");
    const abi::WeightMap map = launch::encode_weight_map_host(matrix);
#endif
    std::memcpy(&bytes[i * sizeof(map)], &map, sizeof(map));
  }
  return py::bytes(bytes);
}

}  // namespace

void bind_abi(py::module_& m) {
  py::module_ a = m.def_submodule("abi", "Constants and structs of abi/decode_step.hpp");
  py::enum_<abi::WeightBox>(a, "WeightBox")
      .value("stage", abi::kBoxStage)
      .value("tall", abi::kBoxTall)
      .value("pair", abi::kBoxPair)
      .value("fp4_pair", abi::kBoxFp4Pair)
      .value("wide", abi::kBoxWide);
#define SGL_CONSTANT(name) a.attr(#name) = py::int_(static_cast<int64_t>(abi::name))
  SGL_CONSTANT(kMaxRows); SGL_CONSTANT(kTileRows); SGL_CONSTANT(kMaxHeadsPerItem); SGL_CONSTANT(kMinItemTokens); SGL_CONSTANT(kItemTokenMultiple);
  SGL_CONSTANT(kWarpTokens); SGL_CONSTANT(kUnwritten); SGL_CONSTANT(kGenerations); SGL_CONSTANT(kClearAhead); SGL_CONSTANT(kPaddingSlot);
  SGL_CONSTANT(kNumConsumerWarps); SGL_CONSTANT(kStageBytes); SGL_CONSTANT(kMaxStages); SGL_CONSTANT(kPanelPadBytes);
  SGL_CONSTANT(kNumEdges); SGL_CONSTANT(kOpHead); SGL_CONSTANT(kOpRouter); SGL_CONSTANT(kScaleBlock); SGL_CONSTANT(kMaxScaledPanelK);
#undef SGL_CONSTANT
  a.attr("kWeightFormats") = std::map<std::string, int32_t>{
      {"bf16", abi::kWeightsBf16}, {"fp8_block", abi::kWeightsFp8Block}, {"fp8_channel", abi::kWeightsFp8Channel}};
  a.attr("kSyncStateBytes") = py::int_(sizeof(abi::SyncState));
  a.attr("kFirstGenerationOffset") = py::int_(offsetof(abi::SyncState, first_generation));
  a.attr("kUsedBytesOffset") = py::int_(offsetof(abi::SyncState, used_bytes));
  a.attr("kFaultRecordBytes") = py::int_(sizeof(abi::FaultRecord));
  a.attr("kFaultKinds") = std::map<std::string, uint32_t>{
      {"edge_deadline", abi::kFaultEdgeDeadline}, {"ring_full", abi::kFaultRingFull},      {"ring_empty", abi::kFaultRingEmpty},
      {"bad_token_id", abi::kFaultBadTokenId},    {"bad_position", abi::kFaultBadPosition}, {"bad_length", abi::kFaultBadLength},
      {"bad_request_row", abi::kFaultBadRequestRow}, {"bad_slot", abi::kFaultBadSlot},
      {"bad_expert_id", abi::kFaultBadExpertId}, {"partial", abi::kFaultPartial}, {"routing", abi::kFaultRouting},
      {"candidate", abi::kFaultCandidate}, {"peer_tile", abi::kFaultPeerTile}, {"peer_abort", abi::kFaultPeerAbort}};
  a.attr("kOpNames") = std::vector<std::string>{"qkv", "out_proj", "gate_up", "down"};
  a.attr("kEdgeNames") = std::vector<std::string>{"qkv", "partial", "attention", "out_proj", "gate_up", "down", "router"};

  py::class_<abi::SmemLayout>(a, "SmemLayout")
      .def_readonly("barriers", &abi::SmemLayout::barriers).def_readonly("row_state", &abi::SmemLayout::row_state)
      .def_readonly("zero_row", &abi::SmemLayout::zero_row).def_readonly("vectors", &abi::SmemLayout::vectors)
      .def_readonly("slots", &abi::SmemLayout::slots)
      .def_readonly("scratch", &abi::SmemLayout::scratch)
      .def_readonly("accumulators", &abi::SmemLayout::accumulators).def_readonly("panel", &abi::SmemLayout::panel)
      .def_readonly("ring", &abi::SmemLayout::ring).def_readonly("total_bytes", &abi::SmemLayout::total_bytes);
  m.def("smem_layout", &abi::smem_layout, py::arg("rows"), py::arg("max_panel_bytes"), py::arg("max_tiles_multi_panel"), py::arg("num_stages"),
        py::arg("routing_bytes") = 0);
  m.def("stage_k", &abi::stage_k, py::arg("element_bytes"), "K elements of one ring stage of weights of 2 bytes (bf16) or 1 (FP8)");
  m.def("panel_row_bytes", &abi::panel_row_bytes, py::arg("k_panel"), "Bytes of one padded row of an activation panel");
  m.def("head_subgroups", &abi::head_subgroups, py::arg("num_q_heads"), py::arg("num_kv_heads"), "Attention items that share one kv head");

  py::class_<abi::Geometry>(a, "Geometry")
      .def(py::init([] { return abi::Geometry{}; }))
#define SGL_FIELD(name) .def_readwrite(#name, &abi::Geometry::name)
      SGL_FIELD(num_layers) SGL_FIELD(hidden) SGL_FIELD(num_q_heads) SGL_FIELD(num_kv_heads) SGL_FIELD(head_dim) SGL_FIELD(intermediate)
      SGL_FIELD(vocab) SGL_FIELD(max_position) SGL_FIELD(kv_slot_stride) SGL_FIELD(req_to_token_stride) SGL_FIELD(num_request_rows)
      SGL_FIELD(num_kv_slots) SGL_FIELD(rms_eps) SGL_FIELD(softmax_scale) SGL_FIELD(num_experts) SGL_FIELD(top_k) SGL_FIELD(moe_intermediate)
      SGL_FIELD(norm_topk_prob);
#undef SGL_FIELD

  m.def("attention_panel_bytes", &abi::attention_panel_bytes, py::arg("head_dim"), "Bytes that attention needs in place of a panel");
  py::class_<abi::HandoverLayout>(a, "HandoverLayout")
#define SGL_FIELD(name) .def_readonly(#name, &abi::HandoverLayout::name)
      SGL_FIELD(qkv) SGL_FIELD(attention_out) SGL_FIELD(mid) SGL_FIELD(activation) SGL_FIELD(end) SGL_FIELD(partial_out)
      SGL_FIELD(partial_max_sum) SGL_FIELD(total_bytes);
#undef SGL_FIELD
  py::class_<abi::StreamLayout>(a, "StreamLayout")
      .def_readonly("x", &abi::StreamLayout::x).def_readonly("scaled", &abi::StreamLayout::scaled)
      .def_readonly("squares", &abi::StreamLayout::squares).def_readonly("total_bytes", &abi::StreamLayout::total_bytes);
  m.def("stream_layout", &abi::stream_layout, py::arg("geometry"), py::arg("rows"), "The residual stream as it is handed over");
  m.def("handover_layout", &abi::handover_layout, py::arg("geometry"), py::arg("rows"), py::arg("grid"), py::arg("rows_per_request"),
        "One generation of the hand-over buffers");
  m.def("router_logits_at", &abi::router_logits_at, py::arg("geometry"), py::arg("at"), py::arg("rows"),
        "A MoE layer's router logits in a generation");
  m.def("item_rows", &abi::item_rows, py::arg("geometry"), py::arg("rows_per_request"), "Rows of a request that share an attention item");
  m.def("item_columns", &abi::item_columns, py::arg("geometry"), py::arg("rows_per_request"), "Most columns of one attention item");
  m.def("request_units", &abi::request_units, py::arg("geometry"), py::arg("rows_per_request"), "Attention items of one split of a request");

  py::class_<abi::MoeLayout>(a, "MoeLayout")
      .def(py::init([] { return abi::MoeLayout{}; }))
      .def_readonly("total_bytes", &abi::MoeLayout::total_bytes);
  m.def("moe_layout", &abi::moe_layout, py::arg("rows"), py::arg("num_experts"), py::arg("top_k"), "A MoE layer's routing in shared memory");
  m.def("even_share", [](int32_t total, int32_t block, int32_t grid) {
    const abi::TileRange share = abi::even_share(total, block, grid);
    return std::make_tuple(share.begin, share.count);
  }, py::arg("total"), py::arg("block"), py::arg("grid"), "(begin, count) of a block's share of tiles whose number the device finds");

  py::class_<abi::FaultRecord>(a, "FaultRecord")
#define SGL_FIELD(name) .def_readonly(#name, &abi::FaultRecord::name)
      SGL_FIELD(kind) SGL_FIELD(rank) SGL_FIELD(sm) SGL_FIELD(block) SGL_FIELD(layer) SGL_FIELD(edge) SGL_FIELD(expected) SGL_FIELD(seen)
      SGL_FIELD(waited_ns);
#undef SGL_FIELD

  py::class_<abi::DecodeStepParams> params(a, "DecodeStepParams");
  params.def(py::init([] { return abi::DecodeStepParams{}; }))
      .def_readwrite("geometry", &abi::DecodeStepParams::geometry).def_readwrite("rows", &abi::DecodeStepParams::rows)
      .def_readwrite("num_stages", &abi::DecodeStepParams::num_stages).def_readwrite("max_panel_bytes", &abi::DecodeStepParams::max_panel_bytes)
      .def_readwrite("max_tiles_multi_panel", &abi::DecodeStepParams::max_tiles_multi_panel).def_readwrite("rank", &abi::DecodeStepParams::rank)
      .def_readwrite("shared", &abi::DecodeStepParams::shared).def_readwrite("deadline_ns", &abi::DecodeStepParams::deadline_ns)
      .def_readwrite("generation_bytes", &abi::DecodeStepParams::generation_bytes).def_readwrite("at", &abi::DecodeStepParams::at)
      .def_readwrite("stream", &abi::DecodeStepParams::stream).def_readwrite("rows_per_request", &abi::DecodeStepParams::rows_per_request)
      .def_readwrite("counted_tokens", &abi::DecodeStepParams::counted_tokens)
      .def_readwrite("aux_columns", &abi::DecodeStepParams::aux_columns)
      .def_readwrite("moe", &abi::DecodeStepParams::moe).def_readwrite("panel_pairs", &abi::DecodeStepParams::panel_pairs)
      .def_property("weights", [](const abi::DecodeStepParams& p) { return static_cast<int32_t>(p.weights); },
                    [](abi::DecodeStepParams& p, int32_t format) { p.weights = static_cast<abi::WeightFormat>(format); })
      .def("set_op", [](abi::DecodeStepParams& p, size_t op, int32_t k_extent, int32_t k_panel, int32_t num_tiles) {
        if (op >= abi::kNumMatrices) {
          throw std::invalid_argument("op " + std::to_string(op) + " is not one of the " + std::to_string(abi::kNumMatrices));
        }
        p.ops[op] = {k_extent, k_panel, num_tiles};
      }, py::arg("op"), py::arg("k_extent"), py::arg("k_panel"), py::arg("num_tiles"));
#define SGL_POINTER(name) pointer_property(params, #name, &abi::DecodeStepParams::name)
  SGL_POINTER(layers); SGL_POINTER(scales); SGL_POINTER(maps); SGL_POINTER(kv); SGL_POINTER(tiles); SGL_POINTER(embedding); SGL_POINTER(final_norm); SGL_POINTER(cos_sin);
  SGL_POINTER(input_ids); SGL_POINTER(positions); SGL_POINTER(seq_lens); SGL_POINTER(req_pool_indices); SGL_POINTER(out_cache_loc);
  SGL_POINTER(req_to_token); SGL_POINTER(handover); SGL_POINTER(hidden_out); SGL_POINTER(aux_out); SGL_POINTER(logits); SGL_POINTER(routed_ids); SGL_POINTER(routed_logits);
  SGL_POINTER(sync); SGL_POINTER(fault); SGL_POINTER(executed_mirror);
#undef SGL_POINTER
  m.def("pack_layer_weights", &pack_table<abi::LayerWeights, int64_t, 6>,
        "Device table of LayerWeights from 5 pointers and aux_column a layer, in the struct's order");
  m.def("pack_layer_scales", &pack_table<abi::LayerScales, uint64_t, 4>, "Device table of LayerScales from 4 pointers a layer");
  m.def("pack_weight_maps", &pack_weight_maps, py::arg("matrices"), py::arg("is_cuda"), py::arg("box") = abi::kBoxStage,
        "Table of WeightMap from (address, num_rows, k_extent, num_parts, element_bytes), for CUDA or for the host dialect, of boxes of this kind");
  m.def("pack_kv_layers", &pack_table<abi::KvLayer, uint64_t, 2>, "Device table of KvLayer from (k, v) pointers");
  m.def("pack_tile_ranges", &pack_table<abi::TileRange, int32_t, 2>, "Device table of TileRange from (begin, count) pairs");
}

}  // namespace sgl_lowlatency
