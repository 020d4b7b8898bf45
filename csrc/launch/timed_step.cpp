// Parameter checks of a timed tensor-parallel decode_step, shared by the CUDA launcher and the emulation.
#include "launch/timed_step.hpp"

#include <stdexcept>
#include <string>

#include "launch/parallel_step.hpp"

namespace sgl_lowlatency::launch {

void check_timed_step(const abi::TimedStepParams& p, int32_t grid) {
  check_parallel_step(p, grid);
  const auto require = [](bool is_met, const std::string& what) {
    if (!is_met) throw std::invalid_argument("decode_step: " + what);
  };
  require(p.timeline != nullptr, "a timed step has no timeline");
  require(p.rows <= abi::kMaxTimedRows, "rows " + std::to_string(p.rows) + " of a timed step is above " + std::to_string(abi::kMaxTimedRows));
  require(p.rows_per_request == 1 && p.weights == abi::kWeightsBf16 && p.geometry.num_experts == 0,
          "a timed step is a decode step of bf16 dense layers");
}

}  // namespace sgl_lowlatency::launch
