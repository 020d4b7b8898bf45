// Waiting for other ranks: a missed deadline stops all of them, and every one says who waited for whom.
#pragma once
#include "sgl_lowlatency/abi/symmetric_workspace.hpp"
#include "sgl_lowlatency/sync/handover.hpp"

namespace sgl_lowlatency::sync {

// The ranks' workspaces as one of them sees them.
struct Peers {
  const abi::SymmetricLayout& at;
  char* const* workspaces;  // [at.num_ranks]
  int32_t rank;             // the own one
  SGL_DEVICE uint64_t* abort(int32_t of) const { return reinterpret_cast<uint64_t*>(workspaces[of] + at.abort); }
  SGL_DEVICE abi::SymmetricState* state() const { return reinterpret_cast<abi::SymmetricState*>(workspaces[rank] + at.state); }
};

// Ends the launch because another rank gave up. `own` is what this rank was waiting for; awaited -1: nothing.
SGL_NORETURN SGL_DEVICE_COLD void raise_aborted(FaultSink sink, Peers peers, uint64_t word, abi::AbortReason own) {
  write_record(sink.record, peers.rank, abi::kFaultPeerAbort, own.layer, own.awaited, abi::phased_tile(own),
               static_cast<uint32_t>(abi::abort_reason(word).waiter), word);
  trap_when_read(sink.record);
}

// The own abort word, 0 as long as nobody gave up. Relaxed, system scope: pairs with raise_abort; the word is all there is to know.
SGL_DEVICE uint64_t load_abort(const Peers& peers) { return dialect::load_relaxed_system(peers.abort(peers.rank)); }

// Leaves this rank's record, raises the abort word of every rank, and ends the launch. The record first: the rank's other blocks see its abort
// word, and theirs would hide who gave up. Several ranks may give up at once: each reason is a true one.
SGL_NORETURN SGL_DEVICE_COLD void raise_abort(FaultSink sink, Peers peers, abi::AbortReason why, uint64_t waited_ns) {
  write_record(sink.record, peers.rank, abi::kFaultPeerTile, why.layer, why.awaited, abi::phased_tile(why),
               static_cast<uint32_t>(why.waiter), waited_ns);
  for (int32_t rank = 0; rank < peers.at.num_ranks; ++rank) dialect::store_relaxed_system(peers.abort(rank), abi::abort_word(why));
  trap_when_read(sink.record);
}

// Returns when ready() is true. reason() is what is missing. Each calling thread polls by itself.
template <class Ready, class Reason>
SGL_DEVICE void wait_for_peers(FaultSink sink, const Peers& peers, Ready ready, Reason reason) {
  uint64_t start = 0;
  for (uint32_t polls = 1; !ready(); ++polls) {
    dialect::backoff();
    if (polls % kPollsPerClockRead == 0) {
      const uint64_t word = load_abort(peers);
      if (word != 0) raise_aborted(sink, peers, word, reason());
      const uint64_t now = dialect::timer_ns();
      if (start == 0) start = now;
      if (now - start > sink.deadline_ns) raise_abort(sink, peers, reason(), now - start);
    }
  }
}

}  // namespace sgl_lowlatency::sync
