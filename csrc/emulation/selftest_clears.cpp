// Self-tests of clears: hand-over buffers in generations that are cleared ahead of their use. `values` is [wrong results, ...].
#include "emulation/selftest.hpp"
#include "sgl_lowlatency/dialect/dialect.hpp"

namespace sgl_lowlatency::emulation {
namespace {

using namespace dialect;

struct alignas(16) Vector {
  uint32_t w[4];
};

template <typename T>
Region region(const char* name, std::vector<T>& memory) {
  return {name, memory.data(), memory.size() * sizeof(T), true};
}

struct Handover {
  bool fence = true;
  bool fence_every_lane = true;
  bool barrier = true;      // between a layer's fence and its clear
  bool clear = true;
  uint32_t clear_ahead = 3;  // layers; of 4 generations: 4 is the one in use, 1 comes too late to be known
};

// 3 blocks pass a vector a thread through 10 layers in 4 generations: store, await those of all blocks, fence, barrier, clear.
// Right: a block clears in layer l what layer l - 1 read. Whose words of layer l it has seen has fenced after those reads. The
// words of layer l + 2 tell of the clear, and layer l + 3 uses it.
SelftestRun handover(uint64_t seed, Handover with) {
  constexpr int32_t kBlocks = 3, kThreads = 64;
  constexpr uint32_t kLayers = 10, kGenerations = 4;
  std::vector<Vector> words(kGenerations * kBlocks * kThreads);
  for (size_t i = 0; i < words.size(); ++i) {
    const bool is_first_use = i < static_cast<size_t>(3 * kBlocks * kThreads);  // the fourth holds what an earlier launch left
    for (uint32_t& w : words[i].w) w = is_first_use || !with.clear ? abi::kUnwritten : 77u;
  }
  double wrong = 0;
  Options options;
  options.seed = seed;
  options.regions = {region("words", words)};
  const Report report = launch(kBlocks, kThreads, 0, [&] {
    const auto at = [&](uint32_t layer, int32_t block, uint32_t thread) {
      return words[(layer % kGenerations * kBlocks + block) * kThreads + thread].w;
    };
    const uint32_t thread = thread_idx();
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const uint32_t value = layer * 1000 + thread;
      store_words(at(layer, block_idx(), thread), {value, value + 1, value + 2, value + 3});
      for (int32_t block = 0; block < kBlocks; ++block) {
        const uint32_t other = (thread + layer * 5 + block) % kThreads;
        uint32_t w[4];
        for (uint32_t looks = 0;; ++looks) {
          load_words(w, at(layer, block, other));
          if (w[0] != abi::kUnwritten && w[1] != abi::kUnwritten && w[2] != abi::kUnwritten && w[3] != abi::kUnwritten) break;
          if (looks == 2000) trap();  // lost to a wrong clear
          backoff();
        }
        for (uint32_t i = 0; i < 4; ++i) wrong += w[i] != layer * 1000 + other + i;
      }
      if (with.fence && (with.fence_every_lane || thread % 32 == 0)) fence_acq_rel_gpu();
      if (with.barrier) sync_block(); else sync_warp();
      if (with.clear) clear_words(at(layer + with.clear_ahead, block_idx(), thread));
    }
  }, options);
  return {report, {wrong}};
}

// 32 lanes of block 0 clear a vector and fence, or (`late`) fence and clear; then raise a word each. A lane of block 1 awaits
// all of these, fences and loads a word of each vector.
SelftestRun clear_and_fence(uint64_t seed, bool late) {
  std::vector<Vector> words(32, Vector{{1, 1, 1, 1}}), flags(8, Vector{{abi::kUnwritten, abi::kUnwritten, abi::kUnwritten, abi::kUnwritten}});
  double old = 0;
  Options options;
  options.seed = seed;
  options.regions = {region("words", words), region("flags", flags)};
  const Report report = launch(2, 32, 0, [&] {
    const int32_t lane = thread_idx();
    uint32_t w[1];
    if (block_idx() == 0) {
      if (!late) clear_words(words[lane].w);
      fence_acq_rel_gpu();
      if (late) clear_words(words[lane].w);
      store_words(&flags[lane / 4].w[lane % 4], {1});
    } else if (lane == 0) {
      for (int32_t i = 0; i < 32; ++i) {
        for (load_words(w, &flags[i / 4].w[i % 4]); w[0] == abi::kUnwritten; load_words(w, &flags[i / 4].w[i % 4])) backoff();
      }
      fence_acq_rel_gpu();
      for (int32_t i = 0; i < 32; ++i) {
        load_words(w, &words[i].w[i % 4]);
        old += w[0] != abi::kUnwritten;
      }
    }
  }, options);
  return {report, {old}};
}

enum class Pair : int32_t { kClearStore, kClearLoad, kClearClear, kStoreStore, kStoreStoreInOrder, kStoreClearStoreInOrder };

// Two accesses of one vector, by two blocks in no order or by one lane. `values` is empty.
SelftestRun pair_of(uint64_t seed, Pair pair) {
  std::vector<Vector> words(1, Vector{{1, 1, 1, 1}});
  Options options;
  options.seed = seed;
  options.regions = {region("words", words)};
  const Report report = launch(2, 32, 0, [&] {
    if (thread_idx() != 3) return;
    uint32_t* const vector = words[0].w;
    const auto store = [&](uint32_t value) { store_words(&vector[2], {value, value + 1}); };
    if (pair == Pair::kStoreStoreInOrder || pair == Pair::kStoreClearStoreInOrder) {
      if (block_idx() == 1) return;
      store(5);
      if (pair == Pair::kStoreClearStoreInOrder) clear_words(vector);
      return store(7);
    }
    const bool is_first = block_idx() == 0;
    if (pair == Pair::kStoreStore) return store(5);
    if (is_first || pair == Pair::kClearClear) return clear_words(vector);
    uint32_t w[4];
    pair == Pair::kClearStore ? store(5) : load_words(w, vector);
  }, options);
  return {report, {}};
}

}  // namespace

