// A hyper-connection of mHC, as kernels that close one are told of it.
#include "bindings/bindings.hpp"

#include "sgl_lowlatency/abi/hyper_connection.hpp"

namespace sgl_lowlatency {

void bind_hyper_connection(py::module_& m) {
  py::module_ a = m.attr("abi").cast<py::module_>();
#define SGL_CONSTANT(name) a.attr(#name) = py::int_(static_cast<int64_t>(abi::name))
  SGL_CONSTANT(kStreams); SGL_CONSTANT(kMixes); SGL_CONSTANT(kMixColumns); SGL_CONSTANT(kMixWords);
#undef SGL_CONSTANT
  py::class_<abi::HyperConnection> hyper(a, "HyperConnection");
#define SGL_FIELD(name) hyper.def_readwrite(#name, &abi::HyperConnection::name)
  SGL_FIELD(sinkhorn_iterations); SGL_FIELD(mix_eps); SGL_FIELD(mix_rms_eps);
#undef SGL_FIELD
#define SGL_POINTER(name) pointer_property(hyper, #name, &abi::HyperConnection::name)
  SGL_POINTER(streams); SGL_POINTER(mix); SGL_POINTER(mix_scale); SGL_POINTER(mix_base); SGL_POINTER(streams_out); SGL_POINTER(coefficients);
#undef SGL_POINTER
}

}  // namespace sgl_lowlatency
