// Chooses which warp runs, completes bulk copies, moves virtual time. One OS thread; every choice is seeded.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <thread>
#include <utility>

#include "machine.hpp"

namespace sgl_lowlatency::emulation {
namespace {

constexpr uint64_t kSliceNs = 64;          // virtual time of one scheduler choice
constexpr uint64_t kFirstIdleNs = 1'000;   // a jump of time when only pollers are left is this or a part of the idle time
constexpr uint64_t kIdleParts = 256;       // so far: far deadlines come quickly, and are overrun by little
constexpr std::chrono::microseconds kSharedPause{50};  // between looks at what other processes may write
constexpr uint32_t kWakePollerOneIn = 64;  // pollers also look again for no reason
constexpr int32_t kSlowTries = 16;         // choices in which a slow rank may be passed over

void run(Lane& next, Fiber& from) {
  machine->current = &next;
  current_identity = &next.identity;
  ++machine->report.switches;
  switch_fiber(from, next.fiber);
}

Lane& next_lane(Warp& warp, int32_t after, LaneMask candidates) {
  if (warp.descending) {
    const LaneMask below = candidates & ((LaneMask{1} << after) - 1u);
    return warp.lanes[63 - __builtin_clzll(below != 0 ? below : candidates)];
  }
  const LaneMask above = after == 63 ? 0u : candidates & (~LaneMask{0} << (after + 1));
  return warp.lanes[__builtin_ctzll(above != 0 ? above : candidates)];
}

void lane_exited(Lane& lane) {
  Warp& warp = *lane.warp;
  Block& block = *warp.block;
  if (warp.collective != Collective::kNone) misuse(std::string("exits while other lanes wait in ") + name(warp.collective));
  warp.exited |= lane.bit;
  warp.runnable &= ~lane.bit;
  check_copies_waited_for(lane);
  machine->progress = true;
  if (warp.exited != machine->all_lanes) return;
  --machine->live_warps;
  --block.live_warps;
  if (--block.rank->live_warps == 0) machine->kernel_done = block.rank;
  check_barriers_can_complete(block);
  if (block.live_warps == 0 && block.bulk_in_flight != 0) {
    misuse("block exits with " + std::to_string(block.bulk_in_flight) + " bulk loads in flight");
  }
}

class Scheduler {
 public:
  explicit Scheduler(Machine& m) : m_(m), starvation_(choose_starvation(m)) {}

  void run_all() {
    for (const auto& rank : m_.ranks) {
      if (!rank->program.kernels.empty()) start_kernel(*rank);
    }
    while (m_.live_warps > 0 && m_.report.status == Status::kOk) {
      if (!m_.bulk_copies.empty() && m_.random.one_in(m_.bulk_one_in)) finish_some_bulk_copies();
      if (!m_.copying_lanes.empty() && m_.random.one_in(m_.bulk_one_in)) finish_some_async_copies();
      if (!m_.polling_list.empty() && m_.random.one_in(kWakePollerOneIn)) {
        wake(*m_.polling_list[m_.random.below(static_cast<uint32_t>(m_.polling_list.size()))]);
      }
      if (!m_.run_list.empty()) {
        run_slice(pick());
        if (m_.kernel_done != nullptr) finish_kernel(*std::exchange(m_.kernel_done, nullptr));
      } else if (!m_.bulk_copies.empty()) {
        finish_some_bulk_copies();
      } else if (!idle()) {
        return;
      }
    }
  }

 private:
  static Starvation choose_starvation(Machine& m) {
    const int32_t wanted = m.options.starvation;
    return wanted < 0 ? static_cast<Starvation>(m.random.below(4)) : static_cast<Starvation>(wanted);
  }

  void finish_some_bulk_copies() {
    const uint32_t count = 1 + m_.random.below(static_cast<uint32_t>(m_.bulk_copies.size()));
    for (uint32_t i = 0; i < count && m_.report.status == Status::kOk; ++i) {
      finish_bulk_copy(m_.random.below(static_cast<uint32_t>(m_.bulk_copies.size())));
    }
  }

