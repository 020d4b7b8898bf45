// CUDA side of launch/trial_step.hpp, and its instances. Each has a form that is known when it is compiled, so that it is what a step of that form
// would be.
#include "launch/trial_step.hpp"

#include <string>

#include "kernels/nvidia/decode_step/decode_step_parallel.cuh"
#include "launch/parallel_launch.cuh"

namespace sgl_lowlatency::launch {
namespace {

void check_instance(const abi::TrialStepParams& p) {
  require_hopper(p);
  require(p.geometry.head_dim == 128, "head_dim " + std::to_string(p.geometry.head_dim) + " of a tensor-parallel step is not 128");
}

// Calls what(FormedStepParams, VirtualForms) of the instance for p, with objects whose types it is to take.
template <class What>
void of_form(const abi::TrialStepParams& p, const What& what) {
  check_instance(p);
  const bool is_timed = p.timeline != nullptr;
  bool is_found = false;
  const auto offer = [&](auto of_rank, auto of_ranks, int32_t form, bool timed) {
    if (p.form != form || is_timed != timed) return;
    is_found = true;
    what(of_rank, of_ranks);
  };
#define SGL_OFFER(form, timed) offer(abi::FormedStepParams<form, timed>{}, abi::VirtualForms<form, timed>{}, form, timed)
  SGL_OFFER(0, true);
  SGL_OFFER(1, false);
  SGL_OFFER(2, false);
  SGL_OFFER(2, true);
  SGL_OFFER(3, false);
  SGL_OFFER(4, false);
  SGL_OFFER(4, true);
  SGL_OFFER(8, false);
#undef SGL_OFFER
  require(is_found, std::string(is_timed ? "a timed" : "an untimed") + " step of form " + std::to_string(p.form) + " has no kernel");
}

template <int32_t kForm, bool kIsTimed>
auto kernel_of(const abi::FormedStepParams<kForm, kIsTimed>&) {
  return kernels::decode_step_formed<kForm, kIsTimed>;
}
template <int32_t kForm, bool kIsTimed>
auto kernel_of(const abi::VirtualForms<kForm, kIsTimed>&) {
  return kernels::decode_step_virtual_formed<kForm, kIsTimed>;
}

}  // namespace

void trial_step_cuda(const abi::TrialStepParams& params, int32_t grid, uintptr_t stream) {
  check_trial_step(params, grid);
  of_form(params, [&](auto of_rank, auto) {
    const decltype(of_rank) formed{params};
    launch_cooperative(kStepName, kernel_of(formed), formed, step_shape(params, grid, 1), stream);
  });
}

void virtual_trial_cuda(const std::vector<abi::TrialStepParams>& ranks, int32_t grid, uintptr_t stream) {
  for (const abi::TrialStepParams& rank : ranks) {
    check_trial_step(rank, grid);
    const bool is_alike = rank.form == ranks[0].form && (rank.timeline != nullptr) == (ranks[0].timeline != nullptr);
    require(is_alike, "virtual ranks of several forms have no kernel");
  }
  of_form(ranks.at(0), [&](auto, auto of_ranks) {
    const auto all = virtual_ranks<decltype(of_ranks)>(ranks, grid);
    launch_cooperative(kStepName, kernel_of(all), all, step_shape(ranks[0], grid, ranks.size()), stream);
  });
}

int32_t trial_step_max_blocks(const abi::TrialStepParams& p, bool is_virtual) {
  int32_t blocks = 0;
  of_form(p, [&](auto of_rank, auto of_ranks) {
    const void* const kernel = is_virtual ? reinterpret_cast<const void*>(kernel_of(of_ranks)) : reinterpret_cast<const void*>(kernel_of(of_rank));
    blocks = resident_blocks(kStepName, kernel, abi::kNumThreads, p.shared.total_bytes);
  });
  return blocks;
}

}  // namespace sgl_lowlatency::launch
