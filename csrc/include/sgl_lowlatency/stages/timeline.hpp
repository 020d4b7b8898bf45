// The clock at points of a layer, for whoever asks where its time goes. Instances without a timeline have none of it.
#pragma once
#include "sgl_lowlatency/abi/parallel_step.hpp"
#include "sgl_lowlatency/dialect/dialect.hpp"

namespace sgl_lowlatency::stages {

// Entry: any consumer thread; thread 0 stores. A plain store: nobody reads it before the launch ends.
template <class Params>
SGL_DEVICE void stamp(const Params& p, int32_t layer, int32_t point) {
  uint64_t* const timeline = abi::timeline_of(p);
  if (timeline == nullptr || dialect::thread_idx() != 0) return;
  dialect::store_plain(timeline + (dialect::block_idx() * p.geometry.num_layers + layer) * abi::kTimelinePoints + point, dialect::timer_ns());
}

}  // namespace sgl_lowlatency::stages
