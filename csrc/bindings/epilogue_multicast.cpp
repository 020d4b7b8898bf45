// epilogue_multicast, and the symmetric workspace that its ranks share.
#include "bindings/rank_params.hpp"

#include <cstring>
#include <stdexcept>

#include "emulation/epilogue_multicast.hpp"
#include "launch/epilogue_multicast.hpp"
#include "launch/symmetric_workspace.hpp"

namespace sgl_lowlatency {

void bind_symmetric_workspace(py::module_& m) {
  py::module_ a = m.attr("abi").cast<py::module_>();
  a.attr("kMaxRanks") = py::int_(abi::kMaxRanks);
  a.attr("kParities") = py::int_(abi::kParities);
  a.attr("kRendezvousBytes") = py::int_(sizeof(abi::Rendezvous));
  a.attr("kSymmetricStateBytes") = py::int_(sizeof(abi::SymmetricState));
  a.attr("kLaunchesOffset") = py::int_(offsetof(abi::SymmetricState, launches));
  py::class_<abi::SymmetricLayout>(a, "SymmetricLayout")
#define SGL_FIELD(name) .def_readonly(#name, &abi::SymmetricLayout::name)
      SGL_FIELD(num_ranks) SGL_FIELD(max_rows) SGL_FIELD(hidden) SGL_FIELD(rendezvous) SGL_FIELD(abort) SGL_FIELD(state) SGL_FIELD(tiles)
      SGL_FIELD(parity_bytes) SGL_FIELD(total_bytes)
#undef SGL_FIELD
      .def_readonly("unwritten", &abi::SymmetricLayout::tiles);
  m.def("symmetric_layout", &abi::symmetric_layout, py::arg("num_ranks"), py::arg("max_rows"), py::arg("hidden"),
        py::arg("copies") = abi::kParities, "Byte offsets of a rank's workspace");
  m.def("abort_reason", [](uint64_t word) {
    const abi::AbortReason reason = abi::abort_reason(word);
    return std::make_tuple(reason.waiter, reason.awaited, reason.layer, reason.tile, static_cast<int32_t>(reason.phase));
  }, py::arg("word"), "(waiter, awaited, layer, tile, phase) of an abort word");
  m.def("pack_rendezvous", [](uint64_t address, uint64_t total_bytes, const std::string& terms, int32_t rank, int32_t num_ranks) {
    abi::Rendezvous block{abi::kRendezvousMagic, address, total_bytes, {}, rank, num_ranks};
    if (terms.size() != sizeof(block.terms)) throw std::invalid_argument("terms: " + std::to_string(terms.size()) + " bytes are no SHA-256");
    std::memcpy(block.terms, terms.data(), sizeof(block.terms));
    return py::bytes(reinterpret_cast<const char*>(&block), sizeof(block));
  }, py::arg("address"), py::arg("total_bytes"), py::arg("terms"), py::arg("rank"), py::arg("num_ranks"), "The bytes of a Rendezvous");
#ifdef SGL_LOWLATENCY_WITH_CUDA
  m.def("allocate_symmetric", &launch::allocate_symmetric, py::arg("bytes"), "Device memory that other processes may map, every byte 0xff");
  m.def("free_symmetric", &launch::free_symmetric, py::arg("pointer"));
  m.def("ipc_handle", [](uintptr_t pointer) { return py::bytes(launch::ipc_handle(pointer)); }, py::arg("pointer"));
  m.def("open_ipc", &launch::open_ipc, py::arg("handle"), "Maps another process's memory");
  m.def("close_ipc", &launch::close_ipc, py::arg("pointer"));
  m.def("copy_to_device", &launch::copy_to_device, py::arg("to"), py::arg("bytes"));
  m.def("copy_from_device", [](uintptr_t from, size_t bytes) { return py::bytes(launch::copy_from_device(from, bytes)); }, py::arg("from"),
        py::arg("bytes"));
#endif
}

void bind_epilogue_multicast(py::module_& m) {
  py::module_ a = m.attr("abi").cast<py::module_>();
  a.attr("kMaxPushedRows") = py::int_(abi::kMaxPushedRows);
  a.attr("kMaxReducedHidden") = py::int_(abi::kMaxReducedHidden);
  using Params = abi::EpilogueMulticastParams;
  py::class_<Params> params(a, "EpilogueMulticastParams");
  params.def(py::init([] { return Params{}; }))
      .def(py::init([](const Params& other) { return other; }))
#define SGL_FIELD(name) .def_readwrite(#name, &Params::name)
      SGL_FIELD(product) SGL_FIELD(at) SGL_FIELD(ranks_in_launch) SGL_FIELD(blocks_per_rank) SGL_FIELD(layer) SGL_FIELD(rms_eps)
#undef SGL_FIELD
      .def("set_workspace", &set_workspace<Params>, py::arg("rank"), py::arg("address"))
      .def("set_tensors", [](Params& p, size_t index, uintptr_t input, uintptr_t residual, uintptr_t sum, uintptr_t normed) {
        if (index >= abi::kMaxRanks) throw std::invalid_argument("index " + std::to_string(index) + " is not below " + std::to_string(abi::kMaxRanks));
        abi::RankTensors& tensors = p.tensors[index];
        tensors.input = reinterpret_cast<const abi::bf16*>(input);
        tensors.residual = reinterpret_cast<const abi::bf16*>(residual);
        tensors.sum = reinterpret_cast<abi::bf16*>(sum);
        tensors.normed = reinterpret_cast<abi::bf16*>(normed);
      }, py::arg("index"), py::arg("input"), py::arg("residual"), py::arg("sum"), py::arg("normed"));
  pointer_property(params, "norm_weight", &Params::norm_weight);
  pointer_property(params, "multicast", &Params::multicast);
#ifdef SGL_LOWLATENCY_WITH_CUDA
  m.def("epilogue_multicast_launch_cuda", &launch::epilogue_multicast_cuda, py::arg("params"), py::arg("stream"),
        py::call_guard<py::gil_scoped_release>());
#endif
  m.def(
      "epilogue_multicast_emulate",
      [](const std::vector<std::vector<Params>>& launches, const std::vector<uint32_t>& slowness, uint64_t seed, int32_t planted, int32_t starvation,
         const std::vector<RegionTuple>& regions, const std::vector<std::tuple<uintptr_t, size_t, std::vector<uintptr_t>>>& multicasts,
         bool is_shared) {
        emulation::Options options = emulation_options(seed, planted, starvation, regions);
        options.is_shared = is_shared;
        for (const auto& [base, bytes, targets] : multicasts) {
          options.multicasts.push_back({reinterpret_cast<void*>(base), bytes, {}});
          for (const uintptr_t target : targets) options.multicasts.back().targets.push_back(reinterpret_cast<void*>(target));
        }
        std::vector<emulation::EpilogueStream> streams(launches.size());
        for (size_t i = 0; i < launches.size(); ++i) streams[i] = {launches[i], i < slowness.size() ? slowness[i] : 1};
        py::gil_scoped_release release;
        return emulation::epilogue_multicast(streams, options);
      },
      py::arg("launches"), py::arg("slowness") = std::vector<uint32_t>{}, py::arg("seed") = 0, py::arg("planted") = 0, py::arg("starvation") = -1,
      py::arg("regions") = std::vector<RegionTuple>{},
      py::arg("multicasts") = std::vector<std::tuple<uintptr_t, size_t, std::vector<uintptr_t>>>{}, py::arg("is_shared") = false,
      "Runs the streams of several emulated GPUs, each a list of launches, at the same time. regions as in emulation_launch; multicasts: (address, "
      "bytes, workspaces); is_shared: other ranks are other processes");
}

}  // namespace sgl_lowlatency