  void wake(Warp& warp) { wake_lanes(warp, warp.polling | warp.at_mbarrier); }

  bool allowed(const Warp& warp) const {
    switch (starvation_) {
      case Starvation::kStarveBlock: return !is_victim(*warp.block);
      case Starvation::kStarveWarp: return warp.idx != victim_;
      case Starvation::kFavourBlock: return is_victim(*warp.block);
      default: return true;
    }
  }
  // Of several ranks, a whole one every other time.
  bool is_victim(const Block& block) const {
    if (victim_is_rank_) return static_cast<uint32_t>(block.rank->idx) == victim_;
    return block.range.own_begin <= victim_ && victim_ < block.range.own_end;
  }
  // Passes over warps of slow ranks as often as they ask for.
  size_t choose() {
    const uint32_t size = static_cast<uint32_t>(m_.run_list.size());
    size_t pos = m_.random.below(size);
    for (int32_t i = 0; m_.has_ranks() && i < kSlowTries; ++i) {
      const uint32_t slowness = m_.run_list[pos]->block->rank->program.slowness;
      if (slowness == 1 || m_.random.one_in(slowness)) break;
      pos = m_.random.below(size);
    }
    return pos;
  }

  size_t pick() {
    const uint32_t size = static_cast<uint32_t>(m_.run_list.size());
    const uint32_t first = static_cast<uint32_t>(choose());
    if (starvation_ == Starvation::kNone || starvation_ == Starvation::kBySeed) return first;
    if (stretch_ == 0) {
      stretch_ = 16u << m_.random.below(10);
      victim_is_rank_ = m_.has_ranks() && starvation_ != Starvation::kStarveWarp && m_.random.one_in(2);
      victim_ = m_.random.below(static_cast<uint32_t>(victim_is_rank_ ? m_.ranks.size() : m_.warps.size()));
    }
    --stretch_;
    for (uint32_t i = 0; i < size; ++i) {
      const size_t pos = first + i < size ? first + i : first + i - size;
      if (allowed(*m_.run_list[pos])) return pos;
    }
    return first;
  }

  void run_slice(size_t pos) {
    Warp& warp = *m_.run_list[pos];
    const uint64_t choice = m_.random.next();
    warp.descending = (choice & 1) != 0;
    m_.now_ns += kSliceNs * warp.block->rank->program.slowness;
    ++m_.report.slices;
    run(next_lane(warp, static_cast<int32_t>((choice >> 1) & (m_.warp_size - 1)), warp.runnable), m_.scheduler);
    m_.current = nullptr;
    if (m_.trapping != nullptr) return kill_rank(*std::exchange(m_.trapping, nullptr));
    if (warp.runnable != 0) return;
    const LaneMask looking_again = warp.polling == 0 ? 0 : lanes_with_news(warp);
    if (looking_again != 0) {
      wake_lanes(warp, looking_again);
      return;
    }
    // run_list may have grown, never shrunk, since pos was chosen
    m_.run_list[pos] = m_.run_list.back();
    m_.run_list.pop_back();
    warp.listed = false;
    if ((warp.polling | warp.at_mbarrier) == 0) return;
    park(warp);
  }

  // Nobody can run but pollers. Time jumps, further while nothing comes of it, so that their deadlines expire.
  bool idle() {
    if (m_.polling_list.empty()) {
      give_up("deadlock: every thread waits for another");
      return false;
    }
    if (m_.progress) idle_total_ns_ = 0;
    const uint64_t jump_ns = m_.options.is_shared ? pause(m_.progress) : std::max(kFirstIdleNs, idle_total_ns_ / kIdleParts);
    m_.progress = false;
    idle_total_ns_ += jump_ns;
    if (idle_total_ns_ > m_.options.max_idle_ns) {
      give_up("deadlock: only polling threads are left and none gave up in " + std::to_string(idle_total_ns_ / 1'000'000'000) +
              " virtual seconds");
      return false;
    }
    m_.now_ns += jump_ns;
    while (!m_.polling_list.empty()) wake(*m_.polling_list.back());
    return true;
  }

  // Lets other processes work. Returns the wall time that passed, since the last pause unless something has happened in between.
  uint64_t pause(bool has_progressed) {
    const auto begin = has_progressed ? std::chrono::steady_clock::now() : paused_at_;
    std::this_thread::sleep_for(kSharedPause);
    paused_at_ = std::chrono::steady_clock::now();
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(paused_at_ - begin).count());
  }

