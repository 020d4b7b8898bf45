// bitmap_routing.
#include "bindings/bindings.hpp"

#include "emulation/bitmap_routing.hpp"
#include "launch/bitmap_routing.hpp"

namespace sgl_lowlatency {

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

}  // namespace sgl_lowlatency
