// Dependency edges between blocks: monotonic counters, never reset (see abi::SyncState). A layer's signals are one a block that
// owns tiles; for attention one a (row, kv head, head subgroup).
#pragma once
#include "sgl_lowlatency/sync/wait.hpp"

namespace sgl_lowlatency::sync {

// Entry: one thread, after a barrier that every thread whose stores the edge publishes has passed.
// Release, gpu scope: pairs with await_edge's acquire in every consumer block; the barrier makes it cover the whole block.
SGL_DEVICE void signal_edge(uint32_t* counter) {
  if (dialect::planted(dialect::Planted::kMissingRelease)) {
    dialect::add_relaxed_gpu(counter, 1u);
  } else {
    dialect::add_release_gpu(counter, 1u);
  }
}

// Entry: one thread; follow with a barrier before other threads of the block read what the edge covers.
// Acquire, gpu scope: pairs with signal_edge. Counters wrap, so targets are compared by signed difference.
SGL_DEVICE void await_edge(FaultSink sink, int32_t layer, abi::EdgeIdx edge, const uint32_t* counter, uint32_t target) {
  uint32_t seen = 0;
  wait_until(
      sink, abi::kFaultEdgeDeadline, layer, edge, target,
      [&] {
        seen = dialect::planted(dialect::Planted::kMissingAcquire) ? dialect::load_relaxed_gpu(counter)
                                                                   : dialect::load_acquire_gpu(counter);
        return static_cast<int32_t>(seen - target) >= 0;
      },
      [&] { return seen; });
}

}  // namespace sgl_lowlatency::sync
