// Every export of the extension. No logic: raw pointers and stream handles in, values out; no torch ABI.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "emulation/bitmap_routing.hpp"
#include "emulation/decode_step.hpp"
#include "emulation/draft_sampler.hpp"
#include "emulation/epilogue_multicast.hpp"
#include "emulation/selftest.hpp"
#include "launch/bitmap_routing.hpp"
#include "launch/decode_step.hpp"
#include "launch/draft_sampler.hpp"
#include "launch/epilogue_multicast.hpp"
#include "launch/read_bytes.hpp"
#include "launch/symmetric_workspace.hpp"
#include "launch/weight_map.hpp"

namespace py = pybind11;

namespace sgl_lowlatency {
namespace {

using MatrixTuple = std::tuple<uintptr_t, int32_t, int32_t, int32_t, int32_t>;  // the fields of abi::WeightMatrix
// Name, address, bytes and track_reads of memory whose ordering the emulation checks (emulation::Region).
using RegionTuple = std::tuple<std::string, uintptr_t, size_t, bool>;

std::map<std::string, std::vector<std::string>> backends() {
  std::map<std::string, std::vector<std::string>> found{{"emulation", {"host"}}};
#ifdef SGL_LOWLATENCY_WITH_CUDA
  std::istringstream archs(SGL_LOWLATENCY_CUDA_ARCHS);  // set by setup.py, separated by spaces
  for (std::string arch; archs >> arch;) found["cuda"].push_back(arch);
#endif
  return found;
}

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
py::bytes pack_weight_maps(const std::vector<MatrixTuple>& matrices, bool is_cuda) {
  std::string bytes(matrices.size() * sizeof(abi::WeightMap), '\0');
  for (size_t i = 0; i < matrices.size(); ++i) {
    const auto& [weight, num_rows, k_extent, num_parts, element_bytes] = matrices[i];
    const abi::WeightMatrix matrix{reinterpret_cast<const void*>(weight), num_rows, k_extent, num_parts, element_bytes};
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

// A pointer member as an integer property.
template <class Params, class T>
void pointer_property(py::class_<Params>& type, const char* name, T* Params::*member) {
  type.def_property(
      name, [member](const Params& p) { return reinterpret_cast<uintptr_t>(p.*member); },
      [member](Params& p, uintptr_t value) { p.*member = reinterpret_cast<T*>(value); });
}

emulation::Options emulation_options(uint64_t seed, int32_t planted, int32_t starvation, const std::vector<RegionTuple>& regions) {
  emulation::Options options;
  options.seed = seed;
  options.planted = static_cast<dialect::Planted>(planted);
  options.starvation = starvation;
  for (const auto& [name, base, bytes, track_reads] : regions) {
    options.regions.push_back({name.c_str(), reinterpret_cast<void*>(base), bytes, track_reads});
  }
  return options;
}

// The record when a kernel completed it, else None. Acquire: pairs with raise_fault's release of `state`.
py::object read_fault(uintptr_t address) {
  auto* record = reinterpret_cast<abi::FaultRecord*>(address);
  if (__atomic_load_n(&record->state, __ATOMIC_ACQUIRE) != 2) return py::none();
  return py::cast(*record);
}

// Pairs with raise_fault's relaxed poll of `host_ack`, which reads nothing else.
void acknowledge_fault(uintptr_t address) {
  __atomic_store_n(&reinterpret_cast<abi::FaultRecord*>(address)->host_ack, 1u, __ATOMIC_RELEASE);
}

// Relaxed: figures that order nothing; the newest launch may not be in them yet.
std::vector<uint64_t> read_executed(uintptr_t address) {
  const auto* counts = reinterpret_cast<const uint64_t*>(address);
  std::vector<uint64_t> out(abi::kMaxRows + 1);
  for (size_t i = 0; i < out.size(); ++i) out[i] = __atomic_load_n(counts + i, __ATOMIC_RELAXED);
  return out;
}

void bind_abi(py::module_& m) {
  py::module_ a = m.def_submodule("abi", "Constants and structs of abi/decode_step.hpp");
#define SGL_CONSTANT(name) a.attr(#name) = py::int_(static_cast<int64_t>(abi::name))
  SGL_CONSTANT(kMaxRows); SGL_CONSTANT(kTileRows); SGL_CONSTANT(kMaxHeadsPerItem); SGL_CONSTANT(kMinItemTokens); SGL_CONSTANT(kItemTokenMultiple);
  SGL_CONSTANT(kWarpTokens); SGL_CONSTANT(kUnwritten); SGL_CONSTANT(kGenerations); SGL_CONSTANT(kClearAhead);
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
  m.def("pack_weight_maps", &pack_weight_maps, py::arg("matrices"), py::arg("is_cuda"),
        "Table of WeightMap from (address, num_rows, k_extent, num_parts, element_bytes), for CUDA or for the host dialect");
  m.def("pack_kv_layers", &pack_table<abi::KvLayer, uint64_t, 2>, "Device table of KvLayer from (k, v) pointers");
  m.def("pack_tile_ranges", &pack_table<abi::TileRange, int32_t, 2>, "Device table of TileRange from (begin, count) pairs");
}

void bind_bitmap_routing(py::module_& m) {
  py::module_ a = m.attr("abi").cast<py::module_>();
  a.attr("kMaxExperts") = py::int_(abi::kMaxExperts);
  a.attr("kMaxTopK") = py::int_(abi::kMaxTopK);
  a.attr("kExpertWords") = py::int_(abi::kExpertWords);
  a.attr("kActiveCountOffset") = py::int_(offsetof(abi::ActiveExperts, count));
  a.attr("kLogitsTypes") = std::map<std::string, int32_t>{{"float32", abi::kLogitsFloat32}, {"bfloat16", abi::kLogitsBf16}};
  py::class_<abi::RoutingLayout>(a, "RoutingLayout")
#define SGL_FIELD(name) .def_readonly(#name, &abi::RoutingLayout::name)
      SGL_FIELD(active) SGL_FIELD(row_bits) SGL_FIELD(experts) SGL_FIELD(ids) SGL_FIELD(places) SGL_FIELD(weights) SGL_FIELD(out_bytes)
      SGL_FIELD(chosen) SGL_FIELD(total_bytes);
#undef SGL_FIELD
  m.def("routing_layout", &abi::routing_layout, py::arg("rows"), py::arg("num_experts"), py::arg("top_k"), "Byte offsets of a step's routing");
  py::class_<abi::BitmapRoutingParams> params(a, "BitmapRoutingParams");
  params.def(py::init([] { return abi::BitmapRoutingParams{}; }))
#define SGL_FIELD(name) .def_readwrite(#name, &abi::BitmapRoutingParams::name)
      SGL_FIELD(rows) SGL_FIELD(num_experts) SGL_FIELD(top_k) SGL_FIELD(renormalizes) SGL_FIELD(at) SGL_FIELD(logits_stride) SGL_FIELD(rank)
#undef SGL_FIELD
      .def_property("logits_type", [](const abi::BitmapRoutingParams& p) { return static_cast<int32_t>(p.logits_type); },
                    [](abi::BitmapRoutingParams& p, int32_t type) { p.logits_type = static_cast<abi::LogitsType>(type); })
      .def_property("logits", [](const abi::BitmapRoutingParams& p) { return reinterpret_cast<uintptr_t>(p.logits); },
                    [](abi::BitmapRoutingParams& p, uintptr_t value) { p.logits = reinterpret_cast<const void*>(value); });
#define SGL_POINTER(name) pointer_property(params, #name, &abi::BitmapRoutingParams::name)
  SGL_POINTER(ids); SGL_POINTER(weights); SGL_POINTER(num_live_rows); SGL_POINTER(out); SGL_POINTER(fault);
#undef SGL_POINTER
#ifdef SGL_LOWLATENCY_WITH_CUDA
  m.def("bitmap_routing_launch_cuda", &launch::bitmap_routing_cuda, py::arg("params"), py::arg("stream"),
        py::call_guard<py::gil_scoped_release>());
#endif
  m.def(
      "bitmap_routing_emulate",
      [](const abi::BitmapRoutingParams& params, uint64_t seed, int32_t planted, int32_t starvation, const std::vector<RegionTuple>& regions) {
        const emulation::Options options = emulation_options(seed, planted, starvation, regions);
        py::gil_scoped_release release;
        return emulation::bitmap_routing(params, options);
      },
      py::arg("params"), py::arg("seed") = 0, py::arg("planted") = 0, py::arg("starvation") = -1,
      py::arg("regions") = std::vector<RegionTuple>{}, "Runs bitmap_routing on the host; regions as in emulation_launch");
}

// `index` itself, a place among the ranks of a draft.
size_t draft_rank(size_t index) {
  if (index < abi::kMaxDraftRanks) return index;
  throw std::invalid_argument("rank " + std::to_string(index) + " is beyond the " + std::to_string(abi::kMaxDraftRanks));
}

void bind_draft_sampler(py::module_& m) {
  py::module_ a = m.attr("abi").cast<py::module_>();
#define SGL_CONSTANT(name) a.attr(#name) = py::int_(static_cast<int64_t>(abi::name))
  SGL_CONSTANT(kMarkovRank); SGL_CONSTANT(kMaxDraftBatch); SGL_CONSTANT(kMaxDraftRows); SGL_CONSTANT(kMaxGamma); SGL_CONSTANT(kMaxDraftRanks);
  SGL_CONSTANT(kUnitColumns); SGL_CONSTANT(kCandidateWords);
#undef SGL_CONSTANT
  a.attr("kDraftStateBytes") = py::int_(sizeof(abi::DraftState));
  a.attr("kStepLogitsTypes") = std::map<std::string, int32_t>{{"float32", abi::kStepLogitsFloat32}, {"bfloat16", abi::kStepLogitsBf16}};
  m.def("mailbox_words", &abi::mailbox_words, py::arg("gamma"), py::arg("max_batch"), py::arg("senders"),
        "Words of one generation of a rank's mailbox");
  m.def("draft_max_units", &abi::draft_max_units, py::arg("num_units"), py::arg("blocks"), "Most units of one block");
  py::class_<abi::DraftSmem>(a, "DraftSmem").def_readonly("total_bytes", &abi::DraftSmem::total_bytes);
  m.def("draft_smem", &abi::draft_smem, py::arg("rows"), py::arg("batch"), py::arg("k_panel"), py::arg("max_units"),
        "Shared memory of a block");

  py::class_<abi::DraftRank> rank(a, "DraftRank");
  rank.def(py::init([] { return abi::DraftRank{}; }))
#define SGL_FIELD(name) .def_readwrite(#name, &abi::DraftRank::name)
      SGL_FIELD(vocab_begin) SGL_FIELD(vocab_count) SGL_FIELD(num_head_tiles) SGL_FIELD(num_units);
#undef SGL_FIELD
#define SGL_POINTER(name) pointer_property(rank, #name, &abi::DraftRank::name)
  SGL_POINTER(maps); SGL_POINTER(base_logits); SGL_POINTER(draft_tokens); SGL_POINTER(noise_offset); SGL_POINTER(state);
#undef SGL_POINTER

  py::class_<abi::DraftSamplerParams> params(a, "DraftSamplerParams");
  params.def(py::init([] { return abi::DraftSamplerParams{}; }))
#define SGL_FIELD(name) .def_readwrite(#name, &abi::DraftSamplerParams::name)
      SGL_FIELD(batch) SGL_FIELD(gamma) SGL_FIELD(max_batch) SGL_FIELD(hidden) SGL_FIELD(k_panel) SGL_FIELD(vocab) SGL_FIELD(has_norm)
      SGL_FIELD(rms_eps) SGL_FIELD(greedy) SGL_FIELD(num_ranks) SGL_FIELD(num_local_ranks) SGL_FIELD(first_rank) SGL_FIELD(max_units)
      SGL_FIELD(shared) SGL_FIELD(anchor_stride) SGL_FIELD(rounds_bias)
      SGL_FIELD(deadline_ns) SGL_FIELD(noise_key)
#undef SGL_FIELD
      .def_property("step_logits_type", [](const abi::DraftSamplerParams& p) { return static_cast<int32_t>(p.step_logits_type); },
                    [](abi::DraftSamplerParams& p, int32_t type) { p.step_logits_type = static_cast<abi::StepLogitsType>(type); })
      .def("set_rank", [](abi::DraftSamplerParams& p, size_t index, const abi::DraftRank& of) { p.ranks[draft_rank(index)] = of; })
      .def("set_peer", [](abi::DraftSamplerParams& p, size_t index, uintptr_t mailbox, uintptr_t step_logits) {
        p.peers[draft_rank(index)] = {reinterpret_cast<uint32_t*>(mailbox), reinterpret_cast<void*>(step_logits)};
      });
#define SGL_POINTER(name) pointer_property(params, #name, &abi::DraftSamplerParams::name)
  SGL_POINTER(hidden_states); SGL_POINTER(norm); SGL_POINTER(anchor_tokens); SGL_POINTER(step_temperatures); SGL_POINTER(markov_w1);
  SGL_POINTER(fault);
#undef SGL_POINTER
#ifdef SGL_LOWLATENCY_WITH_CUDA
  m.def("draft_sampler_launch_cuda", &launch::draft_sampler_cuda, py::arg("params"), py::arg("grid"), py::arg("stream"),
        py::call_guard<py::gil_scoped_release>());
  m.def("draft_sampler_max_blocks", &launch::draft_sampler_max_blocks, py::arg("params"), "Co-resident blocks of the current device");
#endif
  m.def(
      "draft_sampler_emulate",
      [](const abi::DraftSamplerParams& params, int32_t grid, uint64_t seed, int32_t planted, int32_t starvation,
         const std::vector<RegionTuple>& regions) {
        const emulation::Options options = emulation_options(seed, planted, starvation, regions);
        py::gil_scoped_release release;
        return emulation::draft_sampler(params, grid, options);
      },
      py::arg("params"), py::arg("grid"), py::arg("seed") = 0, py::arg("planted") = 0, py::arg("starvation") = -1,
      py::arg("regions") = std::vector<RegionTuple>{}, "Runs draft_sampler on the host; regions as in emulation_launch");
}

void bind_symmetric_workspace(py::module_& m) {
  py::module_ a = m.attr("abi").cast<py::module_>();
  a.attr("kMaxRanks") = py::int_(abi::kMaxRanks);
  a.attr("kParities") = py::int_(abi::kParities);
  a.attr("kRendezvousBytes") = py::int_(sizeof(abi::Rendezvous));
  a.attr("kSymmetricStateBytes") = py::int_(sizeof(abi::SymmetricState));
  a.attr("kLaunchesOffset") = py::int_(offsetof(abi::SymmetricState, launches));
  py::class_<abi::SymmetricLayout>(a, "SymmetricLayout")
#define SGL_FIELD(name) .def_readonly(#name, &abi::SymmetricLayout::name)
      SGL_FIELD(num_ranks) SGL_FIELD(max_rows) SGL_FIELD(hidden) SGL_FIELD(rendezvous) SGL_FIELD(abort) SGL_FIELD(state) SGL_FIELD(tiles)
      SGL_FIELD(parity_bytes) SGL_FIELD(total_bytes);
#undef SGL_FIELD
  m.def("symmetric_layout", &abi::symmetric_layout, py::arg("num_ranks"), py::arg("max_rows"), py::arg("hidden"),
        "Byte offsets of a rank's workspace");
  m.def("abort_reason", [](uint64_t word) {
    const abi::AbortReason reason = abi::abort_reason(word);
    return std::make_tuple(reason.waiter, reason.awaited, reason.layer, reason.tile);
  }, py::arg("word"), "(waiter, awaited, layer, tile) of an abort word");
  m.def("pack_rendezvous", [](uint64_t address, uint64_t total_bytes, const std::string& terms, int32_t rank, int32_t num_ranks) {
    abi::Rendezvous block{abi::kRendezvousMagic, address, total_bytes, {}, rank, num_ranks};
    if (terms.size() != sizeof(block.terms)) throw std::invalid_argument("terms: " + std::to_string(terms.size()) + " bytes are no SHA-256");
    std::memcpy(block.terms, terms.data(), sizeof(block.terms));
    return py::bytes(reinterpret_cast<const char*>(&block), sizeof(block));
  }, py::arg("address"), py::arg("total_bytes"), py::arg("terms"), py::arg("rank"), py::arg("num_ranks"), "The bytes of a Rendezvous");
#ifdef SGL_LOWLATENCY_WITH_CUDA
  m.def("allocate_symmetric", &launch::allocate_symmetric, py::arg("bytes"), "Device memory that other processes may map, every byte 0xff");
  m.def("free_symmetric", &launch::free_symmetric, py::arg("pointer"));
  m.def("ipc_handle", [](uintptr_t pointer) { return py::bytes(launch::ipc_handle(pointer)); }, py::arg("pointer"));
  m.def("open_ipc", &launch::open_ipc, py::arg("handle"), "Maps another process's memory");
  m.def("close_ipc", &launch::close_ipc, py::arg("pointer"));
  m.def("copy_to_device", &launch::copy_to_device, py::arg("to"), py::arg("bytes"));
  m.def("copy_from_device", [](uintptr_t from, size_t bytes) { return py::bytes(launch::copy_from_device(from, bytes)); }, py::arg("from"),
        py::arg("bytes"));
#endif
}

void bind_epilogue_multicast(py::module_& m) {
  py::module_ a = m.attr("abi").cast<py::module_>();
  a.attr("kMaxPushedRows") = py::int_(abi::kMaxPushedRows);
  a.attr("kMaxReducedHidden") = py::int_(abi::kMaxReducedHidden);
  using Params = abi::EpilogueMulticastParams;
  py::class_<Params> params(a, "EpilogueMulticastParams");
  params.def(py::init([] { return Params{}; }))
      .def(py::init([](const Params& other) { return other; }))
#define SGL_FIELD(name) .def_readwrite(#name, &Params::name)
      SGL_FIELD(product) SGL_FIELD(at) SGL_FIELD(ranks_in_launch) SGL_FIELD(blocks_per_rank) SGL_FIELD(layer) SGL_FIELD(rms_eps)
#undef SGL_FIELD
      .def("set_workspace", [](Params& p, size_t rank, uintptr_t address) {
        if (rank >= abi::kMaxRanks) throw std::invalid_argument("rank " + std::to_string(rank) + " is not below " + std::to_string(abi::kMaxRanks));
        p.workspaces[rank] = reinterpret_cast<char*>(address);
      }, py::arg("rank"), py::arg("address"))
      .def("set_tensors", [](Params& p, size_t index, uintptr_t input, uintptr_t residual, uintptr_t sum, uintptr_t normed) {
        if (index >= abi::kMaxRanks) throw std::invalid_argument("index " + std::to_string(index) + " is not below " + std::to_string(abi::kMaxRanks));
        abi::RankTensors& tensors = p.tensors[index];
        tensors.input = reinterpret_cast<const abi::bf16*>(input);
        tensors.residual = reinterpret_cast<const abi::bf16*>(residual);
        tensors.sum = reinterpret_cast<abi::bf16*>(sum);
        tensors.normed = reinterpret_cast<abi::bf16*>(normed);
      }, py::arg("index"), py::arg("input"), py::arg("residual"), py::arg("sum"), py::arg("normed"));
  pointer_property(params, "norm_weight", &Params::norm_weight);
  pointer_property(params, "multicast", &Params::multicast);
#ifdef SGL_LOWLATENCY_WITH_CUDA
  m.def("epilogue_multicast_launch_cuda", &launch::epilogue_multicast_cuda, py::arg("params"), py::arg("stream"),
        py::call_guard<py::gil_scoped_release>());
#endif
  m.def(
      "epilogue_multicast_emulate",
      [](const std::vector<std::vector<Params>>& launches, const std::vector<uint32_t>& slowness, uint64_t seed, int32_t planted, int32_t starvation,
         const std::vector<RegionTuple>& regions, const std::vector<std::tuple<uintptr_t, size_t, std::vector<uintptr_t>>>& multicasts) {
        emulation::Options options = emulation_options(seed, planted, starvation, regions);
        for (const auto& [base, bytes, targets] : multicasts) {
          options.multicasts.push_back({reinterpret_cast<void*>(base), bytes, {}});
          for (const uintptr_t target : targets) options.multicasts.back().targets.push_back(reinterpret_cast<void*>(target));
        }
        std::vector<emulation::EpilogueStream> streams(launches.size());
        for (size_t i = 0; i < launches.size(); ++i) streams[i] = {launches[i], i < slowness.size() ? slowness[i] : 1};
        py::gil_scoped_release release;
        return emulation::epilogue_multicast(streams, options);
      },
      py::arg("launches"), py::arg("slowness") = std::vector<uint32_t>{}, py::arg("seed") = 0, py::arg("planted") = 0, py::arg("starvation") = -1,
      py::arg("regions") = std::vector<RegionTuple>{},
      py::arg("multicasts") = std::vector<std::tuple<uintptr_t, size_t, std::vector<uintptr_t>>>{},
      "Runs the streams of several emulated GPUs, each a list of launches, at the same time. regions as in emulation_launch; multicasts: (address, "
      "bytes, workspaces)");
}

void bind_emulation(py::module_& m) {
  py::class_<emulation::Race>(m, "Race")
      .def_property_readonly("kind", [](const emulation::Race& r) { return std::string(emulation::name(r.kind)); })
      .def_property_readonly("missing", [](const emulation::Race& r) { return std::string(emulation::name(r.missing)); })
#define SGL_FIELD(name) .def_readonly(#name, &emulation::Race::name)
      SGL_FIELD(region) SGL_FIELD(offset) SGL_FIELD(bytes) SGL_FIELD(first_block) SGL_FIELD(first_warp) SGL_FIELD(first_lane)
      SGL_FIELD(second_block) SGL_FIELD(second_warp) SGL_FIELD(second_lane) SGL_FIELD(stale) SGL_FIELD(first_rank) SGL_FIELD(second_rank);
#undef SGL_FIELD
  py::class_<emulation::Report>(m, "EmulationReport")
      .def_property_readonly("status", [](const emulation::Report& r) { return std::string(emulation::name(r.status)); })
#define SGL_FIELD(name) .def_readonly(#name, &emulation::Report::name)
      SGL_FIELD(message) SGL_FIELD(switches) SGL_FIELD(slices) SGL_FIELD(virtual_ns) SGL_FIELD(num_races) SGL_FIELD(races);
#undef SGL_FIELD
  m.def(
      "emulation_launch",
      [](const abi::DecodeStepParams& params, int32_t grid, uint64_t seed, int32_t planted, int32_t starvation,
         const std::vector<RegionTuple>& regions) {
        const emulation::Options options = emulation_options(seed, planted, starvation, regions);
        py::gil_scoped_release release;
        return emulation::decode_step(params, grid, options);
      },
      py::arg("params"), py::arg("grid"), py::arg("seed") = 0, py::arg("planted") = 0, py::arg("starvation") = -1,
      py::arg("regions") = std::vector<RegionTuple>{},
      "Runs decode_step on the host. regions: (name, address, bytes, track_reads) of memory whose ordering is checked");
  m.def("emulation_selftest", &emulation::selftest, py::arg("name"), py::arg("seed"));
}

void bind_module(py::module_& m) {
  m.doc() = "Kernels of sgl-lowlatency: CUDA launches and host emulation, on raw pointers";
  m.def("backends", &backends, "Compiled backends, e.g. {'emulation': ['host'], 'cuda': ['sm_90a']}");
  bind_abi(m);
  bind_emulation(m);
  bind_bitmap_routing(m);
  bind_draft_sampler(m);
  bind_symmetric_workspace(m);
  bind_epilogue_multicast(m);
  m.def("read_fault", &read_fault, py::arg("address"), "The completed FaultRecord at a host-visible address, or None");
  m.def("acknowledge_fault", &acknowledge_fault, py::arg("address"), "Lets the kernel that wrote the record trap");
  m.def("read_executed", &read_executed, py::arg("address"), "Completed launches by rows, [kMaxRows + 1]");
#ifdef SGL_LOWLATENCY_WITH_CUDA
  m.def("decode_step_launch_cuda", &launch::decode_step_cuda, py::arg("params"), py::arg("grid"), py::arg("stream"),
        py::call_guard<py::gil_scoped_release>());
  m.def("decode_step_max_blocks", &launch::decode_step_max_blocks, py::arg("params"), "Co-resident blocks of the current device");
  m.def("read_bytes_cuda", &launch::read_bytes_cuda, py::arg("begin"), py::arg("bytes"), py::arg("out"), py::arg("stream"),
        "Exclusive or of all 32-bit words of device memory, into a uint32: measures read bandwidth");
  m.def("allocate_host_visible", &launch::allocate_host_visible, py::arg("bytes"), "Zeroed host memory that the device reads and writes");
  m.def("free_host_visible", &launch::free_host_visible, py::arg("pointer"));
#endif
}

}  // namespace
}  // namespace sgl_lowlatency

PYBIND11_MODULE(_C, m) { sgl_lowlatency::bind_module(m); }
