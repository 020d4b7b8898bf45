// The one way to wait: poll, look at the clock now and then, and name who waited for what when the deadline passes.
#pragma once
#include "sgl_lowlatency/sync/fault.hpp"

namespace sgl_lowlatency::sync {

constexpr uint32_t kPollsPerClockRead = 64;  // a deadline is noticed so many polls late at most

// Returns when ready() is true. seen() gives the last observed value for the record. Each calling thread polls by itself;
// never call it between the lanes of one shuffle.
template <class Ready, class Seen>
SGL_DEVICE void wait_until(FaultSink sink, abi::FaultKind kind, int32_t layer, int32_t edge, uint32_t expected, Ready ready, Seen seen) {
  uint64_t start = 0;  // counts from the first clock read, not before: reading the clock costs more than most waits last
  for (uint32_t polls = 1; !ready(); ++polls) {
    dialect::backoff();
    if (polls % kPollsPerClockRead == 0) {
      const uint64_t now = dialect::timer_ns();
      if (start == 0) start = now;
      if (now - start > sink.deadline_ns) raise_fault(sink.record, sink.rank, kind, layer, edge, expected, seen(), now - start);
    }
  }
}

}  // namespace sgl_lowlatency::sync
