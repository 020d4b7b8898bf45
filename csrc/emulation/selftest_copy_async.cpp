// Self-tests of copy_async_16: copies by threads that land late, by group. `values` is [wrong results, ...].
#include <cstring>

#include "emulation/selftest.hpp"
#include "sgl_lowlatency/dialect/dialect.hpp"

namespace sgl_lowlatency::emulation {
namespace {

using namespace dialect;

struct alignas(16) Vector {
  uint32_t w[4];
};

Options with_seed(uint64_t seed) {
  Options options;
  options.seed = seed;
  return options;
}

std::vector<Vector> numbered(uint32_t count) {
  std::vector<Vector> source(count);
  for (uint32_t i = 0; i < count; ++i) source[i] = {{i, i + 1000, i + 2000, i + 3000}};
  return source;
}

enum class Wait : int32_t { kRight, kNone, kTooWeak, kNoBarrier };

// Two warps copy 6 tiles of 64 vectors through 3 stages, two groups ahead, and read each other's vectors.
SelftestRun pipeline(uint64_t seed, Wait wait) {
  constexpr int32_t kThreads = 64, kTiles = 6, kStages = 3;
  const std::vector<Vector> source = numbered(kTiles * kThreads);
  double wrong = 0;
  const Report report = launch(1, kThreads, kStages * kThreads * sizeof(Vector), [&] {
    Vector* const stages = reinterpret_cast<Vector*>(shared_base());
    const int32_t thread = thread_idx();
    const auto issue = [&](int32_t tile) {
      if (tile < kTiles) copy_async_16(&stages[tile % kStages * kThreads + thread], &source[tile * kThreads + thread]);
      copy_async_commit();  // an empty group counts as well
    };
    issue(0);
    issue(1);
    for (int32_t tile = 0; tile < kTiles; ++tile) {
      if (wait == Wait::kRight || wait == Wait::kNoBarrier) copy_async_wait<1>();
      if (wait == Wait::kTooWeak) copy_async_wait<2>();
      if (wait != Wait::kNoBarrier) sync_block();
      const int32_t other = wait == Wait::kNone ? thread : kThreads - 1 - thread;
      wrong += stages[tile % kStages * kThreads + other].w[2] != source[tile * kThreads + other].w[2];
      sync_block();
      issue(tile + 2);
    }
    copy_async_wait<0>();
  }, with_seed(seed));
  return {report, {wrong}};
}

// One lane issues three groups of two copies and looks on. values: [later group landed before an earlier, looks that saw old
// bytes, looks that saw poison, looks that saw a copy before the wait].
SelftestRun landing(uint64_t seed) {
  const std::vector<Vector> source = numbered(6);
  double out_of_order = 0, old = 0, poison = 0, early = 0;
  const Report report = launch(1, 32, 6 * sizeof(Vector), [&] {
    if (thread_idx() != 9) return;
    Vector* const landed = reinterpret_cast<Vector*>(shared_base());
    for (int32_t i = 0; i < 6; ++i) landed[i] = {{5, 5, 5, 5}};
    for (int32_t i = 0; i < 6; ++i) {
      copy_async_16(&landed[i], &source[i]);
      if (i % 2 == 1) copy_async_commit();
    }
    const auto has = [&](int32_t i) { return std::memcmp(&landed[i], &source[i], sizeof(Vector)) == 0; };
    for (int32_t looks = 0; looks < 16; ++looks) {
      for (int32_t i = 0; i < 6; ++i) {
        early += has(i);
        old += landed[i].w[1] == 5;
        poison += landed[i].w[1] == 0xffffffffu;
        for (int32_t later = i / 2 * 2 + 2; later < 6; ++later) out_of_order += has(later) && !has(i);
      }
      backoff();
    }
    copy_async_wait<2>();
    out_of_order += !has(0) || !has(1);
    copy_async_wait<0>();
    for (int32_t i = 0; i < 6; ++i) out_of_order += !has(i);
  }, with_seed(seed));
  return {report, {out_of_order, old, poison, early}};
}

struct Rows {
  bool wait = true;
  bool barrier = true;       // between the copies' wait and ldmatrix
  bool read_barrier = true;  // between ldmatrix and the next copies
};

// Warp 0 copies 32 rows of 16 bytes twice, warp 1 reads them by ldmatrix. values: [wrong].
SelftestRun rows(uint64_t seed, Rows with) {
  const std::vector<Vector> source = numbered(64);
  double wrong = 0;
  const Report report = launch(1, 64, 32 * sizeof(Vector), [&] {
    Vector* const row = reinterpret_cast<Vector*>(shared_base()) + thread_idx() % 32;
    const int32_t lane = thread_idx() % 32;
    for (int32_t round = 0; round < 2; ++round) {
      if (thread_idx() < 32) {
        copy_async_16(row, &source[round * 32 + lane]);
        copy_async_commit();
        if (with.wait) copy_async_wait<0>();
      }
      if (with.barrier) sync_block();
      if (thread_idx() >= 32) {
        uint32_t r[4];
        ldmatrix_x4(r, row);
        for (int32_t i = 0; i < 4; ++i) wrong += r[i] != source[round * 32 + i * 8 + lane / 4].w[lane % 4];
      }
      if (with.read_barrier) sync_block();
    }
    copy_async_wait<0>();
  }, with_seed(seed));
  return {report, {wrong}};
}

// The lane that reads its own copied row by ldmatrix, with or without a sync_warp after the wait. values: [wrong].
SelftestRun own_warp(uint64_t seed, bool sync) {
  const std::vector<Vector> source = numbered(32);
  const Report report = launch(1, 32, 32 * sizeof(Vector), [&] {
    Vector* const row = reinterpret_cast<Vector*>(shared_base()) + thread_idx();
    copy_async_16(row, &source[thread_idx()]);
    copy_async_commit();
    copy_async_wait<0>();
    if (sync) sync_warp();
    uint32_t r[4];
    ldmatrix_x4(r, row);
  }, with_seed(seed));
  return {report, {}};
}

// Copies what the launch has written: the read-only path is not coherent.
SelftestRun source_written(uint64_t seed) {
  std::vector<Vector> source = numbered(2);
  Options options = with_seed(seed);
  options.regions = {{"data", source.data(), source.size() * sizeof(Vector), true}};
  const Report report = launch(1, 32, 2 * sizeof(Vector), [&] {
    if (thread_idx() != 0) return;
    store_plain(&source[1].w[3], 1u);
    for (int32_t i = 0; i < 2; ++i) copy_async_16(shared_base() + i * 16, &source[i]);
    copy_async_commit();
    copy_async_wait<0>();
  }, options);
  return {report, {}};
}

// Mistakes that end the launch.
template <typename Body>
SelftestRun run(uint64_t seed, Body body) {
  static const std::vector<Vector> source = numbered(4);
  return {launch(1, 32, 64, [&] { if (thread_idx() == 4) body(shared_base(), reinterpret_cast<const char*>(source.data())); }, with_seed(seed)), {}};
}

}  // namespace

void add_copy_async_selftests(Selftests& tests) {
  tests["copy_async"] = [](uint64_t seed) { return pipeline(seed, Wait::kRight); };
  tests["copy_async_no_wait"] = [](uint64_t seed) { return pipeline(seed, Wait::kNone); };
  tests["copy_async_weak_wait"] = [](uint64_t seed) { return pipeline(seed, Wait::kTooWeak); };
  tests["copy_async_no_barrier"] = [](uint64_t seed) { return pipeline(seed, Wait::kNoBarrier); };
  tests["copy_async_landing"] = landing;
  tests["copy_async_rows"] = [](uint64_t seed) { return rows(seed, {}); };
  tests["copy_async_rows_no_wait"] = [](uint64_t seed) { return rows(seed, {false, true, true}); };
  tests["copy_async_rows_no_barrier"] = [](uint64_t seed) { return rows(seed, {true, false, true}); };
  tests["copy_async_rows_no_read_barrier"] = [](uint64_t seed) { return rows(seed, {true, true, false}); };
  tests["copy_async_own_warp"] = [](uint64_t seed) { return own_warp(seed, true); };
  tests["copy_async_own_warp_no_sync"] = [](uint64_t seed) { return own_warp(seed, false); };
  tests["copy_async_source_written"] = source_written;
  tests["copy_async_never_waited_for"] = [](uint64_t seed) {
    return run(seed, [](char* shared, const char* source) {
      copy_async_16(shared, source);
      copy_async_commit();
      copy_async_16(shared + 16, source);
      copy_async_commit();
      for (int32_t i = 0; i < 200; ++i) pause_ns(100);  // long landed, and still not waited for
      copy_async_wait<1>();
    });
  };
  tests["copy_async_never_committed"] = [](uint64_t seed) {
    return run(seed, [](char* shared, const char* source) {
      copy_async_16(shared, source);
      copy_async_wait<0>();
    });
  };
  tests["copy_async_misaligned"] = [](uint64_t seed) {
    return run(seed, [](char* shared, const char* source) { copy_async_16(shared, source + 8); });
  };
  tests["copy_async_not_to_shared"] = [](uint64_t seed) {
    return run(seed, [](char* shared, const char* source) { copy_async_16(shared + 64, source); });
  };
}

}  // namespace sgl_lowlatency::emulation
