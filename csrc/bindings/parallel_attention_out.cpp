// Tensor-parallel attention_out: a rank's parameters, its launches and their emulation.
#include "bindings/step_streams.hpp"

#include <stdexcept>

#include "emulation/parallel_attention_out.hpp"
#include "launch/parallel_attention_out.hpp"

namespace sgl_lowlatency {

void bind_parallel_attention_out(py::module_& m) {
  py::module_ a = m.attr("abi").cast<py::module_>();
  a.attr("kPeerWoB") = py::int_(static_cast<int32_t>(abi::kPeerWoB));
  using Params = abi::ParallelAttentionOutParams;
  py::class_<Params, abi::AttentionOutParams>(a, "ParallelAttentionOutParams")
      .def(py::init([] { return Params{}; }))
      .def(py::init([](const Params& other) { return other; }))
      .def_readwrite("symmetric", &Params::symmetric).def_readwrite("layer", &Params::layer)
      .def("set_workspace", [](Params& p, size_t rank, uintptr_t address) {
        if (rank >= abi::kMaxRanks) throw std::invalid_argument("rank " + std::to_string(rank) + " is not below " + std::to_string(abi::kMaxRanks));
        p.workspaces[rank] = reinterpret_cast<char*>(address);
      }, py::arg("rank"), py::arg("address"));
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
