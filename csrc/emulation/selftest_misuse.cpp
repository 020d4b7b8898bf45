// Self-tests of diagnosis: kernels that are wrong on purpose and must end with a message, never hang.
#include <stdexcept>

#include "emulation/selftest.hpp"
#include "sgl_lowlatency/dialect/dialect.hpp"

namespace sgl_lowlatency::emulation {
namespace {

using namespace dialect;

template <typename Body>
SelftestRun run(uint64_t seed, int block_threads, Body body) {
  Options options;
  options.seed = seed;
  return {launch(2, block_threads, 1024, body, options), {}};
}

uint64_t* first_mbarrier() { return reinterpret_cast<uint64_t*>(shared_base()); }

}  // namespace

void add_misuse_selftests(Selftests& tests) {
  tests["deadlock_barriers"] = [](uint64_t seed) {
    return run(seed, 64, [] { sync_named(thread_idx() < 32 ? 1 : 2, 64); });
  };
  tests["deadlock_mbarrier"] = [](uint64_t seed) {
    return run(seed, 64, [] {
      if (thread_idx() == 0) mbarrier_init(first_mbarrier(), 1);
      sync_block();
      while (!mbarrier_test(first_mbarrier(), 0)) backoff();
    });
  };
  tests["divergent_collectives"] = [](uint64_t seed) {
    return run(seed, 32, [] { thread_idx() < 16 ? static_cast<void>(shuffle(1.0f, 0)) : sync_warp(); });
  };
  tests["collective_after_exit"] = [](uint64_t seed) {
    return run(seed, 32, [] { if (thread_idx() != 7) shuffle_xor(1.0f, 1); });
  };
  tests["barrier_in_divergent_warp"] = [](uint64_t seed) {
    return run(seed, 64, [] { thread_idx() % 2 == 0 ? sync_block() : sync_warp(); });
  };
  tests["barrier_after_warp_exit"] = [](uint64_t seed) {
    return run(seed, 64, [] { if (thread_idx() < 32) sync_block(); });
  };
  tests["barrier_counts_differ"] = [](uint64_t seed) {
    return run(seed, 96, [] { sync_named(4, thread_idx() < 32 ? 64 : 96); });
  };
  tests["barrier_count_not_of_warps"] = [](uint64_t seed) { return run(seed, 64, [] { sync_named(4, 48); }); };
  tests["mbarrier_too_many_arrivals"] = [](uint64_t seed) {
    return run(seed, 32, [] {
      if (thread_idx() != 0) return;
      mbarrier_init(first_mbarrier(), 1);
      mbarrier_arrive_expect_bytes(first_mbarrier(), 16);
      mbarrier_arrive(first_mbarrier());
    });
  };
  tests["mbarrier_uninitialised"] = [](uint64_t seed) { return run(seed, 32, [] { mbarrier_arrive(first_mbarrier()); }); };
  tests["mbarrier_no_barrier_after_init"] = [](uint64_t seed) {
    return run(seed, 64, [] {
      if (thread_idx() == 0) mbarrier_init(first_mbarrier(), 2);
      for (int32_t i = 0; i < 300; ++i) sync_warp();
      if (thread_idx() % 32 == 1) mbarrier_arrive(first_mbarrier());
    });
  };
  tests["bulk_without_init_fence"] = [](uint64_t seed) {
    alignas(16) static const char source[16] = {};
    return run(seed, 32, [] {
      if (thread_idx() != 0) return;
      mbarrier_init(first_mbarrier(), 1);
      bulk_load(shared_base() + 16, source, 16, first_mbarrier());
    });
  };
  tests["bulk_in_flight_at_exit"] = [](uint64_t seed) {
    alignas(16) static const char source[16] = {};
    return run(seed, 32, [] {
      if (thread_idx() != 0) return;
      mbarrier_init(first_mbarrier(), 1);
      mbarrier_init_fence();
      mbarrier_arrive_expect_bytes(first_mbarrier(), 16);
      bulk_load(shared_base() + 16, source, 16, first_mbarrier());
    });
  };
  tests["shared_overrun"] = [](uint64_t seed) {
    return run(seed, 32, [] { if (thread_idx() == 0) shared_base()[1024 + 5] = 1; });
  };
  tests["misaligned_load"] = [](uint64_t seed) {
    return run(seed, 32, [] { load_plain(reinterpret_cast<const Vec16*>(shared_base() + 8)); });
  };
  tests["exception"] = [](uint64_t seed) {
    return run(seed, 32, [] { if (thread_idx() == 9) throw std::runtime_error("no such row"); });
  };
  tests["trap"] = [](uint64_t seed) {
    return run(seed, 64, [] { thread_idx() == 40 ? trap() : sync_block(); });
  };
}

}  // namespace sgl_lowlatency::emulation
