// Data as flag: a block hands its results to others as 32-bit words that are each their own flag. A word is abi::kUnwritten until
// its producer stores it; a consumer polls the words it needs. There is no counter, no fence and no signal on the way: one trip
// through L2 hands over a result. A word's value is all that its reader learns, so the words need no order among each other.
// Words are used again: see stages/generations.hpp.
#pragma once
#include "sgl_lowlatency/sync/wait.hpp"

namespace sgl_lowlatency::sync {

SGL_DEVICE uint32_t max_word(uint32_t a, uint32_t b) { return a > b ? a : b; }

template <int32_t kCount>
SGL_DEVICE uint32_t largest_word(const uint32_t (&words)[kCount]) {
  uint32_t largest = words[0];
SGL_UNROLL
  for (int32_t i = 1; i < kCount; ++i) largest = max_word(largest, words[i]);
  return largest;
}

// kUnwritten is the largest word.
template <int32_t kCount>
SGL_DEVICE bool is_written(const uint32_t (&words)[kCount]) { return largest_word(words) != abi::kUnwritten; }

// Relaxed, gpu scope: pairs with load_words of the consumers; the data is the flag. A word that happens to be
// kUnwritten (arithmetic gives none, but the embedding is copied as it is) becomes another NaN: its readers would wait for ever.
template <int32_t kCount>
SGL_DEVICE void publish(uint32_t* at, uint32_t (&words)[kCount]) {
SGL_UNROLL
  for (int32_t i = 0; i < kCount; ++i) words[i] = words[i] == abi::kUnwritten ? abi::kUnwritten >> 1 : words[i];
  dialect::store_words(at, words);
}

// Names what a thread waits for: words `first` and following of the buffer that `edge` of `layer` fills.
struct Awaited {
  const uint32_t* buffer;
  int32_t layer;
  abi::EdgeIdx edge;
};

// Loads kCount consecutive words until all are written. Each calling thread polls by itself.
// Relaxed, gpu scope: pairs with publish.
template <int32_t kCount>
SGL_DEVICE void await_words(FaultSink sink, const Awaited& of, int64_t first, uint32_t (&words)[kCount]) {
  wait_until(
      sink, abi::kFaultEdgeDeadline, of.layer, of.edge, static_cast<uint32_t>(first),
      [&] {
        dialect::load_words(words, of.buffer + first);
        return is_written(words) || dialect::planted(dialect::Planted::kMissingAwait);
      },
      [&] { return abi::kUnwritten; });
}

}  // namespace sgl_lowlatency::sync
