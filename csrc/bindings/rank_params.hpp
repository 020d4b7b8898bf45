// Binds what the parameters of a rank have beside its own launch.
#pragma once
#include <stdexcept>
#include <string>

#include "bindings/bindings.hpp"
#include "sgl_lowlatency/abi/symmetric_workspace.hpp"

namespace sgl_lowlatency {

// Where rank `rank`'s workspace is, as this device sees it.
template <class Params>
void set_workspace(Params& p, size_t rank, uintptr_t address) {
  if (rank >= abi::kMaxRanks) throw std::invalid_argument("rank " + std::to_string(rank) + " is not below " + std::to_string(abi::kMaxRanks));
  p.workspaces[rank] = reinterpret_cast<char*>(address);
}

// A rank's parameters as a class of module `a`, of one that is derived from a lone launch's: ParallelAttentionOutParams, ParallelMoeParams.
template <class Params, class Alone>
void bind_rank_params(py::module_& a, const char* name) {
  py::class_<Params, Alone>(a, name)
      .def(py::init([] { return Params{}; }))
      .def(py::init([](const Params& other) { return other; }))
      .def_readwrite("symmetric", &Params::symmetric).def_readwrite("layer", &Params::layer)
      .def("set_workspace", &set_workspace<Params>, py::arg("rank"), py::arg("address"));
}

}  // namespace sgl_lowlatency
