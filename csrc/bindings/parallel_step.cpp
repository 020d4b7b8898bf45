// Tensor-parallel decode_step: a rank's parameters, its launches and their emulation.
#include "bindings/rank_params.hpp"
#include "bindings/step_streams.hpp"

#include <stdexcept>

#include "emulation/parallel_step.hpp"
#include "launch/parallel_step.hpp"
#include "launch/timed_step.hpp"

namespace sgl_lowlatency {
namespace {

// The bytes of a PeerGroup, from the addresses of the ranks' workspaces.
py::bytes pack_peer_group(int32_t rank, const abi::SymmetricLayout& at, const std::vector<uintptr_t>& workspaces) {
  if (workspaces.size() != static_cast<size_t>(at.num_ranks)) {
    throw std::invalid_argument(std::to_string(workspaces.size()) + " workspaces are not those of " + std::to_string(at.num_ranks) + " ranks");
  }
  abi::PeerGroup group{rank, at.num_ranks, {}};
  for (size_t i = 0; i < workspaces.size(); ++i) group.abort[i] = reinterpret_cast<uint64_t*>(workspaces[i] + at.abort);
  return py::bytes(reinterpret_cast<const char*>(&group), sizeof(group));
}

}  // namespace

void bind_parallel_step(py::module_& m) {
  py::module_ a = m.attr("abi").cast<py::module_>();
  a.attr("kPeerCopies") = py::int_(abi::kPeerCopies);
  a.attr("kMaxParallelRows") = py::int_(abi::kMaxParallelRows);
  a.attr("kMaxVirtualRanks") = py::int_(abi::kMaxVirtualRanks);
  a.attr("kPeerGroupBytes") = py::int_(sizeof(abi::PeerGroup));
  a.attr("kFaultGroupOffset") = py::int_(offsetof(abi::FaultRecord, group));
  a.attr("kUsedRowsOffset") = py::int_(offsetof(abi::SymmetricState, used_rows));
#define SGL_CONSTANT(name) a.attr(#name) = py::int_(static_cast<int32_t>(abi::name))
  SGL_CONSTANT(kPeerTiles); SGL_CONSTANT(kPeerEmbedding); SGL_CONSTANT(kPeerOutProj); SGL_CONSTANT(kPeerDown); SGL_CONSTANT(kPeerNothing);
#undef SGL_CONSTANT
  using Params = abi::ParallelStepParams;
  py::class_<Params, abi::DecodeStepParams>(a, "ParallelStepParams")
      .def(py::init([] { return Params{}; }))
      .def(py::init([](const Params& other) { return other; }))
      .def_readwrite("symmetric", &Params::symmetric).def_readwrite("num_tokens", &Params::num_tokens)
      .def_readwrite("vocab_shard", &Params::vocab_shard)
      .def("set_workspace", &set_workspace<Params>, py::arg("rank"), py::arg("address"));
  a.attr("kTimelinePoints") = py::int_(static_cast<int32_t>(abi::kTimelinePoints));
  a.attr("kMaxTimedRows") = py::int_(abi::kMaxTimedRows);
#define SGL_POINT(name) points[#name] = static_cast<int32_t>(abi::kPoint##name)
  py::dict points;
  SGL_POINT(Begin); SGL_POINT(QkvOperand); SGL_POINT(Qkv); SGL_POINT(Attention); SGL_POINT(OutProjOperand); SGL_POINT(OutProj); SGL_POINT(Mid);
  SGL_POINT(GateUpOperand); SGL_POINT(Clears); SGL_POINT(Fence); SGL_POINT(Fenced); SGL_POINT(GateUp); SGL_POINT(DownOperand); SGL_POINT(Down);
  SGL_POINT(End);
#undef SGL_POINT
  a.attr("timeline_points") = points;
  using Timed = abi::TimedStepParams;
  py::class_<Timed, Params>(a, "TimedStepParams")
      .def(py::init([] { return Timed{}; }))
      .def(py::init([](const Timed& other) { return other; }))
      .def_property("timeline", [](const Timed& p) { return reinterpret_cast<uintptr_t>(p.timeline); },
                    [](Timed& p, uintptr_t address) { p.timeline = reinterpret_cast<uint64_t*>(address); });
  m.def("pack_peer_group", &pack_peer_group, py::arg("rank"), py::arg("layout"), py::arg("workspaces"), "The bytes of a PeerGroup");
#ifdef SGL_LOWLATENCY_WITH_CUDA
  m.def("parallel_step_launch_cuda", &launch::parallel_step_cuda, py::arg("params"), py::arg("grid"), py::arg("stream"),
        py::call_guard<py::gil_scoped_release>());
  m.def("virtual_step_launch_cuda", &launch::virtual_step_cuda, py::arg("ranks"), py::arg("grid"), py::arg("stream"),
        py::call_guard<py::gil_scoped_release>());
  m.def("parallel_step_max_blocks", &launch::parallel_step_max_blocks, py::arg("params"), py::arg("is_virtual"),
        "Co-resident blocks of the current device");
  m.def("timed_step_launch_cuda", &launch::timed_step_cuda, py::arg("params"), py::arg("grid"), py::arg("stream"),
        py::call_guard<py::gil_scoped_release>());
  m.def("timed_step_max_blocks", &launch::timed_step_max_blocks, py::arg("params"), "Co-resident blocks of the current device");
#endif
  bind_streams<Params>(m, "parallel_step_emulate", &emulation::parallel_step);
  bind_streams<Timed>(m, "timed_step_emulate", &emulation::parallel_step);
}

}  // namespace sgl_lowlatency
