// Self-tests of waves of 64: the MFMA, ballots, copies that a lane awaits for itself, barriers of shared memory alone.
#include <cstring>

#include "emulation/selftest.hpp"
#include "sgl_lowlatency/dialect/dialect.hpp"

namespace sgl_lowlatency::emulation {
namespace {

using namespace dialect;

Options of_waves(uint64_t seed) {
  Options options;
  options.seed = seed;
  options.warp_size = 64;
  return options;
}

// A[i][k] = 2 ** (i / 4 - k % 3) and B[k][j] = k + 1 where j == k % 16, else 0, so that C[i][j] has two terms; C begins at 100 i + j.
// values: C, row by row, minus what it should be.
SelftestRun mfma(uint64_t seed) {
  std::vector<double> off(256);
  const auto a_of = [](int32_t i, int32_t k) { return static_cast<float>(1 << (i / 4)) / static_cast<float>(1 << (k % 3)); };
  const auto b_of = [](int32_t k, int32_t j) { return j == k % 16 ? static_cast<float>(k + 1) : 0.0f; };
  const Report report = launch(1, 64, 16, [&] {
    const int32_t lane = thread_idx(), i = lane % 16, group = lane / 16;
    Vec16 a, b;
    for (int32_t w = 0; w < 4; ++w) {
      const int32_t k = group * 8 + w * 2;
      a.w[w] = to_bf16(a_of(i, k)).bits | static_cast<uint32_t>(to_bf16(a_of(i, k + 1)).bits) << 16;
      b.w[w] = to_bf16(b_of(k, i)).bits | static_cast<uint32_t>(to_bf16(b_of(k + 1, i)).bits) << 16;
    }
    float c[4];
    for (int32_t j = 0; j < 4; ++j) c[j] = static_cast<float>(100 * (group * 4 + j) + i);
    mfma_16x16x32(c, a, b);
    for (int32_t j = 0; j < 4; ++j) {
      const int32_t row = group * 4 + j;
      double expected = 100 * row + i;
      for (int32_t k = i; k < 32; k += 16) expected += static_cast<double>(a_of(row, k)) * (k + 1);
      off[row * 16 + i] = c[j] - expected;
    }
  }, of_waves(seed));
  return {report, off};
}

// Lanes that are multiples of 3 vote. values: lanes whose ballot is not that set, whose shuffle across the halves is wrong.
SelftestRun ballots(uint64_t seed) {
  double wrong = 0, wrong_shuffles = 0;
  uint64_t expected = 0;
  for (int32_t l = 0; l < 64; l += 3) expected |= uint64_t{1} << l;
  const Report report = launch(1, 128, 16, [&] {
    const int32_t lane = thread_idx() % 64;
    wrong += ballot(lane % 3 == 0) != expected;
    wrong_shuffles += shuffle(static_cast<uint32_t>(thread_idx()), 63 - lane) != static_cast<uint32_t>(thread_idx() / 64 * 64 + 63 - lane);
  }, of_waves(seed));
  return {report, {wrong, wrong_shuffles}};
}

// A wave copies eight tiles through three slots, each lane its own 16 bytes. values: [wrong results].
template <int32_t kYounger>
SelftestRun own_copies(uint64_t seed) {
  constexpr int32_t kSlots = 3, kTiles = 8;
  std::vector<bf16> source(kTiles * 512);
  for (size_t i = 0; i < source.size(); ++i) source[i] = {static_cast<uint16_t>(i)};
  double wrong = 0;
  const Report report = launch(1, 64, kSlots * 1024, [&] {
    const auto copy = [&](int32_t tile) {
      if (tile < kTiles) copy_tile(shared_base() + tile % kSlots * 1024, source.data() + tile * 512 + copied_row() * 32 + copied_column());
    };
    for (int32_t tile = 0; tile < kSlots; ++tile) copy(tile);
    for (int32_t tile = 0; tile < kTiles; ++tile) {
      tile + kSlots <= kTiles ? await_copies<kYounger>() : await_copies<0>();
      const Vec16 value = load_copied(shared_base() + tile % kSlots * 1024);
      const uint32_t first = tile * 512u + thread_idx() % 16 * 32u + thread_idx() / 16 * 8u;
      wrong += value.w[0] != (first | (first + 1) << 16);
      copy(tile + kSlots);
    }
  }, of_waves(seed));
  return {report, {wrong}};
}

// A wave stores; behind a barrier, which orders global memory or does not, another one releases a flag; a second block acquires it and loads.
SelftestRun published(uint64_t seed, bool waits) {
  alignas(16) static uint32_t data[64];
  alignas(16) static uint32_t flag;
  std::memset(data, 0, sizeof(data));
  flag = 0;
  double stale = 0;
  Options options = of_waves(seed);
  options.regions = {{"data", data, sizeof(data), false}};
  const Report report = launch(2, 128, 16, [&] {
    const int32_t thread = thread_idx();
    if (block_idx() == 0) {
      if (thread >= 64) store_plain(&data[thread - 64], 7u);
      waits ? sync_publish() : sync_shared();
      if (thread == 0) fetch_add_acq_rel_gpu(&flag, 1u);
    } else if (thread < 64) {
      while (load_acquire_gpu(&flag) == 0) backoff();
      stale += load_plain(&data[thread]) != 7u;
    }
  }, options);
  return {report, {stale}};
}

// A call of the other vendor's warps. values: none.
SelftestRun other_mma(uint64_t seed) {
  const Report report = launch(1, 64, 16, [] {
    float c[4] = {};
    const uint32_t a[4] = {}, b[2] = {};
    mma_m16n8k16(c, a, b);
  }, of_waves(seed));
  return {report, {}};
}

}  // namespace

void add_waves_selftests(Selftests& tests) {
  tests["waves_mfma"] = mfma;
  tests["waves_ballot"] = ballots;
  tests["waves_copies"] = own_copies<2>;
  tests["waves_copies_weak_wait"] = own_copies<3>;
  tests["waves_publish"] = [](uint64_t seed) { return published(seed, true); };
  tests["waves_publish_without_wait"] = [](uint64_t seed) { return published(seed, false); };
  tests["waves_other_mma"] = other_mma;
}

}  // namespace sgl_lowlatency::emulation
