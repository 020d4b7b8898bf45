// Self-tests of the warp collectives, mbarriers, the bulk-copy ring, barriers and virtual time.
#include <cstring>

#include "emulation/selftest.hpp"
#include "sgl_lowlatency/dialect/dialect.hpp"

namespace sgl_lowlatency::emulation {
namespace {

using namespace dialect;

Options with_seed(uint64_t seed) {
  Options options;
  options.seed = seed;
  return options;
}

// A small integer, exact in bf16, that no simple index pattern produces.
float element(int32_t row, int32_t column, uint64_t seed) {
  return static_cast<float>(static_cast<int32_t>((row * 37 + column * 101 + seed * 13 + row * column * 7) % 61) - 30);
}

uint32_t pair(float low, float high) { return to_bf16(low).bits | static_cast<uint32_t>(to_bf16(high).bits) << 16; }

// One mma, fragments filled by PTX's element formulas. values: A [16, 16], B [16, 8], C [16, 8], D [16, 8], row-major.
SelftestRun mma(uint64_t seed) {
  std::vector<double> values(16 * 16 + 3 * 16 * 8);
  double* const a_out = values.data();
  double* const b_out = a_out + 256;
  double* const c_out = b_out + 128;
  double* const d_out = c_out + 128;
  const Report report = launch(1, 32, 0, [&] {
    const int32_t lane = thread_idx(), group = lane >> 2, in_group = lane % 4;
    float a[8], b[4], c[4];
    for (int32_t i = 0; i < 8; ++i) {
      const int32_t row = (i < 2 || (i >= 4 && i < 6)) ? group : group + 8;
      const int32_t column = in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0);
      a_out[row * 16 + column] = a[i] = element(row, column, seed);
    }
    for (int32_t i = 0; i < 4; ++i) {
      const int32_t row = in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0);
      b_out[row * 8 + group] = b[i] = element(row, group, seed + 1);
    }
    for (int32_t i = 0; i < 4; ++i) {
      const int32_t row = i < 2 ? group : group + 8, column = in_group * 2 + (i & 1);
      c_out[row * 8 + column] = c[i] = element(row, column, seed + 2);
    }
    const uint32_t a_pairs[4] = {pair(a[0], a[1]), pair(a[2], a[3]), pair(a[4], a[5]), pair(a[6], a[7])};
    const uint32_t b_pairs[2] = {pair(b[0], b[1]), pair(b[2], b[3])};
    mma_m16n8k16(c, a_pairs, b_pairs);
    for (int32_t i = 0; i < 4; ++i) d_out[(i < 2 ? group : group + 8) * 8 + in_group * 2 + (i & 1)] = c[i];
  }, with_seed(seed));
  return {report, values};
}

// Shared rows hold matrix * 64 + row * 8 + column. values: [lane][register][low half, high half].
SelftestRun ldmatrix(uint64_t seed) {
  std::vector<double> values(32 * 4 * 2);
  const Report report = launch(1, 32, 512, [&] {
    const int32_t lane = thread_idx();
    uint16_t* const row = reinterpret_cast<uint16_t*>(shared_base() + (31 - lane) * 16);  // any order of rows will do
    for (int32_t i = 0; i < 8; ++i) row[i] = static_cast<uint16_t>(lane * 8 + i);
    sync_warp();
    uint32_t r[4];
    ldmatrix_x4(r, row);
    for (int32_t i = 0; i < 4; ++i) {
      values[(lane * 4 + i) * 2] = r[i] & 0xffffu;
      values[(lane * 4 + i) * 2 + 1] = r[i] >> 16;
    }
  }, with_seed(seed));
  return {report, values};
}

// values: shuffle_xor of the lane number with masks 0..31, then shuffle of 100 + lane from lane (5 lane + 3) % 32.
SelftestRun shuffles(uint64_t seed) {
  std::vector<double> values(33 * 32);
  const Report report = launch(1, 32, 0, [&] {
    const int32_t lane = thread_idx();
    for (int32_t mask = 0; mask < 32; ++mask) values[mask * 32 + lane] = shuffle_xor(static_cast<float>(lane), mask);
    values[32 * 32 + lane] = shuffle(100u + lane, (5 * lane + 3) % 32);
  }, with_seed(seed));
  return {report, values};
}

// What the reductions are of: scattered over all 32 bits.
uint32_t scattered(int32_t lane, uint64_t seed) { return (static_cast<uint32_t>(lane) * 0x9e3779b9u) ^ (static_cast<uint32_t>(seed) * 0x85ebca6bu); }

