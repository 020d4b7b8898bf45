// State of one launch. The rules live in scheduler, kernels, collectives, mbarrier, copy_async, atomics, words, fence and ordering.cpp.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "clock.hpp"
#include "emulation.hpp"
#include "fiber.hpp"
#include "global_memory.hpp"
#include "sgl_lowlatency/dialect/host.hpp"

namespace sgl_lowlatency::emulation {

constexpr int32_t kMaxWarpSize = 64;  // lanes of a wave; Options::warp_size says how many a launch has
constexpr int32_t kNumNamedBarriers = 16;
constexpr uint32_t kPoisonByte = 0xff;  // a NaN as bf16 and as float
constexpr uint32_t kLogLineBuckets = 6;  // store_words wakes pollers by the hash of the 16-byte line
constexpr uint64_t kAllLineBuckets = ~0ull;

// xorshift64*: every choice of a launch comes from one of these.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 0xd1b54a32d192ed03ull) {
    if (state_ == 0) state_ = 1;
    for (int i = 0; i < 4; ++i) next();
  }
  uint64_t next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545f4914f6cdd1dull;
  }
  uint32_t below(uint32_t bound) { return static_cast<uint32_t>(((next() >> 32) * bound) >> 32); }
  bool one_in(uint32_t n) { return below(n) == 0; }

 private:
  uint64_t state_;
};

struct Warp;
struct Block;
struct RankState;

struct Mbarrier {
  uint64_t* address = nullptr;
  uint32_t idx = 0;            // in Block::mbarriers
  uint32_t expected_arrivals = 0;
  uint32_t pending_arrivals = 0;
  int64_t pending_bytes = 0;   // PTX tx-count
  uint32_t phase = 0;          // phases completed; its lowest bit is the parity of the phase in progress
  bool init_fenced = false;
  Stamp init_stamp;
  Clock arriving;              // what the arrivals of all phases so far release
  ClockPtr completed;          // `arriving` when the last phase completed
  std::vector<LaneMask> waiting_lanes;  // [warp of the block] lanes suspended in mbarrier_test

  explicit Mbarrier(size_t num_warps) : arriving(num_warps) {}
};

// One copy_async_16 of a lane that it has not waited for.
struct AsyncCopy {
  char* shared;
  const char* global;
  uint32_t group;
};

struct Lane {
  Fiber fiber;
  ThreadIdentity identity;
  Warp* warp;
  LaneMask bit;
  int32_t idx;
  ClockPtr learned;              // acquired since the last warp barrier, not yet known to the other lanes
  uint32_t fenced_interval = 0;  // its accesses since its last fence are of at least this interval
  PublicationPtr publication;    // of its last fence
  PublicationPtr system_publication;  // of its last one of system scope
  std::vector<PublicationPtr> pending;  // carried by words read since its last fence, newest of each lane
  std::vector<AsyncCopy> copies;  // not waited for, by group
  uint32_t copies_done = 0;       // of `copies`, from the first
  uint32_t copy_group = 0;        // of the next copy: groups committed
  bool has_awaited = true;        // the kernel in front of its own: await_previous_launch
  int32_t failed_mbarrier = -1;  // of the last mbarrier_test that returned false
  uint32_t failed_phase = 0;
  uint64_t looked_at_change = 0;  // Machine::num_changes when backoff last returned: what is polled was read later
  uint64_t looked_at = 0;         // line buckets of the words it has loaded since; all when it may poll something else
};

enum class Collective : uint8_t { kNone, kSyncWarp, kShuffle, kReduceMax, kReduceMin, kReduceOr, kLdmatrix, kMma, kMfma, kBallot, kBarrier };
const char* name(Collective kind);

struct Warp {
  Block* block;
  uint32_t idx_in_block;
  uint32_t idx;        // over all blocks
  Lane* lanes;         // [Machine::warp_size]
  LaneMask runnable;
  LaneMask polling = 0;     // in backoff or pause
  LaneMask got_old = 0;     // lanes given an old word since their last backoff: worth another look at once
  LaneMask at_mbarrier = 0; // suspended in mbarrier_test
  LaneMask at_barrier = 0;  // in a block barrier
  LaneMask exited = 0;
  Collective collective = Collective::kNone;
  LaneMask in_collective = 0;
  int32_t barrier_id = -1;  // of the block barrier being entered or waited for
  int32_t barrier_threads = 0;
  bool barrier_orders = true;  // false: sync_shared, which orders no accesses of global memory
  void* arguments[kMaxWarpSize] = {};
  uint32_t interval = 1;
  uint32_t fenced_interval = 0;  // largest of its lanes
  Clock clock;
  ClockPtr clock_copy;        // of `clock`, for fences; null when there was none since it changed
  ClockPtr system_fenced;     // the last clock_copy that is in Machine::system_fenced
  ClockPtr merged_from[2], merged;  // the last merge of two learned clocks, for the lanes that follow
  ClockPtr fence_from, fence_merged;  // the same of the last fence that learned `fence_pending`
  std::vector<PublicationPtr> fence_pending;
  bool descending = false;
  bool listed = true;         // in Machine::run_list
  int32_t polling_pos = -1;   // in Machine::polling_list
  uint64_t polled_change = 0; // smallest Lane::looked_at_change of `polling`
  uint64_t awaited = 0;       // in Machine::polling_list: all Lane::looked_at of `polling`

