// decode_step: its launches, its records and its emulation; what all kernels need of a GPU and of the emulation.
#include "bindings/bindings.hpp"

#include "emulation/decode_step.hpp"
#include "emulation/selftest.hpp"
#include "launch/decode_step.hpp"
#include "launch/read_bytes.hpp"

namespace sgl_lowlatency {
namespace {

// The record when a kernel completed it, else None. Acquire: pairs with raise_fault's release of `state`.
py::object read_fault(uintptr_t address) {
  auto* record = reinterpret_cast<abi::FaultRecord*>(address);
  if (__atomic_load_n(&record->state, __ATOMIC_ACQUIRE) != 2) return py::none();
  return py::cast(*record);
}

// Pairs with raise_fault's relaxed poll of `host_ack`, which reads nothing else.
void acknowledge_fault(uintptr_t address) {
  __atomic_store_n(&reinterpret_cast<abi::FaultRecord*>(address)->host_ack, 1u, __ATOMIC_RELEASE);
}

// Relaxed: figures that order nothing; the newest launch may not be in them yet.
std::vector<uint64_t> read_executed(uintptr_t address, int32_t max_rows) {
  const auto* counts = reinterpret_cast<const uint64_t*>(address);
  std::vector<uint64_t> out(static_cast<size_t>(max_rows) + 1);
  for (size_t i = 0; i < out.size(); ++i) out[i] = __atomic_load_n(counts + i, __ATOMIC_RELAXED);
  return out;
}

}  // namespace

void bind_decode_step(py::module_& m) {
  py::class_<emulation::Race>(m, "Race")
      .def_property_readonly("kind", [](const emulation::Race& r) { return std::string(emulation::name(r.kind)); })
      .def_property_readonly("missing", [](const emulation::Race& r) { return std::string(emulation::name(r.missing)); })
#define SGL_FIELD(name) .def_readonly(#name, &emulation::Race::name)
      SGL_FIELD(region) SGL_FIELD(offset) SGL_FIELD(bytes) SGL_FIELD(first_block) SGL_FIELD(first_warp) SGL_FIELD(first_lane)
      SGL_FIELD(second_block) SGL_FIELD(second_warp) SGL_FIELD(second_lane) SGL_FIELD(stale) SGL_FIELD(first_rank) SGL_FIELD(second_rank);
#undef SGL_FIELD
  py::class_<emulation::Report>(m, "EmulationReport")
      .def_property_readonly("status", [](const emulation::Report& r) { return std::string(emulation::name(r.status)); })
#define SGL_FIELD(name) .def_readonly(#name, &emulation::Report::name)
      SGL_FIELD(message) SGL_FIELD(switches) SGL_FIELD(slices) SGL_FIELD(virtual_ns) SGL_FIELD(num_races) SGL_FIELD(races);
#undef SGL_FIELD
  m.def(
      "emulation_launch",
      [](const abi::DecodeStepParams& params, int32_t grid, uint64_t seed, int32_t planted, int32_t starvation,
         const std::vector<RegionTuple>& regions) {
        const emulation::Options options = emulation_options(seed, planted, starvation, regions);
        py::gil_scoped_release release;
        return emulation::decode_step(params, grid, options);
      },
      py::arg("params"), py::arg("grid"), py::arg("seed") = 0, py::arg("planted") = 0, py::arg("starvation") = -1,
      py::arg("regions") = std::vector<RegionTuple>{},
      "Runs decode_step on the host. regions: (name, address, bytes, track_reads) of memory whose ordering is checked");
  m.def("emulation_selftest", &emulation::selftest, py::arg("name"), py::arg("seed"));
  m.def("read_fault", &read_fault, py::arg("address"), "The completed FaultRecord at a host-visible address, or None");
  m.def("acknowledge_fault", &acknowledge_fault, py::arg("address"), "Lets the kernel that wrote the record trap");
  m.def("read_executed", &read_executed, py::arg("address"), py::arg("max_rows") = abi::kMaxRows,
        "Completed launches by rows, [max_rows + 1]");
#ifdef SGL_LOWLATENCY_WITH_CUDA
  m.def("decode_step_launch_cuda", &launch::decode_step_cuda, py::arg("params"), py::arg("grid"), py::arg("stream"),
        py::call_guard<py::gil_scoped_release>());
  m.def("decode_step_max_blocks", &launch::decode_step_max_blocks, py::arg("params"), "Co-resident blocks of the current device");
  m.def("read_bytes_cuda", &launch::read_bytes_cuda, py::arg("begin"), py::arg("bytes"), py::arg("out"), py::arg("stream"),
        "Exclusive or of all 32-bit words of device memory, into a uint32: measures read bandwidth");
  m.def("allocate_host_visible", &launch::allocate_host_visible, py::arg("bytes"), "Zeroed host memory that the device reads and writes");
  m.def("free_host_visible", &launch::free_host_visible, py::arg("pointer"));
#endif
}

}  // namespace sgl_lowlatency