// values: the operands of the lanes, then reduce_max, reduce_min and reduce_or as each lane got them, then popcount of the operands.
SelftestRun reductions(uint64_t seed) {
  std::vector<double> values(5 * 32);
  const Report report = launch(1, 32, 0, [&] {
    const int32_t lane = thread_idx();
    const uint32_t value = scattered(lane, seed);
    values[lane] = value;
    values[32 + lane] = reduce_max(value);
    values[64 + lane] = reduce_min(value);
    values[96 + lane] = reduce_or(lane % 15 == 0 ? value : 0u);
    values[128 + lane] = popcount(value);
  }, with_seed(seed));
  return {report, values};
}

bool completes_soon(uint64_t* mbarrier, uint32_t parity) {
  for (int32_t i = 0; i < 20; ++i) {
    if (mbarrier_test(mbarrier, parity)) return true;
  }
  return false;
}

// One thread walks an mbarrier of count 2 through its phases. values: 1 for every answer as PTX has it.
SelftestRun mbarrier_phases(uint64_t seed) {
  std::vector<double> values;
  std::vector<uint64_t> source(4, 5);
  const Report report = launch(1, 32, 64, [&] {
    if (thread_idx() != 0) return;
    uint64_t* const bar = reinterpret_cast<uint64_t*>(shared_base());
    char* const landing = shared_base() + 16;
    const auto expect = [&](bool answer, uint32_t parity) { values.push_back(completes_soon(bar, parity) == answer); };
    mbarrier_init(bar, 2);
    mbarrier_init_fence();
    expect(true, 1);   // the phase before the first counts as complete
    expect(false, 0);
    mbarrier_arrive(bar);
    expect(false, 0);
    mbarrier_arrive(bar);
    expect(true, 0);   // phase 0 complete
    expect(false, 1);
    mbarrier_arrive_expect_bytes(bar, 32);
    mbarrier_arrive(bar);
    expect(false, 1);  // both arrived, bytes missing
    bulk_load(landing, source.data(), 16, bar);
    expect(false, 1);  // half of the bytes
    bulk_load(landing + 16, source.data(), 16, bar);
    expect(true, 1);   // phase 1 complete
    values.push_back(std::memcmp(landing, source.data(), 32) == 0);
    bulk_load(landing, source.data(), 16, bar);  // bytes may land before they are expected
    mbarrier_arrive(bar);
    expect(false, 0);
    mbarrier_arrive_expect_bytes(bar, 16);
    expect(true, 0);   // phase 2 complete
    expect(false, 1);
  }, with_seed(seed));
  return {report, values};
}

struct Ring {
  bool read_early = false;     // consumers read a stage before they wait for it
  bool release_early = false;  // consumers hand a stage back before they read it
};