  Warp(size_t num_warps, LaneMask all_lanes) : runnable(all_lanes), clock(num_warps) {}
};

struct NamedBarrier {
  int32_t num_threads = 0;  // 0: nobody waits
  int32_t arrived = 0;
  std::vector<Warp*> waiting;
  std::unique_ptr<Clock> clock;
};

// What copies and ldmatrix did to 16 bytes of shared memory.
struct SharedGranule {
  uint16_t mbarrier = 0;   // index + 1 of the last bulk load, 0: none
  uint16_t in_flight = 0;
  uint32_t needs_phase = 0;  // phases of that mbarrier a reader must have seen
  uint32_t issuer_warp = 0;
  uint32_t read_interval = 0;  // of the last ldmatrix since, 0: none
  uint32_t read_warp = 0;
  uint32_t copies_pending = 0;  // copy_async_16 not waited for
  Stamp copy_waited;            // of the last wait for one
};

struct Block {
  RankState* rank;
  int32_t idx;       // in the kernel's grid
  char* shared;
  size_t shared_bytes;
  BlockRange range;
  int32_t live_warps;
  NamedBarrier barriers[kNumNamedBarriers];
  std::vector<std::unique_ptr<Mbarrier>> mbarriers;
  std::vector<SharedGranule> granules;
  uint32_t bulk_in_flight = 0;
};

struct BulkCopy {
  Block* block;
  char* shared;
  const char* global;          // of bulk_load
  const abi::WeightMap* map;   // of load_stage, else null
  int32_t row;
  int32_t part;
  int32_t chunk;
  uint32_t bytes;
  uint32_t mbarrier;
  uint32_t phase;
};

// A word accessed with release or acquire order: what the ranks released there for themselves, and what is for all.
struct SyncLocation {
  std::vector<std::shared_ptr<Clock>> of_rank;
  std::shared_ptr<Clock> of_system;  // null in a launch of one rank
};

// A rank: the kernel that it runs now, and the one that follows. Its kernels use the same warps again, whose clocks then know all that
// the kernel before did.
struct RankState {
  const Rank& program;
  int32_t idx;
  size_t next_kernel = 0;
  uint32_t first_warp = 0;
  uint32_t num_warps = 0;  // of its largest kernel
  char* shared = nullptr;
  std::vector<std::unique_ptr<Block>> blocks;
  uint32_t live_warps = 0;
  bool trapped = false;
  std::vector<PublicationPtr> offered;  // by words of other ranks that its lanes loaded: of each lane there the newest
};

struct Machine {
  const Options& options;
  Report& report;
  const int32_t warp_size;
  const LaneMask all_lanes;
  Random random;
  std::vector<std::unique_ptr<RankState>> ranks;
  std::vector<Lane> lanes;
  std::vector<std::unique_ptr<Warp>> warps;
  Fiber scheduler;
  Lane* current = nullptr;
  GlobalMemory global;
  std::unordered_map<const void*, SyncLocation> sync_locations;
  Clock released;            // everything ever released, to name the missing half of a pair
  Clock system_released;     // in a launch of several ranks, the same at system scope by a word
  Clock system_fenced;       // and by a fence
  uint64_t next_tag = 1;
  std::vector<BulkCopy> bulk_copies;
  std::vector<Lane*> copying_lanes;  // with copies that have not happened
  std::vector<Warp*> run_list;
  std::vector<Warp*> polling_list;  // nothing runnable, at least one lane that a wake-up helps
  uint32_t live_warps = 0;
  RankState* kernel_done = nullptr;  // whose last warp has exited
  RankState* trapping = nullptr;     // of a trap, which the scheduler has to carry out
  uint64_t now_ns;
  uint64_t num_changes = 0;  // writes of words that somebody may poll
  uint64_t changed_at[1 << kLogLineBuckets] = {};  // num_changes after the last store_words to a line of the bucket
  uint64_t counter_changed_at = 0;                 // after the last write of any other kind
  bool progress = true;      // something other than polling happened since the last idle round
  uint32_t stale_sixteenths; // how often an unordered read gets the old value
  uint32_t bulk_one_in;      // how rarely a pending bulk copy happens

