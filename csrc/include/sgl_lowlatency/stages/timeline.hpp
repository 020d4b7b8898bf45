// The clock at points of a layer, for whoever asks where its time goes. Other instances have none of it.
#pragma once
#include "sgl_lowlatency/abi/parallel_step.hpp"
#include "sgl_lowlatency/dialect/dialect.hpp"

namespace sgl_lowlatency::stages {

SGL_DEVICE void stamp(const abi::DecodeStepParams&, int32_t, int32_t) {}

// Entry: any consumer thread; thread 0 stores. A plain store: nobody reads it before the launch ends.
SGL_DEVICE void stamp(const abi::TimedStepParams& p, int32_t layer, int32_t point) {
  if (dialect::thread_idx() != 0) return;
  dialect::store_plain(p.timeline + (dialect::block_idx() * p.geometry.num_layers + layer) * abi::kTimelinePoints + point, dialect::timer_ns());
}

}  // namespace sgl_lowlatency::stages
