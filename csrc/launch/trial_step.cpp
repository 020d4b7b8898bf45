// Parameter checks of a tensor-parallel decode_step of an open form, shared by the CUDA launcher and the emulation.
#include "launch/trial_step.hpp"

#include <stdexcept>
#include <string>

#include "launch/parallel_step.hpp"

namespace sgl_lowlatency::launch {

void check_trial_step(const abi::TrialStepParams& p, int32_t grid) {
  check_parallel_step(p, grid);
  const auto require = [](bool is_met, const std::string& what) {
    if (!is_met) throw std::invalid_argument("decode_step: " + what);
  };
  const int32_t other = abi::kFormWideStores | abi::kFormNarrowFence;
  require((p.form & ~(other | abi::kFormTagged | abi::kFormThreeAhead)) == 0 && ((p.form & abi::kFormTagged) == 0 || (p.form & other) == 0),
          "form " + std::to_string(p.form) + " is not one");
  require(p.rows <= 8, "rows " + std::to_string(p.rows) + " of a form's step is above 8");
  require(p.rows_per_request == 1 && p.weights == abi::kWeightsBf16 && p.geometry.num_experts == 0,
          "a form's step is a decode step of bf16 dense layers");
}

}  // namespace sgl_lowlatency::launch
