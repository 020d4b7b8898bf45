// fence_acq_rel_gpu: a fence before relaxed stores of words and a fence after loads of those words synchronise (PTX's release
// and acquire patterns). The stores carry a Publication; loads collect them; the reader's fence learns what they hold.
#include <algorithm>

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

void learn_pending(Lane& lane) {
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

PublicationPtr publish(Lane& lane) {
  Warp& warp = *lane.warp;
  if (!warp.clock_copy) {
    warp.clock_copy = std::make_shared<Clock>(warp.clock);
    join_across_blocks(machine->released, warp.clock, machine->next_tag);
  }
  const uint32_t interval = interval_of(lane);
  machine->released.warps[warp.idx].add_some(interval, lane.bit);
  lane.fenced_interval = interval + 1;
  warp.fenced_interval = std::max(warp.fenced_interval, lane.fenced_interval);
  return std::make_shared<Publication>(Publication{warp.clock_copy, lane.learned, warp.idx, interval, lane.bit});
}

}  // namespace

void add_pending(Lane& lane, const PublicationPtr& carried) {
  for (PublicationPtr& pending : lane.pending) {
    if (pending == carried) return;
    if (pending->warp != carried->warp || pending->lane != carried->lane) continue;
    if (pending->interval < carried->interval) pending = carried;  // a lane's later fence publishes all that its earlier did
    return;
  }
  lane.pending.push_back(carried);
}

}  // namespace sgl_lowlatency::emulation

namespace sgl_lowlatency::dialect {

void fence_acq_rel_gpu() {
  using namespace emulation;
  maybe_preempt(kPreemptFenceOneIn);
  Lane& lane = *machine->current;
  learn_pending(lane);
  lane.publication = publish(lane);
}

}  // namespace sgl_lowlatency::dialect
