// Every export of the extension.
#include <map>
#include <sstream>

#include "bindings/bindings.hpp"

namespace sgl_lowlatency {
namespace {

std::map<std::string, std::vector<std::string>> backends() {
  std::map<std::string, std::vector<std::string>> found{{"emulation", {"host"}}};
#ifdef SGL_LOWLATENCY_WITH_CUDA
  std::istringstream archs(SGL_LOWLATENCY_CUDA_ARCHS);  // set by setup.py, separated by spaces
  for (std::string arch; archs >> arch;) found["cuda"].push_back(arch);
#endif
  return found;
}

void bind_module(py::module_& m) {
  m.doc() = "Kernels of sgl-lowlatency: CUDA launches and host emulation, on raw pointers";
  m.def("backends", &backends, "Compiled backends, e.g. {'emulation': ['host'], 'cuda': ['sm_90a']}");
  bind_abi(m);
  bind_decode_step(m);
  bind_bitmap_routing(m);
  bind_draft_sampler(m);
  bind_hyper_connection(m);
  bind_fused_moe(m);
  bind_slice(m);
  bind_attention_out(m);
  bind_attention_in(m);
  bind_symmetric_workspace(m);
  bind_epilogue_multicast(m);
  bind_parallel_step(m);
  bind_parallel_attention_out(m);
  bind_parallel_moe(m);
  bind_monokernel(m);
}

}  // namespace
}  // namespace sgl_lowlatency

PYBIND11_MODULE(_C, m) { sgl_lowlatency::bind_module(m); }
