// Self-test of the routing stage as a step's block runs it: eight consumer warps of nine, logits in shared memory, more rows than warps.
#include "emulation/selftest.hpp"
#include "sgl_lowlatency/stages/bitmap_routing.hpp"
#include "sgl_lowlatency/stages/row_state.hpp"

namespace sgl_lowlatency::emulation {
namespace {

constexpr int32_t kRows = 27, kExperts = 300, kTopK = 5;

// Quarters: exact in fp32, with ties in every row.
float logit(int32_t row, int32_t expert, uint64_t seed) {
  return static_cast<float>((row * 131 + expert * 37 + (row + 3) * expert % 11 + static_cast<int32_t>(seed % 97) * 29) % 257) / 4.0f;
}

// values: logits [kRows, kExperts], ids, places and weights [kRows, kTopK], row_bits and experts [kExperts], num_active.
SelftestRun routing_by_consumers(uint64_t seed) {
  const abi::RoutingLayout at = abi::routing_layout(kRows, kExperts, kTopK);
  std::vector<double> values;
  Options options;
  options.seed = seed;
  const int32_t logits_at = at.total_bytes;
  const Report report = launch(1, abi::kNumThreads, static_cast<size_t>(logits_at + kRows * kExperts * 4), [&] {
    const stages::Routing r{at, dialect::shared_base()};
    float* const logits = reinterpret_cast<float*>(dialect::shared_base() + logits_at);
    const int32_t thread = dialect::thread_idx(), warp = thread / 32;
    if (warp >= abi::kNumConsumerWarps) return;
    for (int32_t i = thread; i < kRows * kExperts; i += stages::kConsumerThreads) logits[i] = logit(i / kExperts, i % kExperts, seed);
    stages::sync_consumers();
    for (int32_t row = warp; row < kRows; row += abi::kNumConsumerWarps) {
      stages::choose_experts<10>(r, row, kExperts, kTopK, true, [&](int32_t w) { return logits[row * kExperts + w * 32 + thread % 32]; });
    }
    stages::sync_consumers();
    stages::place_experts<10>(r, kRows, kExperts, kTopK, warp, abi::kNumConsumerWarps);
    stages::sync_consumers();
    if (thread != 0) return;
    values.insert(values.end(), logits, logits + kRows * kExperts);
    values.insert(values.end(), r.ids(), r.ids() + kRows * kTopK);
    values.insert(values.end(), r.places(), r.places() + kRows * kTopK);
    values.insert(values.end(), r.weights(), r.weights() + kRows * kTopK);
    values.insert(values.end(), r.row_bits(), r.row_bits() + kExperts);
    values.insert(values.end(), r.experts(), r.experts() + kExperts);
    values.push_back(r.active()->count);
  }, options);
  return {report, values};
}

}  // namespace

void add_routing_selftests(Selftests& tests) { tests["routing_by_consumers"] = routing_by_consumers; }

}  // namespace sgl_lowlatency::emulation
