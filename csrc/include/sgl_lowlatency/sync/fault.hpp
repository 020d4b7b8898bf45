// What a kernel does when it cannot go on: one record for the host, then the end of the launch.
#pragma once
#include "sgl_lowlatency/abi/symmetric_workspace.hpp"
#include "sgl_lowlatency/dialect/dialect.hpp"

namespace sgl_lowlatency::sync {

// Where faults go and how long a wait may last. Passed by value and inlined: an object in memory would cost the kernel's
// loops a store for every wait.
struct FaultSink {
  abi::FaultRecord* record;  // host-visible
  int32_t rank;
  uint64_t deadline_ns;
};

constexpr uint64_t kHostAckNs = 500'000'000;  // how long the record waits for its reader before the launch is trapped

// The first thread to claim the record writes it. Entry: any thread, any number of threads.
SGL_DEVICE void write_record(abi::FaultRecord* r, int32_t rank, abi::FaultKind kind, int32_t layer, int32_t edge, uint32_t expected, uint32_t seen,
                             uint64_t waited_ns) {
  // Relaxed: the claim only picks one writer; nobody reads the fields by it.
  if (dialect::cas_relaxed_system(&r->state, 0u, 1u) == 0u) {
    dialect::store_relaxed_system(&r->kind, static_cast<uint32_t>(kind));
    dialect::store_relaxed_system(reinterpret_cast<uint32_t*>(&r->rank), static_cast<uint32_t>(rank));
    dialect::store_relaxed_system(reinterpret_cast<uint32_t*>(&r->sm), static_cast<uint32_t>(dialect::sm_idx()));
    dialect::store_relaxed_system(reinterpret_cast<uint32_t*>(&r->block), static_cast<uint32_t>(dialect::block_idx()));
    dialect::store_relaxed_system(reinterpret_cast<uint32_t*>(&r->layer), static_cast<uint32_t>(layer));
    dialect::store_relaxed_system(reinterpret_cast<uint32_t*>(&r->edge), static_cast<uint32_t>(edge));
    dialect::store_relaxed_system(&r->expected, expected);
    dialect::store_relaxed_system(&r->seen, seen);
    dialect::store_relaxed_system(&r->waited_ns, waited_ns);
    // Release, system scope: pairs with the host's acquire load of `state` (read_fault in csrc/bindings): when it reads 2, the
    // fields above are complete.
    dialect::store_release_system(&r->state, 2u);
  }
}

// Waits for the host to acknowledge the record (so that it is printed before the context dies) or for kHostAckNs, then traps.
SGL_NORETURN SGL_DEVICE void trap_when_read(abi::FaultRecord* r) {
  // Relaxed: the acknowledgement carries no data.
  const uint64_t start = dialect::timer_ns();
  while (dialect::load_relaxed_system(&r->host_ack) == 0u && dialect::timer_ns() - start < kHostAckNs) {
    dialect::pause_ns(1000);
    dialect::backoff();
  }
  dialect::trap();
}

// Raises the abort word of every rank of the record's group, of which this one gave up by itself. Relaxed, system scope: pairs with load_abort.
SGL_DEVICE void tell_group(const abi::FaultRecord* r, int32_t layer) {
  const auto* const group = reinterpret_cast<const abi::PeerGroup*>(r->group);
  if (group == nullptr) return;
  const uint64_t word = abi::abort_word({group->rank, group->rank, layer < 0 ? 0 : layer, 0, abi::kPeerNothing});
  for (int32_t rank = 0; rank < group->num_ranks; ++rank) dialect::store_relaxed_system(group->abort[rank], word);
}

// A record, word to the group, and the end. Does not return.
SGL_NORETURN SGL_DEVICE_COLD void raise_fault(abi::FaultRecord* r, int32_t rank, abi::FaultKind kind, int32_t layer, int32_t edge,
                                              uint32_t expected, uint32_t seen, uint64_t waited_ns) {
  write_record(r, rank, kind, layer, edge, expected, seen, waited_ns);
  if constexpr (dialect::kHasGroups) tell_group(r, layer);
  trap_when_read(r);
}

}  // namespace sgl_lowlatency::sync
