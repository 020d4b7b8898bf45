// Begins and ends launches: the machine's memory, its ranks, what the report says.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "machine.hpp"

namespace sgl_lowlatency::emulation {

const ThreadIdentity* current_identity = nullptr;
dialect::Planted current_planted = dialect::Planted::kNone;
Machine* machine = nullptr;

namespace {

constexpr uint64_t kStartNs = 1'000'000'000;

// Kept between launches: stacks and shared memory.
struct Storage {
  std::mutex one_launch;
  StackPool stacks;
  std::unique_ptr<char, void (*)(void*)> shared{nullptr, std::free};
  size_t shared_bytes = 0;

  char* reserve_shared(size_t bytes) {
    if (bytes > shared_bytes) {
      shared.reset(static_cast<char*>(std::aligned_alloc(abi::kStageAlignment, bytes)));
      shared_bytes = shared ? bytes : 0;
      if (!shared) throw std::bad_alloc();
    }
    return shared.get();
  }
};

Storage& storage() {
  static Storage kept;
  return kept;
}

void check(const Kernel& kernel, int32_t warp_size) {
  if (kernel.grid < 1 || kernel.grid > 1024) throw std::invalid_argument("emulation: grid must be 1..1024");
  if (kernel.block_threads < warp_size || kernel.block_threads > 1024 || kernel.block_threads % warp_size != 0) {
    throw std::invalid_argument("emulation: block_threads must be a multiple of " + std::to_string(warp_size) + ", at most 1024");
  }
  if (kernel.shared_bytes > (size_t{1} << 20)) throw std::invalid_argument("emulation: shared_bytes above 1 MiB");
}

// "trap", and of several ranks whose.
std::string traps_of(const Machine& m) {
  std::string text;
  for (const auto& rank : m.ranks) {
    if (rank->trapped) text += (text.empty() ? "trap of rank " : ", ") + std::to_string(rank->idx);
  }
  return text;
}

thread_local bool thread_is_launching = false;

struct Running {
  explicit Running(Machine& m) {
    machine = &m;
    current_planted = m.options.planted;
    thread_is_launching = true;
  }
  ~Running() {
    thread_is_launching = false;
    machine = nullptr;
    current_identity = nullptr;
    current_planted = dialect::Planted::kNone;
  }
};

}  // namespace

Machine::Machine(const std::vector<Rank>& programs, const Options& launch_options, Report& launch_report, uint32_t num_warps)
    : options(launch_options),
      report(launch_report),
      warp_size(launch_options.warp_size),
      all_lanes(~LaneMask{0} >> (64 - launch_options.warp_size)),
      random(launch_options.seed),
      lanes(static_cast<size_t>(num_warps) * launch_options.warp_size),
      global(launch_options.regions),
      released(num_warps),
      system_released(num_warps),
      system_fenced(num_warps),
      now_ns(kStartNs) {
  static constexpr uint32_t kStale[4] = {4, 8, 12, 15};
  static constexpr uint32_t kBulk[4] = {1, 4, 16, 128};
  stale_sixteenths = kStale[random.below(4)];
  bulk_one_in = kBulk[random.below(4)];
  for (const Rank& program : programs) ranks.push_back(std::make_unique<RankState>(RankState{program, static_cast<int32_t>(ranks.size())}));
  for (uint32_t w = 0; w < num_warps; ++w) {
    warps.push_back(std::make_unique<Warp>(num_warps, all_lanes));
    Warp& warp = *warps.back();
    warp.idx = w;
    warp.lanes = &lanes[static_cast<size_t>(w) * warp_size];
    for (int32_t l = 0; l < warp_size; ++l) {
      warp.lanes[l].warp = &warp;
      warp.lanes[l].idx = l;
      warp.lanes[l].bit = LaneMask{1} << l;
    }
  }
}

void prepare_lane(Lane& lane) {
  const size_t i = static_cast<size_t>(&lane - machine->lanes.data());
  prepare_fiber(lane.fiber, storage().stacks.stack(i), kStackBytes - (i % 16) * 64, fiber_entry);
}

Report launch_ranks(const std::vector<Rank>& ranks, const Options& options) {
  if (thread_is_launching) throw std::invalid_argument("emulation: launch inside a kernel");
  if (options.starvation < -1 || options.starvation > 3) throw std::invalid_argument("emulation: unknown starvation mode");
  if (options.warp_size != 32 && options.warp_size != 64) throw std::invalid_argument("emulation: warp_size must be 32 or 64");
  uint32_t num_warps = 0;
  size_t shared_bytes = 0;
  std::vector<uint32_t> warps_of;
  std::vector<size_t> shared_of;
  for (const Rank& rank : ranks) {
    if (rank.slowness < 1) throw std::invalid_argument("emulation: slowness must be 1 or more");
    uint32_t warps = 0;
    size_t shared = 0;
    for (const Kernel& kernel : rank.kernels) {
      check(kernel, options.warp_size);
      warps = std::max(warps, static_cast<uint32_t>(kernel.grid * (kernel.block_threads / options.warp_size)));
      shared = std::max(shared, shared_stride(kernel.shared_bytes) * kernel.grid);
    }
    warps_of.push_back(warps);
    shared_of.push_back(shared);
    num_warps += warps;
    shared_bytes += shared;
  }
  if (num_warps > UINT16_MAX) throw std::invalid_argument("emulation: more than 65535 warps");
  const std::lock_guard<std::mutex> lock(storage().one_launch);
  storage().stacks.reserve(static_cast<size_t>(num_warps) * options.warp_size);
  char* shared = storage().reserve_shared(shared_bytes);
  Report report;
  Machine launched(ranks, options, report, num_warps);
  uint32_t first_warp = 0;
  for (size_t i = 0; i < ranks.size(); ++i) {
    RankState& rank = *launched.ranks[i];
    rank.first_warp = first_warp;
    rank.num_warps = warps_of[i];
    rank.shared = shared;
    first_warp += warps_of[i];
    shared += shared_of[i];
  }
  const Running running(launched);
  run_kernels(launched);
  const std::string traps = traps_of(launched);
  if (report.status == Status::kOk && !traps.empty()) {
    report.status = Status::kTrapped;
    report.message = traps;
  }
  report.virtual_ns = launched.now_ns - kStartNs;
  return report;
}

Report launch(int grid, int block_threads, size_t shared_bytes, const std::function<void()>& body, const Options& options) {
  return launch_ranks({{{{grid, block_threads, shared_bytes, body}}}}, options);
}

}  // namespace sgl_lowlatency::emulation
