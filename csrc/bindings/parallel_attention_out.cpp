// Tensor-parallel attention_out: a rank's parameters, its launches and their emulation.
#include "bindings/rank_params.hpp"
#include "bindings/step_streams.hpp"
#include "emulation/parallel_attention_out.hpp"
#include "launch/parallel_attention_out.hpp"

namespace sgl_lowlatency {

void bind_parallel_attention_out(py::module_& m) {
  py::module_ a = m.attr("abi").cast<py::module_>();
  a.attr("kPeerWoB") = py::int_(static_cast<int32_t>(abi::kPeerWoB));
  using Params = abi::ParallelAttentionOutParams;
  bind_rank_params<Params, abi::AttentionOutParams>(a, "ParallelAttentionOutParams");
#ifdef SGL_LOWLATENCY_WITH_CUDA
  m.def("parallel_attention_out_launch_cuda", &launch::parallel_attention_out_cuda, py::arg("params"), py::arg("grid"), py::arg("stream"),
        py::call_guard<py::gil_scoped_release>());
  m.def("virtual_attention_out_launch_cuda", &launch::virtual_attention_out_cuda, py::arg("ranks"), py::arg("grid"), py::arg("stream"),
        py::call_guard<py::gil_scoped_release>());
  m.def("parallel_attention_out_max_blocks", &launch::parallel_attention_out_max_blocks, py::arg("rows"), py::arg("shared_bytes"),
        "Co-resident blocks of the current device");
  m.def("virtual_attention_out_max_blocks", &launch::virtual_attention_out_max_blocks, py::arg("rows"), py::arg("shared_bytes"),
        "Co-resident blocks of the current device");
#endif
  bind_streams<Params>(m, "parallel_attention_out_emulate", &emulation::parallel_attention_out);
}

}  // namespace sgl_lowlatency
