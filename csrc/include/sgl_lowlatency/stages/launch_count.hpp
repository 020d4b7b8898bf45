// Launches that are counted by their rows: one of each step, so that replays of a graph are counted too.
#pragma once
#include <cstdint>

#include "sgl_lowlatency/dialect/dialect.hpp"

namespace sgl_lowlatency::stages {

// Entry: the one thread that closes the launch, behind all that a step counted as executed must have done.
template <class Params>
SGL_DEVICE void count_launch(const Params& p) {
  if (p.executed_mirror == nullptr) return;
  const uint64_t executed = dialect::load_plain(p.state->executed + p.rows) + 1;
  dialect::store_plain(p.state->executed + p.rows, executed);
  dialect::store_relaxed_system(p.executed_mirror + p.rows, executed);  // pairs with nothing: the host reads a figure
}

}  // namespace sgl_lowlatency::stages
