// Self-tests of ordering in global memory. `values` is [wrong results, ...]; planted mistakes show up as races as well.
#include "emulation/selftest.hpp"
#include "sgl_lowlatency/dialect/dialect.hpp"

namespace sgl_lowlatency::emulation {
namespace {

using namespace dialect;

template <typename T>
Region region(const char* name, std::vector<T>& memory, bool track_reads = true) {
  return {name, memory.data(), memory.size() * sizeof(T), track_reads};
}

void await_at_least(const uint32_t* counter, uint32_t target, bool acquire = true) {
  while ((acquire ? load_acquire_gpu(counter) : load_relaxed_gpu(counter)) < target) backoff();
}

double count_wrong(const std::vector<uint32_t>& found, uint32_t first_expected) {
  double wrong = 0;
  for (size_t i = 0; i < found.size(); ++i) wrong += found[i] != first_expected + i;
  return wrong;
}

struct MessagePassing {
  bool release = true;
  bool acquire = true;
  bool writer_sync = true;
  bool reader_sync = true;
};

// Block 0: 32 lanes store 100 + lane, lane 0 raises a flag. Block 1: lane 0 awaits the flag, 32 lanes load.
SelftestRun message_passing(uint64_t seed, MessagePassing with) {
  std::vector<uint32_t> data(32, 7), found(32), flag(1);
  Options options;
  options.seed = seed;
  options.regions = {region("data", data), region("flag", flag)};
  const Report report = launch(2, 32, 0, [&] {
    const int32_t lane = thread_idx();
    if (block_idx() == 0) {
      store_plain(&data[lane], 100u + lane);
      if (with.writer_sync) sync_warp();
      if (lane == 0) with.release ? add_release_gpu(&flag[0], 1) : add_relaxed_gpu(&flag[0], 1);
    } else {
      if (lane == 0) await_at_least(&flag[0], 1, with.acquire);
      if (with.reader_sync) sync_warp(); else found[lane] = shuffle(0u, 0);  // lanes meet, without order
      found[lane] = load_plain(&data[lane]);
    }
  }, options);
  return {report, {count_wrong(found, 100)}};
}

// Block 0's warps store; after a block barrier one thread signals block 1; after block 1's barrier another signals block 2.
SelftestRun barrier_cumulativity(uint64_t seed, bool barrier) {
  constexpr int32_t kThreads = 128;
  std::vector<uint32_t> data(kThreads, 7), found(2 * kThreads), flags(2);
  Options options;
  options.seed = seed;
  options.regions = {region("data", data)};
  const Report report = launch(3, kThreads, 0, [&] {
    const int32_t thread = thread_idx(), block = block_idx();
    if (block > 0) {
      if (thread == 37) await_at_least(&flags[block - 1], 1);
      sync_block();
      found[(block - 1) * kThreads + thread] = load_plain(&data[thread]) - 100u + (block - 1) * kThreads;
    } else {
      store_plain(&data[thread], 100u + thread);
    }
    if (block < 2) {
      if (barrier) sync_named(3, kThreads);
      if (thread == 5) add_release_gpu(&flags[block], 1);
    }
  }, options);
  return {report, {count_wrong(found, 0)}};
}

// Every block stores a partial; the last to take a ticket adds them in order and resets the ticket for the next round.
SelftestRun last_arriver(uint64_t seed) {
  constexpr int32_t kBlocks = 6, kRounds = 5;
  std::vector<uint32_t> partial(kBlocks), ticket(1), sums(kRounds), rounds(1);
  Options options;
  options.seed = seed;
  options.regions = {region("partial", partial), region("ticket", ticket), region("sums", sums)};
  const Report report = launch(kBlocks, 64, 0, [&] {
    for (uint32_t round = 0; round < kRounds; ++round) {
      if (thread_idx() == 0) {
        store_plain(&partial[block_idx()], round * 10 + block_idx());
        if (fetch_add_acq_rel_gpu(&ticket[0], 1) == kBlocks - 1) {
          uint32_t sum = 0;
          for (int32_t b = 0; b < kBlocks; ++b) sum += load_plain(&partial[b]);
          store_plain(&sums[round], sum);
          store_plain(&ticket[0], 0u);
          add_release_gpu(&rounds[0], 1);
        }
        await_at_least(&rounds[0], round + 1);
      }
      sync_block();
    }
  }, options);
  double wrong = 0;
  for (uint32_t round = 0; round < kRounds; ++round) wrong += sums[round] != kBlocks * (round * 10) + 15;
  return {report, {wrong}};
}

// Block 0 overwrites a word in 20 rounds, block 1 reads it; `credit`: block 0 waits until block 1 has read.
SelftestRun write_after_read(uint64_t seed, bool credit) {
  std::vector<uint32_t> data(4), flags(64);
  double wrong = 0;
  Options options;
  options.seed = seed;
  options.regions = {region("data", data)};
  const Report report = launch(2, 32, 0, [&] {
    if (thread_idx() != 0) return;
    for (uint32_t round = 1; round <= 20; ++round) {
      if (block_idx() == 0) {
        if (credit) await_at_least(&flags[32], round - 1);
        store_plain(&data[0], round);
        add_release_gpu(&flags[0], 1);
      } else {
        await_at_least(&flags[0], round);
        wrong += load_plain(&data[0]) != round;
        add_release_gpu(&flags[32], 1);
      }
    }
  }, options);
  return {report, {wrong}};
}

// Two blocks store neighbouring bf16 of one word, and (`overlap`) both store the word after it.
SelftestRun neighbour_halves(uint64_t seed, bool overlap) {
  std::vector<bf16> data(8, bf16{0});
  Options options;
  options.seed = seed;
  options.regions = {region("data", data)};
  const Report report = launch(2, 32, 0, [&] {
    if (thread_idx() != 3) return;
    store_plain(&data[block_idx()], to_bf16(1.0f + block_idx()));
    if (overlap) store_plain(&data[2], to_bf16(3.0f));
  }, options);
  return {report, {to_float(data[0]), to_float(data[1]), to_float(data[2])}};
}

// Block 1 loads with load_constant what block 0 has written and released.
SelftestRun constant_written(uint64_t seed) {
  std::vector<float> data(8, 1.0f);
  std::vector<uint32_t> flag(1);
  Options options;
  options.seed = seed;
  options.regions = {region("data", data)};
  double untouched = 0;
  const Report report = launch(2, 32, 0, [&] {
    if (thread_idx() != 0) return;
    if (block_idx() == 0) {
      store_plain(&data[0], 2.0f);
      add_release_gpu(&flag[0], 1);
    } else {
      await_at_least(&flag[0], 1);
      load_constant(&data[0]);
      untouched = load_constant(&data[7]);
    }
  }, options);
  return {report, {untouched}};
}

// Two warps of a block hand over through global memory, with and without a barrier.
SelftestRun warps_of_a_block(uint64_t seed, bool barrier) {
  std::vector<uint32_t> data(32, 7), found(32);
  Options options;
  options.seed = seed;
  options.regions = {region("data", data)};
  const Report report = launch(1, 64, 0, [&] {
    const int32_t lane = thread_idx() % 32, warp = thread_idx() / 32;
    if (warp == 0) store_plain(&data[lane], 100u + lane);
    if (barrier) sync_block();
    if (warp == 1) {
      for (int32_t i = 0; i < 20; ++i) shuffle(0u, 0);
      found[lane] = load_plain(&data[31 - lane]) - 31 + 2 * lane;
    }
  }, options);
  return {report, {count_wrong(found, 100)}};
}

// A polled counter that every block raises 50 times: progress under every kind of starvation. values: its end value.
SelftestRun contended_counter(uint64_t seed) {
  std::vector<uint32_t> counter(1);
  Options options;
  options.seed = seed;
  options.starvation = static_cast<int32_t>(seed % 4);
  const Report report = launch(4, 64, 0, [&] {
    if (thread_idx() % 32 != 0) return;
    for (uint32_t i = 1; i <= 50; ++i) {
      fetch_add_acq_rel_gpu(&counter[0], 1);
      await_at_least(&counter[0], 8 * i);
    }
  }, options);
  return {report, {static_cast<double>(counter[0])}};
}

}  // namespace

void add_ordering_selftests(Selftests& tests) {
  tests["message_passing"] = [](uint64_t seed) { return message_passing(seed, {}); };
  tests["message_passing_no_release"] = [](uint64_t seed) { return message_passing(seed, {false, true, true, true}); };
  tests["message_passing_no_acquire"] = [](uint64_t seed) { return message_passing(seed, {true, false, true, true}); };
  tests["message_passing_no_writer_sync"] = [](uint64_t seed) { return message_passing(seed, {true, true, false, true}); };
  tests["message_passing_no_reader_sync"] = [](uint64_t seed) { return message_passing(seed, {true, true, true, false}); };
  tests["barrier_cumulativity"] = [](uint64_t seed) { return barrier_cumulativity(seed, true); };
  tests["barrier_cumulativity_no_barrier"] = [](uint64_t seed) { return barrier_cumulativity(seed, false); };
  tests["last_arriver"] = last_arriver;
  tests["write_after_read"] = [](uint64_t seed) { return write_after_read(seed, false); };
  tests["write_after_read_credit"] = [](uint64_t seed) { return write_after_read(seed, true); };
  tests["neighbour_halves"] = [](uint64_t seed) { return neighbour_halves(seed, false); };
  tests["write_after_write"] = [](uint64_t seed) { return neighbour_halves(seed, true); };
  tests["constant_written"] = constant_written;
  tests["warps_of_a_block"] = [](uint64_t seed) { return warps_of_a_block(seed, true); };
  tests["warps_of_a_block_no_barrier"] = [](uint64_t seed) { return warps_of_a_block(seed, false); };
  tests["contended_counter"] = contended_counter;
}

}  // namespace sgl_lowlatency::emulation
