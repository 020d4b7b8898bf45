// attention_in.
#include "bindings/bindings.hpp"

#include "emulation/attention_in.hpp"
#include "launch/attention_in.hpp"

namespace sgl_lowlatency {

void bind_attention_in(py::module_& m) {
  py::module_ a = m.attr("abi").cast<py::module_>();
#define SGL_CONSTANT(name) a.attr(#name) = py::int_(static_cast<int64_t>(abi::name))
  SGL_CONSTANT(kHeadDim); SGL_CONSTANT(kHeadRope); SGL_CONSTANT(kKvGroup); SGL_CONSTANT(kKvDataBytes); SGL_CONSTANT(kKvScaleBytes);
  SGL_CONSTANT(kAttnInMaxLora); SGL_CONSTANT(kAttnInA); SGL_CONSTANT(kAttnInB);
#undef SGL_CONSTANT
  a.attr("kAttnInEdgeNames") = std::vector<std::string>{"combined", "squares", "partial", "latent", "latent_squares"};
  a.attr("kAttnInOpNames") = std::vector<std::string>{"wqkv_a", "wq_b"};
  a.attr("kAttnInPointNames") = std::vector<std::string>{"begin", "combine", "wqkv_a", "join", "wq_b", "rows"};
  static_assert(abi::kNumAttnInPoints == 6, "a name each");
  py::class_<abi::AttnInGeometry>(a, "AttnInGeometry")
      .def(py::init([](int32_t hidden, int32_t lora, int32_t heads) { return abi::AttnInGeometry{hidden, lora, heads}; }), py::arg("hidden"),
           py::arg("lora"), py::arg("heads"));
  py::class_<abi::AttnInHandover>(a, "AttnInHandover")
#define SGL_FIELD(name) .def_readonly(#name, &abi::AttnInHandover::name)
      SGL_FIELD(combined) SGL_FIELD(squares) SGL_FIELD(partial) SGL_FIELD(latent) SGL_FIELD(latent_squares) SGL_FIELD(total_words);
#undef SGL_FIELD
  m.def("attn_in_smem", &abi::attn_in_smem, py::arg("geometry"), py::arg("rows"), "Shared memory of a block of attention_in");
  m.def("attn_in_handover", &abi::attn_in_handover, py::arg("geometry"), py::arg("rows"), py::arg("grid"),
        "Word offsets of one generation of its hand-over");
  m.def(
      "attn_in_share",
      [](const abi::AttnInGeometry& geometry, int32_t op, int32_t block, int32_t grid) {
        const abi::TileRange share = abi::attn_in_share(geometry, static_cast<abi::AttnInOp>(op), block, grid);
        return std::make_pair(share.begin, share.count);
      },
      py::arg("geometry"), py::arg("op"), py::arg("block"), py::arg("grid"), "(begin, count) of a block's units of an op");
  py::class_<abi::AttentionInParams> params(a, "AttentionInParams");
  params.def(py::init([] { return abi::AttentionInParams{}; }))
      .def("set_scales", [](abi::AttentionInParams& p, uintptr_t wqkv_a, uintptr_t wq_b) {
        p.scales[abi::kAttnInA] = reinterpret_cast<const float*>(wqkv_a);
        p.scales[abi::kAttnInB] = reinterpret_cast<const float*>(wq_b);
      }, py::arg("wqkv_a"), py::arg("wq_b"))
#define SGL_FIELD(name) .def_readwrite(#name, &abi::AttentionInParams::name)
      SGL_FIELD(rows) SGL_FIELD(geometry) SGL_FIELD(norm_eps) SGL_FIELD(q_norm_eps) SGL_FIELD(kv_norm_eps) SGL_FIELD(max_position)
      SGL_FIELD(pre_stride) SGL_FIELD(q_stride) SGL_FIELD(page_size) SGL_FIELD(num_pages) SGL_FIELD(page_bytes) SGL_FIELD(shared)
      SGL_FIELD(deadline_ns) SGL_FIELD(rank) SGL_FIELD(generation_words);
#undef SGL_FIELD
#define SGL_POINTER(name) pointer_property(params, #name, &abi::AttentionInParams::name)
  SGL_POINTER(streams); SGL_POINTER(pre); SGL_POINTER(norm); SGL_POINTER(q_norm); SGL_POINTER(kv_norm); SGL_POINTER(positions); SGL_POINTER(freqs);
  SGL_POINTER(slots); SGL_POINTER(maps); SGL_POINTER(cache); SGL_POINTER(x); SGL_POINTER(q_lora); SGL_POINTER(q); SGL_POINTER(trace);
  SGL_POINTER(workspace); SGL_POINTER(state); SGL_POINTER(executed_mirror); SGL_POINTER(fault);
#undef SGL_POINTER
#ifdef SGL_LOWLATENCY_WITH_CUDA
  m.def("attention_in_launch_cuda", &launch::attention_in_cuda, py::arg("params"), py::arg("grid"), py::arg("stream"),
        py::call_guard<py::gil_scoped_release>());
  m.def("attention_in_max_blocks", &launch::attention_in_max_blocks, py::arg("rows"), py::arg("shared_bytes"),
        "Co-resident blocks of the current device");
#endif
  m.def(
      "attention_in_emulate",
      [](const abi::AttentionInParams& params, int32_t grid, uint64_t seed, int32_t planted, int32_t starvation,
         const std::vector<RegionTuple>& regions) {
        const emulation::Options options = emulation_options(seed, planted, starvation, regions);
        py::gil_scoped_release release;
        return emulation::attention_in(params, grid, options);
      },
      py::arg("params"), py::arg("grid"), py::arg("seed") = 0, py::arg("planted") = 0, py::arg("starvation") = -1,
      py::arg("regions") = std::vector<RegionTuple>{}, "Runs attention_in on the host; regions as in emulation_launch");
}

}  // namespace sgl_lowlatency
