// What the bindings of the kernels share. No logic: raw pointers and stream handles in, values out; no torch ABI.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "emulation/emulation.hpp"

namespace sgl_lowlatency {

namespace py = pybind11;

// Name, address, bytes and track_reads of memory whose ordering the emulation checks (emulation::Region).
using RegionTuple = std::tuple<std::string, uintptr_t, size_t, bool>;

// A pointer member as an integer property.
template <class Params, class T>
void pointer_property(py::class_<Params>& type, const char* name, T* Params::*member) {
  type.def_property(
      name, [member](const Params& p) { return reinterpret_cast<uintptr_t>(p.*member); },
      [member](Params& p, uintptr_t value) { p.*member = reinterpret_cast<T*>(value); });
}

inline emulation::Options emulation_options(uint64_t seed, int32_t planted, int32_t starvation, const std::vector<RegionTuple>& regions) {
  emulation::Options options;
  options.seed = seed;
  options.planted = static_cast<dialect::Planted>(planted);
  options.starvation = starvation;
  for (const auto& [name, base, bytes, track_reads] : regions) {
    options.regions.push_back({name.c_str(), reinterpret_cast<void*>(base), bytes, track_reads});
  }
  return options;
}

// Each adds its kernel's structs, constants and functions; bind_abi comes first.
void bind_abi(py::module_& m);
void bind_decode_step(py::module_& m);
void bind_bitmap_routing(py::module_& m);
void bind_draft_sampler(py::module_& m);
void bind_hyper_connection(py::module_& m);
void bind_fused_moe(py::module_& m);
void bind_slice(py::module_& m);
void bind_attention_out(py::module_& m);
void bind_attention_in(py::module_& m);
void bind_symmetric_workspace(py::module_& m);
void bind_epilogue_multicast(py::module_& m);
void bind_parallel_step(py::module_& m);
void bind_parallel_attention_out(py::module_& m);
void bind_parallel_moe(py::module_& m);
void bind_monokernel(py::module_& m);

}  // namespace sgl_lowlatency