  Machine(const std::vector<Rank>& programs, const Options& launch_options, Report& launch_report, uint32_t num_warps);
  bool has_ranks() const { return ranks.size() > 1; }
};

extern Machine* machine;  // of the running launch

// Does the warp belong to the lane's rank?
inline bool is_of_rank(const Lane& lane, uint32_t warp) {
  return !machine->has_ranks() || machine->warps[warp]->block->rank == lane.warp->block->rank;
}

// ---- scheduler.cpp ----
void fiber_entry();             // of every lane
void run_kernels(Machine& m);   // until all ranks are done, or the report says why not
// For code running on a lane:
void leave_lane();                       // the current lane gives way; it runs on once it is runnable again
void maybe_preempt(uint32_t one_in);     // the whole warp may give way here
void wake_lanes(Warp& warp, LaneMask lanes);
[[noreturn]] void end_launch(Status status, const std::string& message);
[[noreturn]] void misuse(const std::string& what);  // adds who did it
[[noreturn]] void trap_rank();                      // of the current lane
int32_t rank_of(const Lane& lane);
std::string rank_text(const RankState& rank);  // "rank 1 ", or nothing where there is one

// ---- polling.cpp ----
uint64_t line_bucket(const void* line);         // a bit
void global_memory_changed();                   // a word that somebody may poll was written
void words_changed(const void* line);           // the same by store_words: wakes only lanes that look at the line's bucket
LaneMask lanes_with_news(const Warp& warp);     // polling, and what they looked at has changed since, or they got an old word
void park(Warp& warp);                          // into Machine::polling_list

// ---- waits.cpp ----
std::string describe_waits(const Machine& m);  // a line for every warp that has not exited

// ---- ordering.cpp ----
uint32_t interval_of(const Lane& lane);  // of the lane's next access
Stamp stamp_of(const Lane& lane, uint32_t flags);
bool knows(const Lane& lane, const Stamp& stamp);
void learn(Lane& lane, const ClockPtr& clock);
void publish_in_block(Lane& lane, Clock& target);
void publish_across_blocks(Lane& lane, Clock& target, Clock& record);  // record: Machine::released or system_released
void barrier_in_warp(Warp& warp);        // every lane learns and publishes to every other
LaneMask known_lanes(const Lane& lane, uint32_t warp, uint32_t interval);
bool phase_seen(const Lane& lane, uint32_t mbarrier, uint32_t phases);
void record_race(RaceKind kind, const char* region, size_t offset, uint32_t bytes, uint32_t first_warp, int32_t first_lane,
                 bool stale);
void record_race(RaceKind kind, const char* region, size_t offset, uint32_t bytes, const Stamp& first, bool stale);
RaceKind read_race_kind(const Lane& reader, const Stamp& write);

// ---- collectives.cpp ----
void check_barriers_can_complete(Block& block);
void require_warp_size(int32_t warp_size, const char* call);  // of calls that one vendor's warps have

// ---- atomics.cpp ----
void check_alignment(const void* address, uint32_t bytes, const char* call);
// The same, and that the kernel in front is awaited: for accesses of memory that it may touch.
void check_access(const void* address, uint32_t bytes, const char* call);

// ---- global_memory.cpp ----
uint32_t cell_mask(uintptr_t address, uint32_t bytes);  // of a line

// ---- kernels.cpp ----
size_t shared_stride(size_t shared_bytes);  // every block's shared memory begins at a multiple of kStageAlignment, as on the GPU
void prepare_lane(Lane& lane);        // launch.cpp: it will run the body of its rank's kernel
void start_kernel(RankState& rank);   // its next one
void finish_kernel(RankState& rank);  // all of its warps have exited
void kill_rank(RankState& rank);

// ---- fence.cpp ----
void add_pending(Lane& lane, const PublicationPtr& carried);
void fence(Scope scope);

// ---- copy_async.cpp ----
void finish_some_async_copies();
void check_copy_seen(const Lane& lane, const SharedGranule& granule, size_t offset);  // by ldmatrix
void check_copies_waited_for(const Lane& lane);  // at exit

// ---- mbarrier.cpp ----
size_t shared_offset(const Block& block, const void* pointer, uint32_t bytes, const char* what);
void check_shared_read(Lane& lane, const void* row);  // 16 bytes, by ldmatrix
void finish_bulk_copy(size_t idx);                    // of Machine::bulk_copies
bool wait_for_failed_mbarrier(Lane& lane);            // false: the lane's last mbarrier_test did not fail

}  // namespace sgl_lowlatency::emulation
