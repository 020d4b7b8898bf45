// Self-tests of several ranks: order that system scope gives and gpu scope does not, kernels of a stream, traps, slow and dead ranks,
// multicast. `values` is [wrong results, ...].
#include "emulation/selftest.hpp"
#include "sgl_lowlatency/dialect/dialect.hpp"

namespace sgl_lowlatency::emulation {
namespace {

using namespace dialect;

struct alignas(16) Vector {
  uint32_t w[4] = {abi::kUnwritten, abi::kUnwritten, abi::kUnwritten, abi::kUnwritten};
};

template <typename T>
Region region(const char* name, std::vector<T>& memory) {
  return {name, memory.data(), memory.size() * sizeof(T), true};
}

Kernel warp(std::function<void()> body, int32_t grid = 1) { return {grid, 32, 0, std::move(body)}; }

enum Scopes : int32_t { kBothSystem, kGpuRelease, kGpuAcquire };

// Rank 0: 32 lanes store, lane 0 releases a flag. Rank 1: lane 0 acquires it, all load.
SelftestRun message(uint64_t seed, Scopes scopes) {
  std::vector<uint32_t> data(32, 7), flag(1, 0);
  double wrong = 0;
  Options options;
  options.seed = seed;
  options.regions = {region("data", data)};
  const Rank writer{{warp([&] {
    store_plain(&data[thread_idx()], 100u + thread_idx());
    sync_warp();
    if (thread_idx() == 0) scopes == kGpuRelease ? add_release_gpu(&flag[0], 1u) : store_release_system(&flag[0], 1u);
  })}};
  const Rank reader{{warp([&] {
    const int32_t lane = thread_idx();
    while (lane == 0 && (scopes == kGpuAcquire ? load_acquire_gpu(&flag[0]) : load_acquire_system(&flag[0])) == 0) backoff();
    sync_warp();
    wrong += load_plain(&data[(lane + 9) % 32]) != 100u + (lane + 9) % 32;
  })}};
  const Report report = launch_ranks({writer, reader}, options);
  return {report, {wrong}};
}

struct Fences {
  bool writer_system = true;
  bool reader_system = true;
  bool store_system = true;
  bool load_system = true;
};

// The same by words and fences: lane l of rank 0 raises word l, lane l of rank 1 awaits it and loads what lane l + 9 stored.
SelftestRun words(uint64_t seed, Fences with) {
  std::vector<uint32_t> data(32, 7);
  std::vector<Vector> flags(8);
  double wrong = 0;
  Options options;
  options.seed = seed;
  options.regions = {region("data", data), region("flags", flags)};
  const Rank writer{{warp([&] {
    const int32_t lane = thread_idx();
    uint32_t* const flag = &flags[lane / 4].w[lane % 4];
    store_plain(&data[lane], 100u + lane);
    sync_warp();
    with.writer_system ? fence_acq_rel_system() : fence_acq_rel_gpu();
    with.store_system ? store_words_system(flag, {1u}) : store_words(flag, {1u});
  })}};
  const Rank reader{{warp([&] {
    const int32_t lane = thread_idx();
    const uint32_t* const flag = &flags[lane / 4].w[lane % 4];
    for (uint32_t w[1] = {abi::kUnwritten}; w[0] == abi::kUnwritten; backoff()) with.load_system ? load_words_system(w, flag) : load_words(w, flag);
    with.reader_system ? fence_acq_rel_system() : fence_acq_rel_gpu();
    sync_warp();
    wrong += load_plain(&data[(lane + 9) % 32]) != 100u + (lane + 9) % 32;
  })}};
  const Report report = launch_ranks({writer, reader}, options);
  return {report, {wrong}};
}

// Block 0 of rank 0 tells block 1 at gpu scope, which tells rank 1 at system scope: rank 1 is ordered behind both.
SelftestRun relay(uint64_t seed) {
  std::vector<uint32_t> data(2, 7), flags(2, 0);
  double wrong = 0;
  Options options;
  options.seed = seed;
  options.regions = {region("data", data)};
  const Rank tellers{{warp([&] {
    if (thread_idx() != 0) return;
    if (block_idx() == 1) {
      while (load_acquire_gpu(&flags[0]) == 0) backoff();
    }
    store_plain(&data[block_idx()], 100u);
    block_idx() == 0 ? add_release_gpu(&flags[0], 1u) : store_release_system(&flags[1], 1u);
  }, 2)}};
  const Rank reader{{warp([&] {
    if (thread_idx() != 0) return;
    while (load_acquire_system(&flags[1]) == 0) backoff();
    for (uint32_t& value : data) wrong += load_plain(&value) != 100u;
  })}};
  const Report report = launch_ranks({tellers, reader}, options);
  return {report, {wrong}};
}

// Rank 0: a kernel of 3 blocks of 2 warps stores, one of 1 block and 1 warp tells rank 1, and a third of 2 blocks reads what both did; each
// initialises an mbarrier of its own at the same place of shared memory. awaits: the third waits for the second, as it must.
SelftestRun kernels(uint64_t seed, bool awaits) {
  constexpr int32_t kCount = 3 * 64;
  std::vector<uint32_t> data(kCount, 7), flag(1, 0);
  double wrong = 0;
  Options options;
  options.seed = seed;
  options.regions = {region("data", data)};
  const auto init = [] {
    if (thread_idx() != 0) return;
    auto* const bar = reinterpret_cast<uint64_t*>(shared_base());
    mbarrier_init(bar, 1);
    mbarrier_init_fence();
    mbarrier_arrive(bar);
    while (!mbarrier_test(bar, 0)) backoff();
  };
  const auto count_wrong = [&] {
    for (int32_t i = thread_idx(); i < kCount; i += 32) wrong += load_plain(&data[i]) != 100u + i;
  };
  const Rank first{{{3, 64, 64, [&] {
                       init();
                       const uint32_t i = block_idx() * 64 + thread_idx();
                       store_plain(&data[i], 100u + i);
                     }},
                    {1, 32, 32, [&] {
                       init();
                       await_previous_launch();
                       if (thread_idx() == 0) store_release_system(&flag[0], 1u);
                     }},
                    {2, 32, 128, [&] {
                       init();
                       if (awaits) await_previous_launch();
                       count_wrong();
                     }}}};
  const Rank second{{warp([&] {
    while (thread_idx() == 0 && load_acquire_system(&flag[0]) == 0) backoff();
    sync_warp();
    count_wrong();
  })}};
  const Report report = launch_ranks({first, second}, options);
  return {report, {wrong}};
}

// Rank 1 of 3 traps while its other warps wait; the others count to 50 with a second kernel. values: [what they counted, ...].
SelftestRun trap_of_one(uint64_t seed) {
  std::vector<double> counted(3, 0);
  const auto rank = [&](int32_t idx) {
    const auto count = [&counted, idx] {
      for (int32_t i = 0; i < 25; ++i) {
        sync_warp();
        if (thread_idx() == 0) ++counted[idx];
        if (idx == 1 && i == 3 && thread_idx() == 17) trap();
      }
    };
    return Rank{{{2, 64, 0, [idx, count] {
                    if (thread_idx() < 32 && block_idx() == 0) count();
                    if (idx == 1) sync_block();
                  }},
                 warp(count)}};
  };
  Options options;
  options.seed = seed;
  const Report report = launch_ranks({rank(0), rank(1), rank(2)}, options);
  return {report, counted};
}

// Two ranks, one of them slow, hand a word to and fro. values: [wrong].
SelftestRun turns(uint64_t seed, uint32_t slowness) {
  std::vector<uint32_t> turn(1, 0);
  double wrong = 0;
  const auto rank = [&](uint32_t idx, uint32_t slow) {
    return Rank{{warp([&turn, &wrong, idx] {
      if (thread_idx() != 0) return;
      for (uint32_t i = idx; i < 20; i += 2) {
        while (load_acquire_system(&turn[0]) != i) backoff();
        wrong += turn[0] != i;
        store_release_system(&turn[0], i + 1);
      }
    })}, slow};
  };
  Options options;
  options.seed = seed;
  options.regions = {region("turn", turn)};
  const Report report = launch_ranks({rank(0, 1), rank(1, slowness)}, options);
  return {report, {wrong}};
}

// Rank 1 has no kernels; rank 0 waits for it without a deadline.
SelftestRun dead(uint64_t seed) {
  std::vector<uint32_t> flag(1, 0);
  Options options;
  options.seed = seed;
  const Rank waiting{{warp([&] {
    while (load_acquire_system(&flag[0]) == 0) backoff();
  })}};
  return {launch_ranks({waiting, Rank{}}, options), {}};
}

// Rank 0 stores a vector to a multicast address of two words' memory, one at each rank. values: [wrong].
SelftestRun multicast(uint64_t seed) {
  std::vector<Vector> first(2), second(2), address(2);
  double wrong = 0;
  Options options;
  options.seed = seed;
  options.regions = {region("first", first), region("second", second)};
  options.multicasts = {{address.data(), sizeof(Vector) * 2, {first.data(), second.data()}}};
  const auto await = [&](std::vector<Vector>& words) {
    uint32_t w[4];
    do {
      load_words_system(w, words[1].w);
      backoff();
    } while (w[0] == abi::kUnwritten || w[1] == abi::kUnwritten || w[2] == abi::kUnwritten || w[3] == abi::kUnwritten);
    for (uint32_t i = 0; i < 4; ++i) wrong += w[i] != i;
  };
  const Rank sender{{warp([&] {
    if (thread_idx() == 0) store_words_multicast(address[1].w, {0, 1, 2, 3});
    if (thread_idx() == 0) await(first);
  })}};
  const Rank receiver{{warp([&] { if (thread_idx() == 0) await(second); })}};
  const Report report = launch_ranks({sender, receiver}, options);
  return {report, {wrong}};
}

}  // namespace

void add_ranks_selftests(Selftests& tests) {
  tests["ranks_message"] = [](uint64_t seed) { return message(seed, kBothSystem); };
  tests["ranks_gpu_release"] = [](uint64_t seed) { return message(seed, kGpuRelease); };
  tests["ranks_gpu_acquire"] = [](uint64_t seed) { return message(seed, kGpuAcquire); };
  tests["ranks_words"] = [](uint64_t seed) { return words(seed, {}); };
  tests["ranks_words_gpu_writer_fence"] = [](uint64_t seed) { return words(seed, {false, true}); };
  tests["ranks_words_gpu_reader_fence"] = [](uint64_t seed) { return words(seed, {true, false}); };
  tests["ranks_words_gpu_store"] = [](uint64_t seed) { return words(seed, {true, true, false, true}); };
  tests["ranks_words_gpu_load"] = [](uint64_t seed) { return words(seed, {true, true, true, false}); };
  tests["ranks_relay"] = relay;
  tests["ranks_kernels"] = [](uint64_t seed) { return kernels(seed, true); };
  tests["ranks_kernel_no_await"] = [](uint64_t seed) { return kernels(seed, false); };
  tests["ranks_trap"] = trap_of_one;
  tests["ranks_even"] = [](uint64_t seed) { return turns(seed, 1); };
  tests["ranks_slow"] = [](uint64_t seed) { return turns(seed, 10); };
  tests["ranks_dead"] = dead;
  tests["ranks_multicast"] = multicast;
}

}  // namespace sgl_lowlatency::emulation
