// Tensor-parallel fused_moe: a rank's parameters, its launches and their emulation.
#include "bindings/rank_params.hpp"

#include <stdexcept>

#include "emulation/parallel_moe.hpp"
#include "launch/parallel_moe.hpp"

namespace sgl_lowlatency {

void bind_parallel_moe(py::module_& m) {
  py::module_ a = m.attr("abi").cast<py::module_>();
  a.attr("kPeerExperts") = py::int_(static_cast<int32_t>(abi::kPeerExperts));
  using Params = abi::ParallelMoeParams;
  bind_rank_params<Params, abi::FusedMoeParams>(a, "ParallelMoeParams");
#ifdef SGL_LOWLATENCY_WITH_CUDA
  m.def("parallel_moe_launch_cuda", &launch::parallel_moe_cuda, py::arg("params"), py::arg("grid"), py::arg("stream"),
        py::call_guard<py::gil_scoped_release>());
  m.def("virtual_moe_launch_cuda", &launch::virtual_moe_cuda, py::arg("ranks"), py::arg("grid"), py::arg("stream"),
        py::call_guard<py::gil_scoped_release>());
  m.def("parallel_moe_max_blocks", &launch::parallel_moe_max_blocks, py::arg("shared_bytes"), py::arg("is_virtual"),
        "Co-resident blocks of the current device");
#endif
  m.def("check_virtual_moe", [](const std::vector<Params>& ranks, int32_t grid) { launch::virtual_moe_ranks(ranks, grid); }, py::arg("ranks"),
        py::arg("grid"), "Raises ValueError for ranks that are not those of one launch");
  m.def(
      "parallel_moe_emulate",
      [](const std::vector<std::vector<Params>>& launches, const std::vector<int32_t>& grids, const std::vector<uint32_t>& slowness, uint64_t seed,
         int32_t planted, int32_t starvation, const std::vector<RegionTuple>& regions, bool is_shared) {
        if (grids.size() != launches.size()) {
          throw std::invalid_argument(std::to_string(grids.size()) + " grids are not those of " + std::to_string(launches.size()) + " ranks");
        }
        emulation::Options options = emulation_options(seed, planted, starvation, regions);
        options.is_shared = is_shared;
        std::vector<emulation::MoeStream> streams(launches.size());
        for (size_t i = 0; i < launches.size(); ++i) streams[i] = {launches[i], grids[i], i < slowness.size() ? slowness[i] : 1};
        py::gil_scoped_release release;
        return emulation::parallel_moe(streams, options);
      },
      py::arg("launches"), py::arg("grids"), py::arg("slowness") = std::vector<uint32_t>{}, py::arg("seed") = 0, py::arg("planted") = 0,
      py::arg("starvation") = -1, py::arg("regions") = std::vector<RegionTuple>{}, py::arg("is_shared") = false,
      "Runs the streams of several emulated GPUs, each a list of launches of its grid's blocks, at the same time. regions as in emulation_launch; "
      "is_shared: other ranks are other processes");
}

}  // namespace sgl_lowlatency
