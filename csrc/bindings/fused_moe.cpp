// fused_moe.
#include "bindings/bindings.hpp"

#include "emulation/fused_moe.hpp"
#include "launch/fused_moe.hpp"

namespace sgl_lowlatency {

void bind_fused_moe(py::module_& m) {
  py::module_ a = m.attr("abi").cast<py::module_>();
#define SGL_CONSTANT(name) a.attr(#name) = py::int_(static_cast<int64_t>(abi::name))
  SGL_CONSTANT(kMoeMaxRows); SGL_CONSTANT(kMoeMaxTopK); SGL_CONSTANT(kMoeStepK); SGL_CONSTANT(kMoeMaxScaleByte); SGL_CONSTANT(kMoeSharedCost);
  SGL_CONSTANT(kMoeMaxHidden); SGL_CONSTANT(kMoeMaxIntermediate); SGL_CONSTANT(kMoeSmemBytes);
#undef SGL_CONSTANT
  a.attr("kMoeStateBytes") = py::int_(sizeof(abi::MoeState));
  a.attr("kMoeEdgeNames") = std::vector<std::string>{"logits", "choices", "activation", "output", "mix", "coefficients"};
  a.attr("kMoeOpNames") = std::vector<std::string>{"router", "shared_gate_up", "gate_up", "shared_down", "down"};
  a.attr("kMoePointNames") = std::vector<std::string>{"begin", "router", "shared_gate_up", "routed", "gate_up", "shared_down", "down", "sums"};
  static_assert(abi::kNumMoePoints == 8, "a name each");
  py::class_<abi::MoeGeometry>(a, "MoeGeometry")
      .def(py::init([](int32_t hidden, int32_t intermediate, int32_t num_experts, int32_t top_k) {
             return abi::MoeGeometry{hidden, intermediate, num_experts, top_k};
           }),
           py::arg("hidden"), py::arg("intermediate"), py::arg("num_experts"), py::arg("top_k"));
  py::class_<abi::MoeSmem>(a, "MoeSmem").def_readonly("total_bytes", &abi::MoeSmem::total_bytes).def_readonly("depth", &abi::MoeSmem::depth);
  py::class_<abi::MoeHandover>(a, "MoeHandover")
#define SGL_FIELD(name) .def_readonly(#name, &abi::MoeHandover::name)
      SGL_FIELD(logits) SGL_FIELD(choices) SGL_FIELD(activation) SGL_FIELD(output) SGL_FIELD(mix) SGL_FIELD(coefficients) SGL_FIELD(total_words);
#undef SGL_FIELD
  m.def("moe_smem", &abi::moe_smem, py::arg("geometry"), py::arg("rows"), py::arg("limit") = abi::kMoeSmemBytes,
        "Shared memory of a block of fused_moe, within `limit` bytes where it can be");
  m.def("moe_handover", &abi::moe_handover, py::arg("geometry"), py::arg("rows"), "Word offsets of one generation of fused_moe's hand-over");
  m.def(
      "moe_routed_share",
      [](int32_t total, int32_t shared, int32_t block, int32_t grid) {
        const abi::TileRange share = abi::moe_routed_share(total, shared, block, grid);
        return std::make_pair(share.begin, share.count);
      },
      py::arg("total"), py::arg("shared"), py::arg("block"), py::arg("grid"), "(begin, count) of a block's routed units");
  py::class_<abi::FusedMoeParams> params(a, "FusedMoeParams");
  params.def(py::init([] { return abi::FusedMoeParams{}; }))
#define SGL_FIELD(name) .def_readwrite(#name, &abi::FusedMoeParams::name)
      SGL_FIELD(rows) SGL_FIELD(geometry) SGL_FIELD(routed_scaling) SGL_FIELD(swiglu_limit) SGL_FIELD(alt_token_id) SGL_FIELD(shared)
      SGL_FIELD(deadline_ns) SGL_FIELD(rank) SGL_FIELD(hyper) SGL_FIELD(generation_words);
#undef SGL_FIELD
#define SGL_POINTER(name) pointer_property(params, #name, &abi::FusedMoeParams::name)
  SGL_POINTER(x); SGL_POINTER(bias); SGL_POINTER(bias_alt); SGL_POINTER(token_ids); SGL_POINTER(num_live_rows); SGL_POINTER(maps);
  SGL_POINTER(gate_up_scale); SGL_POINTER(down_scale); SGL_POINTER(shared_gate_up_scale); SGL_POINTER(shared_down_scale); SGL_POINTER(out);
  SGL_POINTER(out_ids);
  SGL_POINTER(out_weights); SGL_POINTER(out_logits); SGL_POINTER(trace); SGL_POINTER(workspace); SGL_POINTER(state); SGL_POINTER(executed_mirror);
  SGL_POINTER(fault);
#undef SGL_POINTER
#ifdef SGL_LOWLATENCY_WITH_CUDA
  m.def("fused_moe_launch_cuda", &launch::fused_moe_cuda, py::arg("params"), py::arg("grid"), py::arg("stream"),
        py::call_guard<py::gil_scoped_release>());
  m.def("fused_moe_max_blocks", &launch::fused_moe_max_blocks, py::arg("shared_bytes"), "Co-resident blocks of the current device");
#endif
  m.def(
      "fused_moe_emulate",
      [](const abi::FusedMoeParams& params, int32_t grid, uint64_t seed, int32_t planted, int32_t starvation,
         const std::vector<RegionTuple>& regions) {
        const emulation::Options options = emulation_options(seed, planted, starvation, regions);
        py::gil_scoped_release release;
        return emulation::fused_moe(params, grid, options);
      },
      py::arg("params"), py::arg("grid"), py::arg("seed") = 0, py::arg("planted") = 0, py::arg("starvation") = -1,
      py::arg("regions") = std::vector<RegionTuple>{}, "Runs fused_moe on the host; regions as in emulation_launch");
}

}  // namespace sgl_lowlatency
