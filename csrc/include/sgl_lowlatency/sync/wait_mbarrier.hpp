// The wait for a phase of a ring stage's mbarrier: of dialects that have mbarriers.
#pragma once
#include "sgl_lowlatency/sync/wait.hpp"

namespace sgl_lowlatency::sync {

// Waits for the phase of this parity of a ring stage's mbarrier. A ring stalls because an edge did, so the deadline is twice as
// long: the edge is named first. Acquire: pairs with the arrivals and, on `full`, with the completion of the copies' bytes.
SGL_DEVICE void wait_mbarrier(FaultSink sink, abi::FaultKind kind, int32_t layer, int32_t stage, uint64_t* bar, uint32_t parity) {
  wait_until(
      FaultSink{sink.record, sink.rank, 2 * sink.deadline_ns}, kind, layer, stage, parity,
      [&] { return dialect::mbarrier_test(bar, parity); }, [&] { return parity ^ 1u; });
}

}  // namespace sgl_lowlatency::sync
