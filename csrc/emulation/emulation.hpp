// Runs kernels written on the dialect without a GPU. See DESIGN.md for the model and what it does not model.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "sgl_lowlatency/dialect/planted.hpp"

namespace sgl_lowlatency::emulation {

// Global memory whose plain accesses are checked. Memory in no region is read and written directly.
struct Region {
  const char* name;
  void* base;
  size_t bytes;
  bool track_reads;  // also find writes that overtake a read
};

// What a store to a multicast address reaches: the same offset from each of `targets`.
struct Multicast {
  void* base;
  size_t bytes;
  std::vector<void*> targets;
};

enum class Starvation : int32_t {
  kBySeed = -1,
  kNone = 0,         // every runnable warp is equally likely
  kStarveBlock = 1,  // one block at a time gets nothing for a long stretch
  kStarveWarp = 2,   // one warp at a time gets nothing for a long stretch
  kFavourBlock = 3,  // one block at a time runs as far as it can
};

struct Options {
  uint64_t seed = 0;
  int32_t warp_size = 32;  // lanes of a warp, 32 (NVIDIA) or 64 (AMD's wave)
  dialect::Planted planted = dialect::Planted::kNone;
  int32_t starvation = static_cast<int32_t>(Starvation::kBySeed);
  uint64_t max_idle_ns = 3600ull * 1000 * 1000 * 1000;  // virtual time without progress before the launch is given up
  // Other processes write words that this launch polls: idle time passes as on the wall, instead of in jumps.
  bool is_shared = false;
  std::vector<Region> regions;
  std::vector<Multicast> multicasts;
};

enum class Status : int32_t { kOk = 0, kTrapped = 1, kDeadlock = 2, kMisuse = 3 };
const char* name(Status status);

enum class RaceKind : int32_t {
  kMissingRelease = 0,   // a read of another block's write that its writer never released
  kMissingAcquire = 1,   // a read of another block's write that was released, but not acquired by the reader
  kMissingBarrier = 2,   // a read of a write of another warp of the block, with no barrier between
  kMissingWarpSync = 3,  // a read of a write of another lane of the warp, with no sync_warp between
  kWriteAfterWrite = 4,  // two writes in no order
  kWriteAfterRead = 5,   // a write that may overtake an earlier read
  kConstantWritten = 6,  // load_constant or bulk_load of memory written in this launch
  kBulkUnfinished = 7,   // shared memory read before the mbarrier of its bulk_load was seen to complete
  kBulkOverwrite = 8,    // bulk_load or copy_async_16 into shared memory that a warp may still be reading
  kCopyUnfinished = 9,   // shared memory read before the wait for its copy_async_16 was seen
  kUnorderedClear = 10,  // load_words or store_words of a word whose clear is not ordered before
  kClearedWhileRead = 11,  // clear_words of a word that somebody may still be reading
  kWrittenTwice = 12,    // store_words over data of this launch that nobody cleared
  kNarrowScope = 13,     // accesses of two ranks that would be ordered, or atomic, if both sides had system scope
};
const char* name(RaceKind kind);

// `first` made the earlier access (for reads of unordered writes: the write), `second` the later one.
struct Race {
  RaceKind kind;
  std::string region;  // "shared" for shared memory
  size_t offset;       // bytes from the region's base
  uint32_t bytes;
  int32_t first_block, first_warp, first_lane;
  int32_t second_block, second_warp, second_lane;
  bool stale;  // a read that was given the value before the write
  int32_t first_rank, second_rank;
  // What keeps the two from being ordered: kMissingRelease, kMissingAcquire, kMissingBarrier, kMissingWarpSync or kNarrowScope; `kind` itself
  // where it says so, or concerns shared memory.
  RaceKind missing;
};

constexpr size_t kMaxRaces = 64;       // kept; all are counted
constexpr size_t kMaxRacesAlike = 8;  // kept of one kind in one region, each of another pair of warps

struct Report {
  Status status = Status::kOk;
  std::string message;    // empty when ok
  uint64_t switches = 0;  // fiber switches
  uint64_t slices = 0;    // times the scheduler chose a warp
  uint64_t virtual_ns = 0;
  uint64_t num_races = 0;
  std::vector<Race> races;  // a selection, see kMaxRaces
};

// One kernel: body() once for every thread of `grid` blocks. block_threads: a multiple of Options::warp_size, at most 1024; shared_bytes:
// dynamic shared memory of one block.
struct Kernel {
  int32_t grid;
  int32_t block_threads;
  size_t shared_bytes;
  std::function<void()> body;
};

// A GPU and its stream: kernels that run one after the other, each with all that the ones before did. Ranks run at the same time, share
// all memory, and are ordered by nothing but what they say to each other at system scope.
struct Rank {
  std::vector<Kernel> kernels;  // none: a rank that never comes
  uint32_t slowness = 1;        // gets one in so many of its turns, each of which takes so many times as long
};

// Runs several ranks. A trap ends its own rank; the others go on. The status is then kTrapped, and the message names the ranks.
// The rest as in launch().
Report launch_ranks(const std::vector<Rank>& ranks, const Options& options);

// One rank with one kernel. block_threads: as in Kernel; shared_bytes: dynamic shared memory of one block. One launch at a time in a process:
// concurrent calls wait for each other. Throws std::invalid_argument for sizes out of range or overlapping regions, std::system_error when memory
// for stacks is refused.
Report launch(int grid, int block_threads, size_t shared_bytes, const std::function<void()>& body, const Options& options);

}  // namespace sgl_lowlatency::emulation
