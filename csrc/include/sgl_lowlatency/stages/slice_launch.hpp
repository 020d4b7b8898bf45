// How a slice's launch begins, hands on its generation, and ends. Params: a slice's parameters.
#pragma once
#include "sgl_lowlatency/stages/launch_count.hpp"
#include "sgl_lowlatency/stages/slice_state.hpp"

namespace sgl_lowlatency::stages {

// Positions, which generation it is and what is to be cleared, from what the launch in front has left. Entry: the block's first num_threads threads;
// whoever reads what that launch wrote is behind this. Ends with the barrier `barrier` of theirs. A position without frequencies ends the launch, with
// a record. also(): what else thread 0 reads of it, in front of the barrier.
template <class Params, class Also>
SGL_DEVICE void begin_slice(const Params& p, const SliceShared& s, int32_t barrier, int32_t num_threads, const Also& also) {
  const int32_t thread = dialect::thread_idx();
  if (!dialect::planted(dialect::Planted::kNoAwaitOfPrevious)) dialect::await_previous_launch();
  if (thread < p.rows) {
    const uint64_t position = dialect::load_plain(reinterpret_cast<const uint64_t*>(p.positions) + thread);
    if (position >= static_cast<uint64_t>(p.max_position)) {
      sync::raise_fault(p.fault, p.rank, abi::kFaultBadPosition, 0, thread, static_cast<uint32_t>(p.max_position), static_cast<uint32_t>(position),
                        position);
    }
    s.positions()[thread] = static_cast<int32_t>(position);
  }
  if (thread == 0) {
    const int32_t generation = static_cast<int32_t>(dialect::load_plain(p.state->launches) % 2u);
    *s.state() = {generation, dialect::load_plain(p.state->used_words + (1 - generation)), 0, 0};
    also();
  }
  dialect::sync_named(barrier, num_threads);
}
template <class Params>
SGL_DEVICE void begin_slice(const Params& p, const SliceShared& s, int32_t barrier, int32_t num_threads) {
  begin_slice(p, s, barrier, num_threads, [] {});
}

// The mbarriers of the ring and the zero row. Entry: every thread of the block, which a barrier of all must follow.
SGL_DEVICE void init_slice(const SliceShared& s) {
  const int32_t thread = dialect::thread_idx();
  if (thread == kConsumerThreads) {
    for (int32_t i = 0; i < s.at.num_stages; ++i) {
      dialect::mbarrier_init(s.full(i), 1);
      dialect::mbarrier_init(s.empty(i), abi::kNumConsumerWarps);
    }
    for (int32_t half = 0; half < 2; ++half) dialect::mbarrier_init(s.partials(half), abi::kNumConsumerWarps);
    dialect::mbarrier_init_fence();
  }
  if (thread < 4) reinterpret_cast<uint32_t*>(s.zero_row())[thread] = 0u;
}

// Clears the block's share of what the launch before has used: nobody reads it, and the launch behind this one uses it again. Entry: num_threads
// threads of the block, this one being number `thread`.
template <class Params>
SGL_DEVICE void clear_slice_words(const Params& p, const SliceShared& s, int32_t thread, int32_t num_threads) {
  uint32_t* const other = p.workspace + static_cast<int64_t>(1 - s.state()->generation) * p.generation_words;
SGL_NO_UNROLL
  for (int32_t v = dialect::block_idx() * num_threads + thread; v < s.state()->words_to_clear / 4; v += dialect::grid_dim() * num_threads) {
    dialect::clear_words(other + static_cast<int64_t>(v) * 4);
  }
}

// The last block out closes the launch, which used so many words. Entry: one thread of each block, behind a barrier that follows the block's reads of
// the state. True on the last block.
template <class Params>
SGL_DEVICE bool close_slice(const Params& p, int32_t generation, int32_t used_words) {
  // Acquire and release, gpu scope: pairs with the other blocks' arrivals, so that the stores below come after every block's reads of the state.
  if (dialect::fetch_add_acq_rel_gpu(p.state->exit_ticket, 1u) != static_cast<uint32_t>(dialect::grid_dim() - 1)) return false;
  dialect::store_plain(p.state->exit_ticket, 0u);
  dialect::store_plain(p.state->launches, dialect::load_plain(p.state->launches) + 1u);
  dialect::store_plain(p.state->used_words + generation, used_words);
  dialect::store_plain(p.state->used_words + (1 - generation), 0);
  count_launch(p);
  return true;
}

}  // namespace sgl_lowlatency::stages
