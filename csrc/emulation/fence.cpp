// fence_acq_rel_gpu and fence_acq_rel_system: a fence before relaxed stores of words and a fence after loads of those words synchronise
// (PTX's release and acquire patterns). The stores carry a Publication; loads collect them; the reader's fence learns what they hold.
#include <algorithm>
#include <utility>

#include "machine.hpp"

namespace sgl_lowlatency::emulation {
namespace {

constexpr uint32_t kPreemptFenceOneIn = 4;

// Joins every clock once.
class Learner {
 public:
  explicit Learner(Clock& clock) : clock_(clock) {}
  void add(const ClockPtr& learned) {
    if (!learned || std::find(joined_.begin(), joined_.end(), learned.get()) != joined_.end()) return;
    joined_.push_back(learned.get());
    join_across_blocks(clock_, *learned, machine->next_tag);
  }

 private:
  Clock& clock_;
  std::vector<const Clock*> joined_;
};

void learn_own_pending(Lane& lane) {
  if (lane.pending.empty()) return;
  Warp& warp = *lane.warp;
  if (!warp.fence_merged || warp.fence_from != lane.learned || warp.fence_pending != lane.pending) {
    const auto merged = lane.learned ? std::make_shared<Clock>(*lane.learned) : std::make_shared<Clock>(machine->warps.size());
    Learner learner(*merged);
    for (const PublicationPtr& publication : lane.pending) {
      learner.add(publication->warp_clock);
      learner.add(publication->learned);
      merged->warps[publication->warp].add_some(publication->interval, publication->lane);
    }
    merged->foreign_tag = machine->next_tag++;
    warp.fence_from = lane.learned;
    warp.fence_pending.swap(lane.pending);
    warp.fence_merged = merged;
  }
  lane.learned = warp.fence_merged;
  lane.pending.clear();
}

// What other ranks published waits for a fence of system scope.
void learn_pending(Lane& lane, Scope scope) {
  std::vector<PublicationPtr> of_peers;
  if (scope == Scope::kGpu && machine->has_ranks()) {
    const auto is_own = [&](const PublicationPtr& publication) { return is_of_rank(lane, publication->warp); };
    const auto first = std::stable_partition(lane.pending.begin(), lane.pending.end(), is_own);
    of_peers.assign(first, lane.pending.end());
    lane.pending.erase(first, lane.pending.end());
  }
  learn_own_pending(lane);
  lane.pending = std::move(of_peers);
}

PublicationPtr publish(Lane& lane, Scope scope) {
  Warp& warp = *lane.warp;
  if (!warp.clock_copy) {
    warp.clock_copy = std::make_shared<Clock>(warp.clock);
    join_across_blocks(machine->released, warp.clock, machine->next_tag);
  }
  const uint32_t interval = interval_of(lane);
  machine->released.warps[warp.idx].add_some(interval, lane.bit);
  if (scope == Scope::kSystem && machine->has_ranks()) {
    if (warp.system_fenced != warp.clock_copy) join_across_blocks(machine->system_fenced, warp.clock, machine->next_tag);
    warp.system_fenced = warp.clock_copy;
    machine->system_fenced.warps[warp.idx].add_some(interval, lane.bit);
  }
  lane.fenced_interval = interval + 1;
  warp.fenced_interval = std::max(warp.fenced_interval, lane.fenced_interval);
  return std::make_shared<Publication>(Publication{warp.clock_copy, lane.learned, warp.idx, interval, lane.bit});
}

}  // namespace

// Adds a publication, or puts it in the place of an older one of the same lane: a later fence publishes all that an earlier one did.
bool keep_newest(std::vector<PublicationPtr>& kept, const PublicationPtr& carried) {
  for (PublicationPtr& one : kept) {
    if (one == carried) return false;
    if (one->warp != carried->warp || one->lane != carried->lane) continue;
    if (one->interval >= carried->interval) return false;
    one = carried;
    return true;
  }
  kept.push_back(carried);
  return true;
}

void add_pending(Lane& lane, const PublicationPtr& carried) {
  if (keep_newest(lane.pending, carried) && !is_of_rank(lane, carried->warp)) keep_newest(lane.warp->block->rank->offered, carried);
}

void fence(Scope scope) {
  maybe_preempt(kPreemptFenceOneIn);
  Lane& lane = *machine->current;
  learn_pending(lane, scope);
  lane.publication = publish(lane, scope);
  if (scope == Scope::kSystem) lane.system_publication = lane.publication;
}

}  // namespace sgl_lowlatency::emulation

namespace sgl_lowlatency::dialect {

void fence_acq_rel_gpu() { emulation::fence(emulation::Scope::kGpu); }
void fence_acq_rel_system() { emulation::fence(emulation::Scope::kSystem); }

}  // namespace sgl_lowlatency::dialect
