// Happens-before clocks. An agent is a warp; what single lanes publish or learn between warp barriers is kept apart.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace sgl_lowlatency::emulation {

constexpr int32_t kMaxMbarriers = 96;  // of one block

using LaneMask = uint64_t;  // a bit a lane of a warp

// How much of one warp's past is known. Accesses carry the warp's interval; every warp barrier and release starts a new one.
struct Known {
  uint32_t all_lanes = 0;   // every lane's accesses up to this interval
  uint32_t some_lanes = 0;  // when above all_lanes: those of `lanes` up to this interval
  LaneMask lanes = 0;

  void add_some(uint32_t interval, LaneMask lane_mask) {
    if (interval <= all_lanes) return;
    if (some_lanes <= all_lanes) {
      some_lanes = interval;
      lanes = lane_mask;
    } else {  // two partial facts: their union at the later interval may miss a race, never invents one
      some_lanes = std::max(some_lanes, interval);
      lanes |= lane_mask;
    }
  }
  void join(const Known& other) {
    if (other.all_lanes > all_lanes) all_lanes = other.all_lanes;
    if (other.some_lanes > all_lanes) add_some(other.some_lanes, other.lanes);
  }
  // Lanes whose accesses of `interval` are known.
  LaneMask covers(uint32_t interval) const {
    if (interval <= all_lanes) return ~LaneMask{0};
    return interval <= some_lanes ? lanes : LaneMask{0};
  }
  bool operator==(const Known& other) const {
    return all_lanes == other.all_lanes && (some_lanes <= all_lanes
                                                ? other.some_lanes <= other.all_lanes
                                                : some_lanes == other.some_lanes && lanes == other.lanes);
  }
};

// Knowledge of every warp of the launch, and of the mbarrier phases of one block.
struct Clock {
  // Clocks of one block with the same tag (not 0) know the same of other blocks: joins between them stay short.
  uint64_t foreign_tag = 0;
  std::vector<Known> warps;
  uint32_t mbarrier_phases[kMaxMbarriers] = {};  // completed phases seen

  explicit Clock(size_t num_warps) : warps(num_warps) {}
};

using ClockPtr = std::shared_ptr<const Clock>;

// What a lane knew at a fence: its later relaxed stores carry it to whoever reads them and then executes a fence.
struct Publication {
  ClockPtr warp_clock;
  ClockPtr learned;   // by this lane alone, may be null
  uint32_t warp;
  uint32_t interval;  // the lane's own accesses up to this one
  LaneMask lane;      // its bit
};

using PublicationPtr = std::shared_ptr<const Publication>;

// own_begin, own_end: warps of the block that both clocks belong to.
struct BlockRange {
  uint32_t own_begin;
  uint32_t own_end;
  uint32_t num_mbarriers;
};

// dst learns all that src knows; both belong to the block of `range`.
void join_in_block(Clock& dst, const Clock& src, const BlockRange& range, uint64_t& next_tag);

// dst learns what src knows of every warp, not of mbarriers: knowledge that leaves or enters a block.
void join_across_blocks(Clock& dst, const Clock& src, uint64_t& next_tag);

}  // namespace sgl_lowlatency::emulation