// A producer warp streams 24 tiles of [16, 16] bf16 through 3 stages; two consumer warps add all elements of each.
// values: [wrong sums].
SelftestRun ring(uint64_t seed, Ring with) {
  constexpr int32_t kTiles = 24, kStages = 3, kTileBytes = 16 * 16 * 2;
  struct alignas(16) Tile { bf16 elements[256]; };
  std::vector<Tile> tiles(kTiles);
  std::vector<float> expected(kTiles), found(2 * kTiles);
  for (int32_t t = 0; t < kTiles; ++t) {
    for (int32_t i = 0; i < 256; ++i) {
      const float value = element(i, t, seed);
      tiles[t].elements[i] = to_bf16(value);
      expected[t] += value;
    }
  }
  Options options = with_seed(seed);
  const Report report = launch(1, 96, 64 + kStages * kTileBytes, [&] {
    uint64_t* const full = reinterpret_cast<uint64_t*>(shared_base());
    uint64_t* const empty = full + kStages;
    char* const stages = shared_base() + 64;
    const int32_t lane = thread_idx() % 32, warp = thread_idx() / 32;
    if (thread_idx() == 0) {
      for (int32_t s = 0; s < kStages; ++s) {
        mbarrier_init(full + s, 1);
        mbarrier_init(empty + s, 2);
      }
      mbarrier_init_fence();
    }
    sync_block();
    for (int32_t t = 0; t < kTiles; ++t) {
      const int32_t s = t % kStages;
      const uint32_t parity = (t / kStages) & 1;
      if (warp == 2) {
        if (lane == 0) {
          while (!mbarrier_test(empty + s, parity ^ 1u)) backoff();
          mbarrier_arrive_expect_bytes(full + s, kTileBytes);
        }
        sync_warp();
        if (lane < 16) bulk_load(stages + s * kTileBytes + lane * 32, tiles[t].elements + lane * 16, 32, full + s);
      } else {
        uint32_t r[4];
        if (with.read_early) ldmatrix_x4(r, stages + s * kTileBytes + lane * 16);
        while (!mbarrier_test(full + s, parity)) backoff();
        if (with.release_early && lane == 0) mbarrier_arrive(empty + s);
        if (!with.read_early) ldmatrix_x4(r, stages + s * kTileBytes + lane * 16);
        float sum = 0;
        for (uint32_t pair_bits : r) {
          sum += to_float(bf16{static_cast<uint16_t>(pair_bits)}) + to_float(bf16{static_cast<uint16_t>(pair_bits >> 16)});
        }
        for (int32_t mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
        if (lane == 0) found[warp * kTiles + t] = sum;
        if (!with.release_early && lane == 0) mbarrier_arrive(empty + s);
      }
    }
  }, options);
  double wrong = 0;
  for (int32_t i = 0; i < 2 * kTiles; ++i) wrong += !(found[i] == expected[i % kTiles]);
  return {report, {wrong}};
}

// Warps 0, 1 use barrier 1 and warps 2, 3 barrier 2, at different rates, then all meet. values: [wrong].
SelftestRun named_barriers(uint64_t seed) {
  double wrong = 0;
  const Report report = launch(2, 128, 64, [&] {
    int32_t* const counts = reinterpret_cast<int32_t*>(shared_base());
    const int32_t lane = thread_idx() % 32, team = thread_idx() / 64, warp = thread_idx() / 32;
    if (lane == 0) counts[warp] = 0;
    for (int32_t i = 1; i <= 10 + 10 * team; ++i) {
      if (lane == 0) counts[warp] = i;
      sync_named(1 + team, 64);
      if (lane == 0) wrong += counts[warp ^ 1] != i;
      sync_named(1 + team, 64);
    }
    sync_block();
    if (lane == 0) wrong += counts[0] != 10 || counts[3] != 20;
  }, with_seed(seed));
  return {report, {wrong}};
}

// A wait for a signal that never comes, given up after 5 virtual seconds. values: [nanoseconds waited].
SelftestRun deadline(uint64_t seed) {
  uint32_t counter = 0;
  double waited_ns = 0;
  const Report report = launch(2, 64, 0, [&] {
    if (thread_idx() == 0 && block_idx() == 1) {
      const uint64_t start = timer_ns();
      while (load_acquire_gpu(&counter) == 0) {
        if (timer_ns() - start > 5'000'000'000) {
          waited_ns = static_cast<double>(timer_ns() - start);
          trap();
        }
        backoff();
      }
    }
    sync_block();
  }, with_seed(seed));
  return {report, {waited_ns}};
}

// pause_ns and timer_ns. values: [nanoseconds around a pause of 1 ms, times that time ran backwards].
SelftestRun pause(uint64_t seed) {
  double around = 0, backwards = 0;
  const Report report = launch(1, 32, 0, [&] {
    const uint64_t start = timer_ns();
    pause_ns(1'000'000);
    const uint64_t end = timer_ns();
    around = static_cast<double>(end - start);
    backwards += end <= start;
  }, with_seed(seed));
  return {report, {around, backwards}};
}

// values: shared memory as a kernel finds it, 16 floats.
SelftestRun poisoned_shared(uint64_t seed) {
  std::vector<double> values(16);
  const Report report = launch(1, 32, 64, [&] {
    if (thread_idx() >= 16) return;
    values[thread_idx()] = reinterpret_cast<const float*>(shared_base())[thread_idx()];
    reinterpret_cast<float*>(shared_base())[thread_idx()] = 1.0f;
  }, with_seed(seed));
  return {report, values};
}

}  // namespace

void add_machine_selftests(Selftests& tests) {
  tests["mma"] = mma;
  tests["ldmatrix"] = ldmatrix;
  tests["shuffles"] = shuffles;
  tests["reductions"] = reductions;
  tests["mbarrier_phases"] = mbarrier_phases;
  tests["ring"] = [](uint64_t seed) { return ring(seed, {}); };
  tests["ring_read_early"] = [](uint64_t seed) { return ring(seed, {true, false}); };
  tests["ring_release_early"] = [](uint64_t seed) { return ring(seed, {false, true}); };
  tests["named_barriers"] = named_barriers;
  tests["deadline"] = deadline;
  tests["pause"] = pause;
  tests["poisoned_shared"] = poisoned_shared;
}

}  // namespace sgl_lowlatency::emulation
