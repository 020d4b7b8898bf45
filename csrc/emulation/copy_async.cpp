// copy_async_16 (cp.async): each lane's copies happen late, in order of their groups, at the wait that covers them at the latest.
#include <algorithm>
#include <cstring>

#include "machine.hpp"

namespace sgl_lowlatency::emulation {
namespace {

constexpr uint32_t kPreemptOneIn = 32;

SharedGranule& granule_of(const Lane& lane, const AsyncCopy& copy) {
  Block& block = *lane.warp->block;
  return block.granules[static_cast<size_t>(copy.shared - block.shared) / kLineBytes];
}

void copy_until(Lane& lane, uint32_t end) {
  for (uint32_t& i = lane.copies_done; i < end; ++i) std::memcpy(lane.copies[i].shared, lane.copies[i].global, kLineBytes);
}

}  // namespace

void finish_some_async_copies() {
  std::vector<Lane*>& lanes = machine->copying_lanes;
  for (uint32_t left = 1 + machine->random.below(static_cast<uint32_t>(lanes.size())); left > 0; --left) {
    const uint32_t pos = machine->random.below(static_cast<uint32_t>(lanes.size()));
    Lane& lane = *lanes[pos];
    const uint32_t num_copies = static_cast<uint32_t>(lane.copies.size());
    if (lane.copies_done < num_copies) copy_until(lane, lane.copies_done + 1 + machine->random.below(num_copies - lane.copies_done));
    if (lane.copies_done < num_copies) continue;
    lanes[pos] = lanes.back();
    lanes.pop_back();
    if (lanes.empty()) return;
  }
}

void check_copy_seen(const Lane& lane, const SharedGranule& granule, size_t offset) {
  const Stamp& waited = granule.copy_waited;
  bool seen = granule.copies_pending == 0;
  // Every lane of the warp gets some of the bytes.
  for (int32_t l = 0; seen && l < machine->warp_size; ++l) {
    if ((lane.warp->clock.warps[waited.warp].covers(waited.interval) >> waited.lane & 1u) != 0) return;
    seen = knows(lane.warp->lanes[l], waited);
  }
  if (!seen) record_race(RaceKind::kCopyUnfinished, "shared", offset, kLineBytes, granule.issuer_warp, -1, granule.copies_pending != 0);
}

// The lane's own bytes: nobody else's wait counts.
void check_own_copy_seen(const Lane& lane, const void* shared) {
  Block& block = *lane.warp->block;
  const size_t offset = shared_offset(block, shared, kLineBytes, "load_copied");
  const SharedGranule& granule = block.granules[offset / kLineBytes];
  if (granule.copies_pending == 0 && granule.copy_waited.flags != 0 && knows(lane, granule.copy_waited)) return;
  record_race(RaceKind::kCopyUnfinished, "shared", offset, kLineBytes, granule.issuer_warp, -1, granule.copies_pending != 0);
}

void check_copies_waited_for(const Lane& lane) {
  if (!lane.copies.empty()) misuse("exits with " + std::to_string(lane.copies.size()) + " copy_async_16 that it has not waited for");
}

void wait_for_copies(uint32_t max_pending) {
  maybe_preempt(kPreemptOneIn);
  Lane& lane = *machine->current;
  uint32_t end = 0;
  while (end < lane.copies.size() && lane.copies[end].group + max_pending < lane.copy_group) ++end;
  if (end == 0) return;
  copy_until(lane, end);
  const Stamp stamp = stamp_of(lane, kStampWritten);
  for (uint32_t i = 0; i < end; ++i) {
    SharedGranule& granule = granule_of(lane, lane.copies[i]);
    --granule.copies_pending;
    granule.copy_waited = stamp;
  }
  lane.copies.erase(lane.copies.begin(), lane.copies.begin() + end);
  lane.copies_done -= end;
  if (!lane.copies.empty()) return;
  std::vector<Lane*>& lanes = machine->copying_lanes;
  const auto listed = std::find(lanes.begin(), lanes.end(), &lane);
  if (listed == lanes.end()) return;
  *listed = lanes.back();
  lanes.pop_back();
}

}  // namespace sgl_lowlatency::emulation

namespace sgl_lowlatency::dialect {

using namespace emulation;

void copy_async_16(void* shared, const void* global) {
  maybe_preempt(kPreemptOneIn);
  Lane& lane = *machine->current;
  Block& block = *lane.warp->block;
  const size_t offset = shared_offset(block, shared, kLineBytes, "copy_async_16");
  check_alignment(shared, kLineBytes, "copy_async_16");
  check_alignment(global, kLineBytes, "copy_async_16");
  machine->global.check_constant_range(global, kLineBytes);
  SharedGranule& granule = block.granules[offset / kLineBytes];
  const bool in_use = granule.in_flight != 0 || granule.copies_pending != 0;
  if (in_use || (granule.read_interval != 0 && known_lanes(lane, granule.read_warp, granule.read_interval) == 0)) {
    record_race(RaceKind::kBulkOverwrite, "shared", offset, kLineBytes, in_use ? granule.issuer_warp : granule.read_warp, -1, false);
  }
  granule.mbarrier = 0;
  granule.read_interval = 0;
  granule.issuer_warp = lane.warp->idx;
  ++granule.copies_pending;
  if (machine->random.one_in(2)) std::memset(shared, kPoisonByte, kLineBytes);
  if (lane.copies_done == lane.copies.size()) machine->copying_lanes.push_back(&lane);
  lane.copies.push_back({static_cast<char*>(shared), static_cast<const char*>(global), lane.copy_group});
}

void copy_async_commit() { ++machine->current->copy_group; }

Vec16 load_copied(const void* slot) {
  Lane& lane = *machine->current;
  const char* const own = static_cast<const char*>(slot) + lane.idx * static_cast<int32_t>(kLineBytes);
  check_own_copy_seen(lane, own);
  Vec16 value;
  std::memcpy(&value, own, sizeof(value));
  return value;
}

}  // namespace sgl_lowlatency::dialect
