// What the slices, attention_in and attention_out, have alike.
#include "bindings/bindings.hpp"

#include "sgl_lowlatency/abi/slice.hpp"

namespace sgl_lowlatency {

void bind_slice(py::module_& m) {
  py::module_ a = m.attr("abi").cast<py::module_>();
#define SGL_CONSTANT(name) a.attr(#name) = py::int_(static_cast<int64_t>(abi::name))
  SGL_CONSTANT(kSliceMaxRows); SGL_CONSTANT(kSliceScaleBlock);
#undef SGL_CONSTANT
  py::class_<abi::SliceSmem>(a, "SliceSmem")
      .def_readonly("total_bytes", &abi::SliceSmem::total_bytes).def_readonly("num_stages", &abi::SliceSmem::num_stages)
      .def_readonly("panel_k", &abi::SliceSmem::panel_k);
}

}  // namespace sgl_lowlatency
