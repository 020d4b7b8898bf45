// Self-tests of single words: fences that synchronise through them, stale and torn loads, clears. `values` is [wrong results, ...].
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

uint32_t load_word(const uint32_t* address) {
  uint32_t w[1];
  load_words(w, address);
  return w[0];
}

void store_word(uint32_t* address, uint32_t value) { store_words(address, {value}); }

uint32_t await_word(const uint32_t* address) {
  uint32_t value;
  while ((value = load_word(address)) == abi::kUnwritten) backoff();
  return value;
}

void fence_if(bool wanted) {
  if (wanted) fence_acq_rel_gpu();
}

enum Fences : int32_t { kEveryLane, kNone, kLane0, kWrongSide };  // kWrongSide: after the store, before the load

struct Message {
  Fences writer = kEveryLane;
  Fences reader = kEveryLane;
  bool writer_sync = true;
  bool reader_sync = true;
  bool flags_in_region = true;
};

// Block 0: 32 lanes store 100 + lane, fence and raise a word each. Block 1: 32 lanes await them, fence and load a neighbour's.
SelftestRun message(uint64_t seed, Message with) {
  std::vector<uint32_t> data(32, 7), found(32);
  std::vector<Vector> flags(8);
  Options options;
  options.seed = seed;
  options.regions = {region("data", data)};
  if (with.flags_in_region) options.regions.push_back(region("flags", flags));
  const Report report = launch(2, 32, 0, [&] {
    const int32_t lane = thread_idx();
    uint32_t* const flag = &flags[lane / 4].w[lane % 4];
    if (block_idx() == 0) {
      store_plain(&data[lane], 100u + lane);
      if (with.writer_sync) sync_warp();
      fence_if(with.writer == kEveryLane || (with.writer == kLane0 && lane == 0));
      if (with.writer == kLane0) sync_warp();
      store_word(flag, lane);
      fence_if(with.writer == kWrongSide);
    } else {
      fence_if(with.reader == kWrongSide);
      await_word(flag);
      if (with.reader == kLane0) sync_warp();
      fence_if(with.reader == kEveryLane || (with.reader == kLane0 && lane == 0));
      if (with.reader_sync) sync_warp();
      found[lane] = load_plain(&data[with.writer_sync && !with.reader_sync ? lane : (lane + 9) % 32]);
    }
  }, options);
  double wrong = 0;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    wrong += found[lane] != 100 + (with.writer_sync && !with.reader_sync ? lane : (lane + 9) % 32);
  }
  return {report, {wrong}};
}

// Block 0's warps store; a barrier, then one thread passes a word to block 1, whose last thread passes another to block 2.
SelftestRun words_cumulativity(uint64_t seed, bool barrier) {
  constexpr int32_t kThreads = 96;
  std::vector<uint32_t> data(kThreads, 7);
  std::vector<Vector> flags(2);
  double wrong = 0;
  Options options;
  options.seed = seed;
  options.regions = {region("data", data), region("flags", flags)};
  const Report report = launch(3, kThreads, 0, [&] {
    const int32_t thread = thread_idx(), block = block_idx();
    if (block == 0) {
      store_plain(&data[thread], 100u + thread);
    } else {
      if (thread == 37) {
        await_word(&flags[block - 1].w[2]);
        fence_acq_rel_gpu();
      }
      sync_block();
      wrong += load_plain(&data[thread]) != 100u + thread;
    }
    if (barrier) sync_block();
    if (block < 2 && thread == kThreads - 1) {
      fence_acq_rel_gpu();
      store_word(&flags[block].w[2], 1);
    }
  }, options);
  return {report, {wrong}};
}

// Lane 1 of block 0 overwrites, with no fence of its own, the word by which lane 0 published.
// values: [did block 1 see lane 0's word].
SelftestRun replaced_publication(uint64_t seed) {
  std::vector<uint32_t> data(4, 7);
  std::vector<Vector> flags(1);
  double saw_first = 0;
  Options options;
  options.seed = seed;
  options.regions = {region("data", data), region("flags", flags)};
  const Report report = launch(2, 32, 0, [&] {
    uint32_t* const flag = &flags[0].w[0];
    if (block_idx() == 0) {
      if (thread_idx() == 0) {
        store_plain(&data[0], 100u);
        fence_acq_rel_gpu();
        store_word(flag, 1);
      }
      sync_warp();
      if (thread_idx() != 1) return;
      clear_words(flag);
      store_word(flag, 2);
    } else if (thread_idx() == 0) {
      uint32_t value;
      while ((value = load_word(flag)) != 2) {
        saw_first += value == 1;
        backoff();
      }
      fence_acq_rel_gpu();
      load_plain(&data[0]);
    }
  }, options);
  return {report, {saw_first}};
}

enum Access : int32_t { kLoadPlain, kStorePlain };