  void give_up(const std::string& reason) {
    m_.report.status = Status::kDeadlock;
    m_.report.message = reason + describe_waits(m_);
  }

  Machine& m_;
  Starvation starvation_;
  uint32_t victim_ = 0;  // a rank or a warp
  bool victim_is_rank_ = false;
  uint32_t stretch_ = 0;
  uint64_t idle_total_ns_ = 0;
  std::chrono::steady_clock::time_point paused_at_;
};

}  // namespace

void fiber_entry() {
  std::string error;
  try {
    const RankState& rank = *machine->current->warp->block->rank;
    rank.program.kernels[rank.next_kernel - 1].body();
  } catch (const std::exception& exception) {
    error = std::string("exception in the kernel: ") + exception.what();
  } catch (...) {
    error = "exception in the kernel";
  }
  if (!error.empty()) misuse(error);
  lane_exited(*machine->current);
  leave_lane();
  std::abort();  // an exited lane is never resumed
}

void run_kernels(Machine& m) { Scheduler(m).run_all(); }

void leave_lane() {
  Lane& lane = *machine->current;
  Warp& warp = *lane.warp;
  const LaneMask others = warp.runnable & ~lane.bit;
  if (others != 0) {
    Lane& next = next_lane(warp, lane.idx, others);
    const LaneMask later = others & ~next.bit;
    if (later != 0) prefetch_fiber(next_lane(warp, next.idx, later).fiber);
    run(next, lane.fiber);
  } else {
    switch_fiber(lane.fiber, machine->scheduler);
  }
}

void maybe_preempt(uint32_t one_in) {
  if (machine->random.one_in(one_in)) switch_fiber(machine->current->fiber, machine->scheduler);
}

void wake_lanes(Warp& warp, LaneMask lanes) {
  warp.polling &= ~lanes;
  warp.at_mbarrier &= ~lanes;
  warp.at_barrier &= ~lanes;
  warp.runnable |= lanes;
  if (warp.polling_pos >= 0) {
    Warp* const moved = machine->polling_list.back();
    machine->polling_list[warp.polling_pos] = moved;
    moved->polling_pos = warp.polling_pos;
    machine->polling_list.pop_back();
    warp.polling_pos = -1;
  }
  if (!warp.listed) {
    warp.listed = true;
    machine->run_list.push_back(&warp);
  }
}

void end_launch(Status status, const std::string& message) {
  machine->report.status = status;
  machine->report.message = message;
  switch_fiber(machine->current->fiber, machine->scheduler);
  std::abort();  // the scheduler runs nothing more
}

void trap_rank() {
  if (!machine->has_ranks()) end_launch(Status::kTrapped, "trap");
  machine->trapping = machine->current->warp->block->rank;
  switch_fiber(machine->current->fiber, machine->scheduler);
  std::abort();  // no lane of the rank runs any more
}

void misuse(const std::string& what) {
  const Lane& lane = *machine->current;
  end_launch(Status::kMisuse, rank_text(*lane.warp->block->rank) + "block " + std::to_string(lane.identity.block_idx) + " warp " +
                                  std::to_string(lane.warp->idx_in_block) + " lane " + std::to_string(lane.idx) + ": " + what);
}

const char* name(Status status) {
  switch (status) {
    case Status::kOk: return "ok";
    case Status::kTrapped: return "trapped";
    case Status::kDeadlock: return "deadlock";
    case Status::kMisuse: return "misuse";
  }
  return "unknown";
}

}  // namespace sgl_lowlatency::emulation
