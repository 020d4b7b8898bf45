// The clock at points of a draft's launch (abi::DraftPoint), for whoever asks where its time goes. Instances without have none of it.
#pragma once
#include "sgl_lowlatency/stages/draft_state.hpp"

namespace sgl_lowlatency::stages {

struct NoDraftClock {
  static constexpr bool kIsTimed = false;
  SGL_DEVICE explicit NoDraftClock(const DraftSamplerParams&) {}
  SGL_DEVICE void stamp(int32_t) const {}
  SGL_DEVICE void stamp_step(int32_t, int32_t) const {}
};

// Entry: any consumer thread; thread 0 stores. A plain store: nobody reads it before the launch ends.
struct DraftClock {
  static constexpr bool kIsTimed = true;
  uint64_t* at;  // of the block
  SGL_DEVICE explicit DraftClock(const DraftSamplerParams& p) : at(p.timeline + dialect::block_idx() * abi::draft_timeline_points(p.gamma)) {}
  SGL_DEVICE void stamp(int32_t point) const {
    if (dialect::thread_idx() == 0) dialect::store_plain(at + point, dialect::timer_ns());
  }
  SGL_DEVICE void stamp_step(int32_t step, int32_t point) const { stamp(abi::kDraftPoints + step * abi::kDraftStepPoints + point); }
};

}  // namespace sgl_lowlatency::stages
