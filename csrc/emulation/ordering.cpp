// Who knows what: the happens-before rules, and the record of accesses that have none.
#include "machine.hpp"

namespace sgl_lowlatency::emulation {
namespace {

// The lane's own accesses so far; those that follow are of a later interval.
void publish_own(const Lane& lane, Clock& target) {
  const uint32_t interval = interval_of(lane);
  target.warps[lane.warp->idx].add_some(interval, lane.bit);
  lane.warp->interval = interval + 1;
}

}  // namespace

uint32_t interval_of(const Lane& lane) { return std::max(lane.warp->interval, lane.fenced_interval); }

Stamp stamp_of(const Lane& lane, uint32_t flags) {
  return {interval_of(lane), static_cast<uint16_t>(lane.warp->idx), static_cast<uint8_t>(lane.idx), static_cast<uint8_t>(flags)};
}

bool knows(const Lane& lane, const Stamp& stamp) { return (known_lanes(lane, stamp.warp, stamp.interval) >> stamp.lane & 1u) != 0; }

void learn(Lane& lane, const ClockPtr& clock) {
  if (!clock || lane.learned == clock) return;
  if (!lane.learned) {
    lane.learned = clock;
    return;
  }
  Warp& warp = *lane.warp;
  if (warp.merged && warp.merged_from[0] == lane.learned && warp.merged_from[1] == clock) {
    lane.learned = warp.merged;
    return;
  }
  auto merged = std::make_shared<Clock>(*lane.learned);
  join_in_block(*merged, *clock, warp.block->range, machine->next_tag);
  warp.merged_from[0] = lane.learned;
  warp.merged_from[1] = clock;
  warp.merged = merged;
  lane.learned = std::move(merged);
}

void publish_in_block(Lane& lane, Clock& target) {
  Warp& warp = *lane.warp;
  join_in_block(target, warp.clock, warp.block->range, machine->next_tag);
  if (lane.learned) join_in_block(target, *lane.learned, warp.block->range, machine->next_tag);
  publish_own(lane, target);
}

void publish_across_blocks(Lane& lane, Clock& target, Clock& record) {
  Warp& warp = *lane.warp;
  join_across_blocks(target, warp.clock, machine->next_tag);
  if (lane.learned) join_across_blocks(target, *lane.learned, machine->next_tag);
  publish_own(lane, target);
  join_across_blocks(record, target, machine->next_tag);
}

void barrier_in_warp(Warp& warp) {
  const Clock* last = nullptr;
  for (int32_t i = 0; i < machine->warp_size; ++i) {
    ClockPtr& learned = warp.lanes[i].learned;
    if (!learned) continue;
    if (learned.get() != last) join_in_block(warp.clock, *learned, warp.block->range, machine->next_tag);
    last = learned.get();
  }
  if (last != nullptr) {
    for (int32_t i = 0; i < machine->warp_size; ++i) warp.lanes[i].learned.reset();
    warp.merged_from[0].reset();
    warp.merged_from[1].reset();
    warp.merged.reset();
  }
  Known& own = warp.clock.warps[warp.idx];
  own.all_lanes = std::max(warp.interval, warp.fenced_interval);
  own.some_lanes = own.lanes = 0;
  warp.interval = own.all_lanes + 1;
  warp.clock_copy.reset();
}

LaneMask known_lanes(const Lane& lane, uint32_t warp, uint32_t interval) {
  LaneMask lanes = lane.warp->clock.warps[warp].covers(interval);
  if (lane.learned) lanes |= lane.learned->warps[warp].covers(interval);
  if (lane.warp->idx == warp) lanes |= lane.bit;
  return lanes;
}

bool phase_seen(const Lane& lane, uint32_t mbarrier, uint32_t phases) {
  return lane.warp->clock.mbarrier_phases[mbarrier] >= phases ||
         (lane.learned && lane.learned->mbarrier_phases[mbarrier] >= phases);
}

namespace {

// Did some word bring the reader's rank what a fence of another rank published of the write?
bool was_offered(const Lane& reader, const Stamp& write) {
  for (const PublicationPtr& carried : reader.warp->block->rank->offered) {
    LaneMask lanes = carried->warp_clock->warps[write.warp].covers(write.interval);
    if (carried->learned) lanes |= carried->learned->warps[write.warp].covers(write.interval);
    if (carried->warp == write.warp && write.interval <= carried->interval) lanes |= carried->lane;
    if ((lanes >> write.lane & 1u) != 0) return true;
  }
  return false;
}

}  // namespace

RaceKind read_race_kind(const Lane& reader, const Stamp& write) {
  if (write.warp == reader.warp->idx) return RaceKind::kMissingWarpSync;
  const BlockRange& range = reader.warp->block->range;
  if (write.warp >= range.own_begin && write.warp < range.own_end) return RaceKind::kMissingBarrier;
  const auto is_in = [&](const Clock& clock) { return (clock.warps[write.warp].covers(write.interval) >> write.lane & 1u) != 0; };
  if (is_of_rank(reader, write.warp)) return is_in(machine->released) ? RaceKind::kMissingAcquire : RaceKind::kMissingRelease;
  if (is_in(machine->system_released)) return RaceKind::kMissingAcquire;
  if (is_in(machine->system_fenced)) return was_offered(reader, write) ? RaceKind::kMissingAcquire : RaceKind::kMissingRelease;
  return is_in(machine->released) ? RaceKind::kNarrowScope : RaceKind::kMissingRelease;
}

void record_race(RaceKind kind, const char* region, size_t offset, uint32_t bytes, const Stamp& first, bool stale) {
  const size_t before = machine->report.races.size();
  record_race(kind, region, offset, bytes, first.warp, first.lane, stale);
  if (machine->report.races.size() > before && kind != RaceKind::kNarrowScope) {
    machine->report.races.back().missing = read_race_kind(*machine->current, first);
  }
}

void record_race(RaceKind kind, const char* region, size_t offset, uint32_t bytes, uint32_t first_warp, int32_t first_lane,
                 bool stale) {
  Report& report = machine->report;
  ++report.num_races;
  if (report.races.size() >= kMaxRaces) return;
  const Lane& lane = *machine->current;
  const Warp& first = *machine->warps[first_warp];
  Race race{kind,
            region,
            offset,
            bytes,
            first.block->idx,
            static_cast<int32_t>(first.idx_in_block),
            first_lane,
            lane.identity.block_idx,
            static_cast<int32_t>(lane.warp->idx_in_block),
            lane.idx,
            stale,
            first.block->rank->idx,
            rank_of(lane),
            kind};
  size_t num_alike = 0;
  for (const Race& known : report.races) {
    if (known.kind != kind || known.region != race.region) continue;
    if (++num_alike == kMaxRacesAlike) return;
    if (known.first_rank == race.first_rank && known.second_rank == race.second_rank && known.first_block == race.first_block &&
        known.first_warp == race.first_warp && known.second_block == race.second_block && known.second_warp == race.second_warp) {
      return;
    }
  }
  report.races.push_back(std::move(race));
}

const char* name(RaceKind kind) {
  switch (kind) {
    case RaceKind::kMissingRelease: return "missing release";
    case RaceKind::kMissingAcquire: return "missing acquire";
    case RaceKind::kMissingBarrier: return "missing barrier";
    case RaceKind::kMissingWarpSync: return "missing sync_warp";
    case RaceKind::kWriteAfterWrite: return "unordered writes";
    case RaceKind::kWriteAfterRead: return "write overtakes read";
    case RaceKind::kConstantWritten: return "constant load of written memory";
    case RaceKind::kBulkUnfinished: return "shared read before bulk load completed";
    case RaceKind::kBulkOverwrite: return "bulk load over shared memory in use";
    case RaceKind::kCopyUnfinished: return "shared read before its asynchronous copy was awaited";
    case RaceKind::kUnorderedClear: return "word used with no order after its clear";
    case RaceKind::kClearedWhileRead: return "clear overtakes read";
    case RaceKind::kWrittenTwice: return "word written twice";
    case RaceKind::kNarrowScope: return "scope that does not reach another rank";
  }
  return "unknown";
}

}  // namespace sgl_lowlatency::emulation
