// Polling lanes: what they looked at, and what wakes them.
#include "machine.hpp"

namespace sgl_lowlatency::emulation {

uint64_t line_bucket(const void* line) {
  return 1ull << ((machine->global.line_number(line) * 0x9e3779b97f4a7c15ull) >> (64 - kLogLineBuckets));
}

void global_memory_changed() {
  machine->progress = true;
  machine->counter_changed_at = ++machine->num_changes;
  for (size_t i = machine->polling_list.size(); i-- > 0;) {
    Warp& warp = *machine->polling_list[i];
    if (warp.polling != 0) wake_lanes(warp, warp.polling);
  }
}

void words_changed(const void* line) {
  const uint64_t bucket = line_bucket(line);
  machine->progress = true;
  machine->changed_at[__builtin_ctzll(bucket)] = ++machine->num_changes;
  for (size_t i = machine->polling_list.size(); i-- > 0;) {
    Warp& warp = *machine->polling_list[i];
    if ((warp.awaited & bucket) == 0) continue;
    LaneMask lanes = 0;
    for (LaneMask left = warp.polling; left != 0; left &= left - 1) {
      const Lane& lane = warp.lanes[__builtin_ctzll(left)];
      if ((lane.looked_at & bucket) != 0) lanes |= lane.bit;
    }
    wake_lanes(warp, lanes);
  }
}

LaneMask lanes_with_news(const Warp& warp) {
  const Machine& m = *machine;
  LaneMask lanes = warp.polling & warp.got_old;
  if (warp.polled_change == m.num_changes) return lanes;
  for (LaneMask left = warp.polling; left != 0; left &= left - 1) {
    const Lane& lane = warp.lanes[__builtin_ctzll(left)];
    const uint64_t at = lane.looked_at_change;
    bool news = m.counter_changed_at > at;
    for (uint64_t buckets = lane.looked_at; !news && buckets != 0; buckets &= buckets - 1) {
      news = m.changed_at[__builtin_ctzll(buckets)] > at;
    }
    if (news) lanes |= lane.bit;
  }
  return lanes;
}

void park(Warp& warp) {
  warp.awaited = 0;
  for (LaneMask left = warp.polling; left != 0; left &= left - 1) warp.awaited |= warp.lanes[__builtin_ctzll(left)].looked_at;
  warp.polling_pos = static_cast<int32_t>(machine->polling_list.size());
  machine->polling_list.push_back(&warp);
}

}  // namespace sgl_lowlatency::emulation

namespace sgl_lowlatency::dialect {

using namespace emulation;

void backoff() {
  Lane& lane = *machine->current;
  if (wait_for_failed_mbarrier(lane)) return;
  Warp& warp = *lane.warp;
  if (lane.looked_at == 0) lane.looked_at = kAllLineBuckets;
  if (warp.polling == 0 || lane.looked_at_change < warp.polled_change) warp.polled_change = lane.looked_at_change;
  warp.polling |= lane.bit;
  warp.runnable &= ~lane.bit;
  leave_lane();
  lane.looked_at_change = machine->num_changes;
  lane.looked_at = 0;
  warp.got_old &= ~lane.bit;
}

void pause_ns(uint32_t duration_ns) {
  Lane& lane = *machine->current;
  const uint64_t wake_ns = machine->now_ns + duration_ns;
  do {
    lane.failed_mbarrier = -1;
    backoff();
  } while (machine->now_ns < wake_ns);
}

}  // namespace sgl_lowlatency::dialect
