// draft_sampler.
#include "bindings/bindings.hpp"

#include <map>
#include <stdexcept>

#include "emulation/draft_sampler.hpp"
#include "launch/draft_sampler.hpp"
#include "sgl_lowlatency/dialect/dialect.hpp"

namespace sgl_lowlatency {
namespace {

// `index` itself, a place among the ranks of a draft.
size_t draft_rank(size_t index) {
  if (index < abi::kMaxDraftRanks) return index;
  throw std::invalid_argument("rank " + std::to_string(index) + " is beyond the " + std::to_string(abi::kMaxDraftRanks));
}

}  // namespace

void bind_draft_sampler(py::module_& m) {
  py::module_ a = m.attr("abi").cast<py::module_>();
#define SGL_CONSTANT(name) a.attr(#name) = py::int_(static_cast<int64_t>(abi::name))
  SGL_CONSTANT(kMarkovRank); SGL_CONSTANT(kMaxDraftBatch); SGL_CONSTANT(kMaxDraftRows); SGL_CONSTANT(kMaxGamma); SGL_CONSTANT(kMaxDraftRanks);
  SGL_CONSTANT(kUnitColumns); SGL_CONSTANT(kCandidateWords);
#undef SGL_CONSTANT
  a.attr("kDraftStateBytes") = py::int_(sizeof(abi::DraftState));
  a.attr("kStepLogitsTypes") = std::map<std::string, int32_t>{{"float32", abi::kStepLogitsFloat32}, {"bfloat16", abi::kStepLogitsBf16}};
  m.def("mailbox_words", &abi::mailbox_words, py::arg("gamma"), py::arg("max_batch"), py::arg("senders"),
        "Words of one generation of a rank's mailbox");
  py::class_<abi::DraftLayout>(a, "DraftLayout")
      .def_readonly("rendezvous", &abi::DraftLayout::rendezvous).def_readonly("step_logits", &abi::DraftLayout::step_logits)
      .def_readonly("mailbox", &abi::DraftLayout::mailbox).def_readonly("unwritten", &abi::DraftLayout::mailbox)
      .def_readonly("total_bytes", &abi::DraftLayout::total_bytes);
  m.def("draft_layout", &abi::draft_layout, py::arg("gamma"), py::arg("max_batch"), py::arg("senders"), py::arg("step_logits_bytes"),
        "The memory of a rank in a process of its own");
  m.def("draft_tiles_at_once", [](int32_t rows) { return abi::most_tiles_at_once(abi::draft_row_tiles(rows)); }, py::arg("rows"),
        "Most tiles of the LM head in one walk through K, of a launch of so many rows");
  m.def("draft_max_units", &abi::draft_max_units, py::arg("num_units"), py::arg("blocks"), "Most units of one block");
  py::class_<abi::DraftSmem>(a, "DraftSmem").def_readonly("total_bytes", &abi::DraftSmem::total_bytes);
  m.def("draft_smem", &abi::draft_smem, py::arg("rows"), py::arg("batch"), py::arg("k_panel"), py::arg("max_units"),
        "Shared memory of a block");

  py::class_<abi::DraftRank> rank(a, "DraftRank");
  rank.def(py::init([] { return abi::DraftRank{}; }))
#define SGL_FIELD(name) .def_readwrite(#name, &abi::DraftRank::name)
      SGL_FIELD(vocab_begin) SGL_FIELD(vocab_count) SGL_FIELD(num_head_tiles) SGL_FIELD(num_units);
#undef SGL_FIELD
#define SGL_POINTER(name) pointer_property(rank, #name, &abi::DraftRank::name)
  SGL_POINTER(maps); SGL_POINTER(base_logits); SGL_POINTER(draft_tokens); SGL_POINTER(noise_offset); SGL_POINTER(state);
#undef SGL_POINTER

  py::class_<abi::DraftSamplerParams> params(a, "DraftSamplerParams");
  params.def(py::init([] { return abi::DraftSamplerParams{}; }))
#define SGL_FIELD(name) .def_readwrite(#name, &abi::DraftSamplerParams::name)
      SGL_FIELD(batch) SGL_FIELD(gamma) SGL_FIELD(max_batch) SGL_FIELD(hidden) SGL_FIELD(k_panel) SGL_FIELD(tiles_at_once) SGL_FIELD(vocab)
      SGL_FIELD(has_norm) SGL_FIELD(rms_eps) SGL_FIELD(greedy) SGL_FIELD(num_ranks) SGL_FIELD(num_local_ranks) SGL_FIELD(first_rank)
      SGL_FIELD(max_units) SGL_FIELD(shared) SGL_FIELD(anchor_stride) SGL_FIELD(rounds_bias)
      SGL_FIELD(deadline_ns) SGL_FIELD(noise_key)
#undef SGL_FIELD
      .def_property("step_logits_type", [](const abi::DraftSamplerParams& p) { return static_cast<int32_t>(p.step_logits_type); },
                    [](abi::DraftSamplerParams& p, int32_t type) { p.step_logits_type = static_cast<abi::StepLogitsType>(type); })
      .def("set_rank", [](abi::DraftSamplerParams& p, size_t index, const abi::DraftRank& of) { p.ranks[draft_rank(index)] = of; })
      .def("set_peer", [](abi::DraftSamplerParams& p, size_t index, uintptr_t mailbox, uintptr_t step_logits) {
        p.peers[draft_rank(index)] = {reinterpret_cast<uint32_t*>(mailbox), reinterpret_cast<void*>(step_logits)};
      });
#define SGL_POINTER(name) pointer_property(params, #name, &abi::DraftSamplerParams::name)
  SGL_POINTER(hidden_states); SGL_POINTER(norm); SGL_POINTER(anchor_tokens); SGL_POINTER(step_temperatures); SGL_POINTER(markov_w1);
  SGL_POINTER(fault);
#undef SGL_POINTER
  m.def("host_logarithms", [](uintptr_t from, uintptr_t to, size_t count, bool plus_one) {
    const float* const x = reinterpret_cast<const float*>(from);
    float* const y = reinterpret_cast<float*>(to);
    for (size_t i = 0; i < count; ++i) y[i] = plus_one ? dialect::log1p(x[i]) : dialect::log(x[i]);
  }, py::arg("from"), py::arg("to"), py::arg("count"), py::arg("plus_one"),
        "The host dialect's log, or log1p, of `count` floats: torch's differ in last bits, and then a choice between near equals may");
#ifdef SGL_LOWLATENCY_WITH_CUDA
  m.def("draft_sampler_launch_cuda", &launch::draft_sampler_cuda, py::arg("params"), py::arg("grid"), py::arg("stream"),
        py::call_guard<py::gil_scoped_release>());
  m.def("draft_sampler_max_blocks", &launch::draft_sampler_max_blocks, py::arg("params"), "Co-resident blocks of the current device");
#endif
  m.def(
      "draft_sampler_emulate",
      [](const abi::DraftSamplerParams& params, int32_t grid, uint64_t seed, int32_t planted, int32_t starvation,
         const std::vector<RegionTuple>& regions, bool is_shared) {
        emulation::Options options = emulation_options(seed, planted, starvation, regions);
        options.is_shared = is_shared;
        py::gil_scoped_release release;
        return emulation::draft_sampler(params, grid, options);
      },
      py::arg("params"), py::arg("grid"), py::arg("seed") = 0, py::arg("planted") = 0, py::arg("starvation") = -1,
      py::arg("regions") = std::vector<RegionTuple>{}, py::arg("is_shared") = false,
      "Runs draft_sampler on the host; regions as in emulation_launch; is_shared: other ranks are other processes");
}

}  // namespace sgl_lowlatency
