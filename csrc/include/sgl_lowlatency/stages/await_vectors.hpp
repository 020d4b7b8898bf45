// Several vectors of hand-over words that a thread polls for at once.
#pragma once
#include "sgl_lowlatency/sync/handover.hpp"

namespace sgl_lowlatency::stages {

// kBatch vectors of four words: number i from buffer + index(i), or zeros unless is_asked(i). Each calling thread polls by itself; the record of a
// missed deadline names the first word of number 0.
template <int32_t kBatch, class IsAsked, class Index>
SGL_DEVICE void await_vectors(sync::FaultSink sink, int32_t edge, const uint32_t* buffer, const IsAsked& is_asked, const Index& index,
                              uint32_t (&values)[kBatch][4]) {
SGL_UNROLL
  for (int32_t i = 0; i < kBatch; ++i) values[i][0] = values[i][1] = values[i][2] = values[i][3] = is_asked(i) ? abi::kUnwritten : 0u;
  sync::wait_until(
      sink, abi::kFaultEdgeDeadline, 0, edge, static_cast<uint32_t>(index(0)),
      [&] {
        bool is_complete = true;
SGL_UNROLL
        for (int32_t i = 0; i < kBatch; ++i) {
          if (!sync::is_written(values[i])) dialect::load_words(values[i], buffer + index(i));
        }
SGL_UNROLL
        for (int32_t i = 0; i < kBatch; ++i) is_complete = is_complete && sync::is_written(values[i]);
        return is_complete || dialect::planted(dialect::Planted::kMissingAwait);
      },
      [] { return abi::kUnwritten; });
}

}  // namespace sgl_lowlatency::stages