// Block 1 awaits a word of block 0 and uses it with a plain access: in no order.
SelftestRun plain_access_of_word(uint64_t seed, Access access) {
  std::vector<Vector> words(1);
  Options options;
  options.seed = seed;
  options.regions = {region("words", words)};
  const Report report = launch(2, 32, 0, [&] {
    if (thread_idx() != 0) return;
    if (block_idx() == 0) return store_word(&words[0].w[0], 1);
    await_word(&words[0].w[0]);
    access == kLoadPlain ? static_cast<void>(load_plain(&words[0].w[0])) : store_plain(&words[0].w[0], 2u);
  }, options);
  return {report, {}};
}

// Block 0 stores vectors; lanes 0 to 31 of blocks 1 and 2 poll them. values: [words that went back to unwritten for a lane, the
// same for the next lane after a sync_warp, loads that found part of a vector, loads that found old words of one stored before].
SelftestRun torn_vectors(uint64_t seed) {
  constexpr int32_t kVectors = 8;
  std::vector<Vector> words(kVectors);
  bool stored[kVectors] = {};
  double back = 0, back_for_next = 0, torn = 0, old = 0;
  Options options;
  options.seed = seed;
  options.regions = {region("words", words)};
  const Report report = launch(3, 32, 0, [&] {
    for (int32_t v = 0; v < kVectors; ++v) {
      if (block_idx() == 0) {
        if (thread_idx() == v) store_words(words[v].w, {1, 2, 3, 4});
        stored[v] = stored[v] || thread_idx() == v;
        continue;
      }
      for (int32_t seen = 0; seen < 4; backoff()) {
        uint32_t w[4];
        load_words(w, words[v].w);
        const bool was_stored = stored[v];
        int32_t now = 0;
        for (uint32_t i = 0; i < 4; ++i) now += w[i] == i + 1;
        back += now < seen;
        torn += now > 0 && now < 4;
        old += was_stored && now < 4;
        seen = now;
      }
      sync_warp();
      for (uint32_t other = 0; other < kVectors; ++other) {
        uint32_t w[2];
        load_words(w, &words[v].w[2]);
        back_for_next += w[0] != 3 || w[1] != 4;
      }
    }
  }, options);
  return {report, {back, back_for_next, torn, old}};
}

// One lane stores one word that every other lane of 3 blocks polls, with every kind of starvation. values: [wrong].
SelftestRun words_progress(uint64_t seed) {
  std::vector<Vector> words(1);
  double wrong = 0;
  Options options;
  options.seed = seed;
  options.starvation = static_cast<int32_t>(seed % 4);
  options.regions = {region("words", words)};
  const Report report = launch(3, 64, 0, [&] {
    if (block_idx() == 1 && thread_idx() == 5) return store_word(&words[0].w[3], 9);
    wrong += await_word(&words[0].w[3]) != 9;
  }, options);
  return {report, {wrong}};
}

}  // namespace

void add_words_selftests(Selftests& tests) {
  tests["words"] = [](uint64_t seed) { return message(seed, {}); };
  tests["words_own_lane"] = [](uint64_t seed) { return message(seed, {kEveryLane, kEveryLane, true, false}); };
  tests["words_outside_regions"] = [](uint64_t seed) { return message(seed, {kEveryLane, kEveryLane, true, true, false}); };
  tests["words_no_writer_fence"] = [](uint64_t seed) { return message(seed, {kNone, kEveryLane}); };
  tests["words_no_reader_fence"] = [](uint64_t seed) { return message(seed, {kEveryLane, kNone}); };
  tests["words_late_writer_fence"] = [](uint64_t seed) { return message(seed, {kWrongSide, kEveryLane}); };
  tests["words_early_reader_fence"] = [](uint64_t seed) { return message(seed, {kEveryLane, kWrongSide}); };
  tests["words_other_writer_fence"] = [](uint64_t seed) { return message(seed, {kLane0, kEveryLane, true, false}); };
  tests["words_other_reader_fence"] = [](uint64_t seed) { return message(seed, {kEveryLane, kLane0, true, false}); };
  tests["words_no_writer_sync"] = [](uint64_t seed) { return message(seed, {kEveryLane, kEveryLane, false, false}); };
  tests["words_cumulativity"] = [](uint64_t seed) { return words_cumulativity(seed, true); };
  tests["words_cumulativity_no_barrier"] = [](uint64_t seed) { return words_cumulativity(seed, false); };
  tests["replaced_publication"] = replaced_publication;
  tests["load_plain_of_word"] = [](uint64_t seed) { return plain_access_of_word(seed, kLoadPlain); };
  tests["store_plain_of_word"] = [](uint64_t seed) { return plain_access_of_word(seed, kStorePlain); };
  tests["torn_vectors"] = torn_vectors;
  tests["words_progress"] = words_progress;
}

}  // namespace sgl_lowlatency::emulation
