// k1 and k2, the two launches of a layer on AMD.
#include "bindings/rank_params.hpp"

#include <map>

#include "emulation/monokernel.hpp"
#include "launch/monokernel.hpp"

namespace sgl_lowlatency {

void bind_monokernel(py::module_& m) {
  py::module_ a = m.attr("abi").cast<py::module_>();
#define SGL_CONSTANT(name) a.attr(#name) = py::int_(static_cast<int64_t>(abi::name))
  SGL_CONSTANT(kMaxMonoRows); SGL_CONSTANT(kMfmaK); SGL_CONSTANT(kItemColumns); SGL_CONSTANT(kBatchTokens); SGL_CONSTANT(kMonoExchanges);
  SGL_CONSTANT(kMaxMonoExperts); SGL_CONSTANT(kMaxMonoTopK); SGL_CONSTANT(kMonoThreads);
#undef SGL_CONSTANT
  a.attr("kIsas") = std::map<std::string, int32_t>{{"gfx942", abi::kGfx942}, {"gfx950", abi::kGfx950}};
  a.attr("kK1ParamsBytes") = py::int_(sizeof(abi::K1Params));
  a.attr("kK2ParamsBytes") = py::int_(sizeof(abi::K2Params));
  a.attr("kMonoStateBytes") = py::int_(sizeof(abi::MonoState));
  a.attr("kMonoExecutedOffset") = py::int_(offsetof(abi::MonoState, executed));
  py::class_<abi::MonoHandover>(a, "MonoHandover")
#define SGL_FIELD(name) .def_readonly(#name, &abi::MonoHandover::name)
      SGL_FIELD(qkv) SGL_FIELD(qkv_bytes) SGL_FIELD(k2) SGL_FIELD(attention_out) SGL_FIELD(mid) SGL_FIELD(logits) SGL_FIELD(activation)
      SGL_FIELD(partial_out) SGL_FIELD(partial_max_sum) SGL_FIELD(total_bytes);
#undef SGL_FIELD
  m.def("mono_handover", &abi::mono_handover, py::arg("geometry"), py::arg("rows"), py::arg("max_rows"), py::arg("grid"), py::arg("rows_per_request"),
        "Hand-over words of a layer's two launches");
  m.def("mono_lds_bytes", [](int32_t isa) { return abi::lds_bytes(static_cast<abi::Isa>(isa)); }, py::arg("isa"), "Shared memory of a workgroup");

  py::class_<abi::MonoLaunch> launch(a, "MonoLaunch");
  launch.def(py::init([] { return abi::MonoLaunch{}; }))
#define SGL_FIELD(name) .def_readwrite(#name, &abi::MonoLaunch::name)
      SGL_FIELD(geometry) SGL_FIELD(grid) SGL_FIELD(rows) SGL_FIELD(rows_per_request) SGL_FIELD(layer) SGL_FIELD(rank) SGL_FIELD(deadline_ns)
      SGL_FIELD(at) SGL_FIELD(symmetric)
#undef SGL_FIELD
      .def_property("isa", [](const abi::MonoLaunch& l) { return static_cast<int32_t>(l.isa); },
                    [](abi::MonoLaunch& l, int32_t isa) { l.isa = static_cast<abi::Isa>(isa); })
      .def("set_workspace", &set_workspace<abi::MonoLaunch>, py::arg("rank"), py::arg("address"));
#define SGL_POINTER(name) pointer_property(launch, #name, &abi::MonoLaunch::name)
  SGL_POINTER(handover); SGL_POINTER(state); SGL_POINTER(fault);
#undef SGL_POINTER
  const auto as_bytes = [](const auto& params) { return py::bytes(reinterpret_cast<const char*>(&params), sizeof(params)); };

  py::class_<abi::K1Params> k1(a, "K1Params");
  k1.def(py::init([] { return abi::K1Params{}; }))
      .def_readwrite("launch", &abi::K1Params::launch)
      .def("to_bytes", [as_bytes](const abi::K1Params& p) {
        launch::check_k1(p);
        return as_bytes(p);
      }, "As a launcher passes them; raises ValueError, naming what does not fit");
#define SGL_POINTER(name) pointer_property(k1, #name, &abi::K1Params::name)
  SGL_POINTER(x); SGL_POINTER(residual); SGL_POINTER(residual_out); SGL_POINTER(input_norm); SGL_POINTER(qkv); SGL_POINTER(q_norm);
  SGL_POINTER(k_norm); SGL_POINTER(cos_sin); SGL_POINTER(positions); SGL_POINTER(out_cache_loc); SGL_POINTER(k_pool); SGL_POINTER(v_pool);
  SGL_POINTER(q_out);
#undef SGL_POINTER
  py::class_<abi::K2Params> k2(a, "K2Params");
  k2.def(py::init([] { return abi::K2Params{}; }))
      .def_readwrite("launch", &abi::K2Params::launch).def_readwrite("counted_tokens", &abi::K2Params::counted_tokens)
      .def_readwrite("ends_step", &abi::K2Params::ends_step)
      .def("to_bytes", [as_bytes](const abi::K2Params& p) {
        launch::check_k2(p);
        return as_bytes(p);
      }, "As a launcher passes them; raises ValueError, naming what does not fit");
#define SGL_POINTER(name) pointer_property(k2, #name, &abi::K2Params::name)
  SGL_POINTER(q); SGL_POINTER(k_pool); SGL_POINTER(v_pool); SGL_POINTER(seq_lens); SGL_POINTER(req_pool_indices); SGL_POINTER(req_to_token);
  SGL_POINTER(out_proj); SGL_POINTER(post_norm); SGL_POINTER(router); SGL_POINTER(gate_up); SGL_POINTER(down); SGL_POINTER(residual);
  SGL_POINTER(residual_out); SGL_POINTER(x_out); SGL_POINTER(executed_mirror); SGL_POINTER(routed_ids); SGL_POINTER(routed_logits);
#undef SGL_POINTER

#ifdef SGL_LOWLATENCY_WITH_CUDA
  m.def("k1_launch_cuda", &launch::k1_cuda, py::arg("params"), py::arg("stream"), py::call_guard<py::gil_scoped_release>());
  m.def("k2_launch_cuda", &launch::k2_cuda, py::arg("params"), py::arg("stream"), py::call_guard<py::gil_scoped_release>());
  m.def("monokernel_max_blocks", &launch::monokernel_max_blocks, "Co-resident blocks of the current device");
#endif
  m.def(
      "monokernel_emulate",
      [](const std::vector<std::vector<emulation::MonoStep>>& launches, const std::vector<uint32_t>& slowness, uint64_t seed, int32_t planted,
         int32_t starvation, const std::vector<RegionTuple>& regions, bool is_shared) {
        std::vector<emulation::MonoStream> streams(launches.size());
        for (size_t i = 0; i < launches.size(); ++i) streams[i] = {launches[i], i < slowness.size() ? slowness[i] : 1};
        emulation::Options options = emulation_options(seed, planted, starvation, regions);
        options.is_shared = is_shared;
        py::gil_scoped_release release;
        return emulation::monokernel(streams, options);
      },
      py::arg("launches"), py::arg("slowness") = std::vector<uint32_t>{}, py::arg("seed") = 0, py::arg("planted") = 0, py::arg("starvation") = -1,
      py::arg("regions") = std::vector<RegionTuple>{}, py::arg("is_shared") = false,
      "Runs the streams of several emulated GPUs, each a list of K1Params and K2Params, at the same time. is_shared: other ranks are other processes");
}

}  // namespace sgl_lowlatency