void add_clears_selftests(Selftests& tests) {
  tests["handover"] = [](uint64_t seed) { return handover(seed, {}); };
  tests["handover_no_fence"] = [](uint64_t seed) { return handover(seed, {false}); };
  tests["handover_fence_of_one_lane"] = [](uint64_t seed) { return handover(seed, {true, false}); };
  tests["handover_no_barrier"] = [](uint64_t seed) { return handover(seed, {true, true, false}); };
  tests["handover_no_clear"] = [](uint64_t seed) { return handover(seed, {true, true, true, false}); };
  tests["handover_clear_too_early"] = [](uint64_t seed) { return handover(seed, {true, true, true, true, 4}); };
  tests["handover_clear_too_late"] = [](uint64_t seed) { return handover(seed, {true, true, true, true, 1}); };
  tests["clear_then_fence"] = [](uint64_t seed) { return clear_and_fence(seed, false); };
  tests["fence_then_clear"] = [](uint64_t seed) { return clear_and_fence(seed, true); };
  tests["clear_and_store"] = [](uint64_t seed) { return pair_of(seed, Pair::kClearStore); };
  tests["clear_and_load"] = [](uint64_t seed) { return pair_of(seed, Pair::kClearLoad); };
  tests["clear_and_clear"] = [](uint64_t seed) { return pair_of(seed, Pair::kClearClear); };
  tests["store_and_store"] = [](uint64_t seed) { return pair_of(seed, Pair::kStoreStore); };
  tests["store_then_store"] = [](uint64_t seed) { return pair_of(seed, Pair::kStoreStoreInOrder); };
  tests["store_clear_store"] = [](uint64_t seed) { return pair_of(seed, Pair::kStoreClearStoreInOrder); };
}

}  // namespace sgl_lowlatency::emulation
