// attention_out.
#include "bindings/bindings.hpp"

#include "emulation/attention_out.hpp"
#include "launch/attention_out.hpp"

namespace sgl_lowlatency {

void bind_attention_out(py::module_& m) {
  py::module_ a = m.attr("abi").cast<py::module_>();
#define SGL_CONSTANT(name) a.attr(#name) = py::int_(static_cast<int64_t>(abi::name))
  SGL_CONSTANT(kAttnOutMaxPanel); SGL_CONSTANT(kAttnOutMaxLatent); SGL_CONSTANT(kAttnOutA); SGL_CONSTANT(kAttnOutB);
#undef SGL_CONSTANT
  a.attr("kAttnOutEdgeNames") = std::vector<std::string>{"mix", "coefficients", "partial", "latent", "output", "squares"};
  a.attr("kAttnOutOpNames") = std::vector<std::string>{"wo_a", "wo_b"};
  a.attr("kAttnOutPointNames") = std::vector<std::string>{"begin", "wo_a", "join", "wo_b", "post", "norm"};
  static_assert(abi::kNumAttnOutPoints == 6, "a name each");
  py::class_<abi::AttnOutGeometry>(a, "AttnOutGeometry")
      .def(py::init([](int32_t hidden, int32_t heads, int32_t head_dim, int32_t rope_dim, int32_t groups, int32_t lora) {
             return abi::AttnOutGeometry{hidden, heads, head_dim, rope_dim, groups, lora};
           }),
           py::arg("hidden"), py::arg("heads"), py::arg("head_dim"), py::arg("rope_dim"), py::arg("groups"), py::arg("lora"));
  py::class_<abi::AttnOutHandover>(a, "AttnOutHandover")
#define SGL_FIELD(name) .def_readonly(#name, &abi::AttnOutHandover::name)
      SGL_FIELD(mix) SGL_FIELD(coefficients) SGL_FIELD(partial) SGL_FIELD(latent) SGL_FIELD(output) SGL_FIELD(squares) SGL_FIELD(total_words);
#undef SGL_FIELD
  m.def("attn_out_smem", &abi::attn_out_smem, py::arg("geometry"), py::arg("rows"), "Shared memory of a block of attention_out");
  m.def("attn_out_handover", &abi::attn_out_handover, py::arg("geometry"), py::arg("rows"), py::arg("grid"),
        "Word offsets of one generation of its hand-over");
  m.def(
      "attn_out_share",
      [](const abi::AttnOutGeometry& geometry, int32_t op, int32_t rows, int32_t block, int32_t grid) {
        const abi::TileRange share = abi::attn_out_share(geometry, static_cast<abi::AttnOutOp>(op), rows, block, grid);
        return std::make_pair(share.begin, share.count);
      },
      py::arg("geometry"), py::arg("op"), py::arg("rows"), py::arg("block"), py::arg("grid"), "(begin, count) of a block's units of an op");
  py::class_<abi::AttentionOutParams> params(a, "AttentionOutParams");
  params.def(py::init([] { return abi::AttentionOutParams{}; }))
#define SGL_FIELD(name) .def_readwrite(#name, &abi::AttentionOutParams::name)
      SGL_FIELD(rows) SGL_FIELD(geometry) SGL_FIELD(hyper) SGL_FIELD(norm_eps)
      SGL_FIELD(max_position) SGL_FIELD(x_stride) SGL_FIELD(shared) SGL_FIELD(deadline_ns) SGL_FIELD(rank) SGL_FIELD(generation_words);
#undef SGL_FIELD
#define SGL_POINTER(name) pointer_property(params, #name, &abi::AttentionOutParams::name)
  SGL_POINTER(x); SGL_POINTER(positions); SGL_POINTER(freqs); SGL_POINTER(norm); SGL_POINTER(maps); SGL_POINTER(scales); SGL_POINTER(out);
  SGL_POINTER(trace); SGL_POINTER(workspace); SGL_POINTER(state); SGL_POINTER(executed_mirror); SGL_POINTER(fault);
#undef SGL_POINTER
#ifdef SGL_LOWLATENCY_WITH_CUDA
  m.def("attention_out_launch_cuda", &launch::attention_out_cuda, py::arg("params"), py::arg("grid"), py::arg("stream"),
        py::call_guard<py::gil_scoped_release>());
  m.def("attention_out_max_blocks", &launch::attention_out_max_blocks, py::arg("rows"), py::arg("shared_bytes"),
        "Co-resident blocks of the current device");
#endif
  m.def(
      "attention_out_emulate",
      [](const abi::AttentionOutParams& params, int32_t grid, uint64_t seed, int32_t planted, int32_t starvation,
         const std::vector<RegionTuple>& regions) {
        const emulation::Options options = emulation_options(seed, planted, starvation, regions);
        py::gil_scoped_release release;
        return emulation::attention_out(params, grid, options);
      },
      py::arg("params"), py::arg("grid"), py::arg("seed") = 0, py::arg("planted") = 0, py::arg("starvation") = -1,
      py::arg("regions") = std::vector<RegionTuple>{}, "Runs attention_out on the host; regions as in emulation_launch");
}

}  // namespace sgl_lowlatency
