// Binds the emulation of ranks that each have a stream of launches.
#pragma once
#include "bindings/bindings.hpp"

#include "emulation/parallel_step.hpp"

namespace sgl_lowlatency {

template <class Params>
void bind_streams(py::module_& m, const char* name,
                  emulation::Report (*run)(const std::vector<emulation::StepStream<Params>>&, const emulation::Options&)) {
  m.def(
      name,
      [run](const std::vector<std::vector<Params>>& launches, int32_t grid, const std::vector<uint32_t>& slowness, uint64_t seed, int32_t planted,
            int32_t starvation, const std::vector<RegionTuple>& regions, bool is_shared) {
        emulation::Options options = emulation_options(seed, planted, starvation, regions);
        options.is_shared = is_shared;
        std::vector<emulation::StepStream<Params>> streams(launches.size());
        for (size_t i = 0; i < launches.size(); ++i) streams[i] = {launches[i], grid, i < slowness.size() ? slowness[i] : 1};
        py::gil_scoped_release release;
        return run(streams, options);
      },
      py::arg("launches"), py::arg("grid"), py::arg("slowness") = std::vector<uint32_t>{}, py::arg("seed") = 0, py::arg("planted") = 0,
      py::arg("starvation") = -1, py::arg("regions") = std::vector<RegionTuple>{}, py::arg("is_shared") = false,
      "Runs the streams of several emulated GPUs, each a list of launches of `grid` blocks, at the same time. regions as in emulation_launch; "
      "is_shared: other ranks are other processes");
}

}  // namespace sgl_lowlatency
