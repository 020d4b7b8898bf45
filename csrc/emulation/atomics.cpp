// Global memory accesses and ordering operations of the dialect, and virtual time.
#include <cstring>

#include "machine.hpp"

namespace sgl_lowlatency::emulation {
namespace {

constexpr uint32_t kPreemptPlainOneIn = 512;
constexpr uint32_t kPreemptAtomicOneIn = 4;
constexpr uint64_t kTimerReadNs = 8;

bool acquires(Order order) { return order == Order::kAcquire || order == Order::kAcquireRelease; }
bool releases(Order order) { return order == Order::kRelease || order == Order::kAcquireRelease; }

// A release reaches an acquire when the scope of each has the other in it: one rank, or system scope on both sides.
void acquire(const void* address, Scope scope) {
  const auto found = machine->sync_locations.find(address);
  if (found == machine->sync_locations.end()) return;
  Lane& lane = *machine->current;
  learn(lane, found->second.of_rank[rank_of(lane)]);
  if (scope == Scope::kSystem) learn(lane, found->second.of_system);
}

void publish(std::shared_ptr<Clock>& clock, Clock& record) {
  if (!clock) {
    clock = std::make_shared<Clock>(machine->warps.size());
  } else if (clock.use_count() > 1) {
    clock = std::make_shared<Clock>(*clock);
  }
  publish_across_blocks(*machine->current, *clock, record);
}

void release(const void* address, Scope scope) {
  SyncLocation& location = machine->sync_locations[address];
  location.of_rank.resize(machine->ranks.size());
  publish(location.of_rank[rank_of(*machine->current)], machine->released);
  if (scope == Scope::kSystem && machine->has_ranks()) publish(location.of_system, machine->system_released);
}

// The host's words are nobody's in front.
void check_access(const void* address, uint32_t bytes, const char* call, Scope scope) {
  scope == Scope::kSystem ? check_alignment(address, bytes, call) : emulation::check_access(address, bytes, call);
}

template <typename T>
T atomic_load(const T* address, Order order, Scope scope) {
  check_access(address, sizeof(T), "atomic load", scope);
  machine->current->looked_at = kAllLineBuckets;
  maybe_preempt(kPreemptAtomicOneIn);
  machine->global.check_atomic(address, sizeof(T), true, false, scope);
  if (acquires(order)) acquire(address, scope);
  T value;
  std::memcpy(&value, address, sizeof(T));
  return value;
}

template <typename T>
void atomic_store(T* address, T value, Order order, Scope scope) {
  check_access(address, sizeof(T), "atomic store", scope);
  maybe_preempt(kPreemptAtomicOneIn);
  machine->global.check_atomic(address, sizeof(T), false, true, scope);
  machine->sync_locations.erase(address);  // a store ends the release sequence of earlier writes
  if (releases(order)) release(address, scope);
  std::memcpy(address, &value, sizeof(T));
  global_memory_changed();
}

}  // namespace

void check_alignment(const void* address, uint32_t bytes, const char* call) {
  if ((bytes & (bytes - 1)) != 0 || bytes > 16) misuse(std::string(call) + " of " + std::to_string(bytes) + " bytes");
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) misuse(std::string(call) + ": address is not a multiple of its size");
}

void check_access(const void* address, uint32_t bytes, const char* call) {
  if (!machine->current->has_awaited) misuse(std::string(call) + " before await_previous_launch, in a kernel behind another");
  check_alignment(address, bytes, call);
}

void load_plain_bytes(void* value, const void* address, uint32_t bytes) {
  check_access(address, bytes, "load_plain");
  maybe_preempt(kPreemptPlainOneIn);
  machine->global.load(value, address, bytes);
}

void load_constant_bytes(void* value, const void* address, uint32_t bytes) {
  check_alignment(address, bytes, "load_constant");
  machine->global.load_constant(value, address, bytes);
}

void store_plain_bytes(void* address, const void* value, uint32_t bytes) {
  check_access(address, bytes, "store_plain");
  maybe_preempt(kPreemptPlainOneIn);
  machine->global.store(address, value, bytes);
  machine->progress = true;
}

uint32_t atomic_load_u32(const uint32_t* address, Order order, Scope scope) { return atomic_load(address, order, scope); }
uint64_t atomic_load_u64(const uint64_t* address, Order order, Scope scope) { return atomic_load(address, order, scope); }
void atomic_store_u32(uint32_t* address, uint32_t value, Order order, Scope scope) { atomic_store(address, value, order, scope); }
void atomic_store_u64(uint64_t* address, uint64_t value, Order order, Scope scope) { atomic_store(address, value, order, scope); }

uint32_t atomic_add_u32(uint32_t* address, uint32_t value, Order order, Scope scope) {
  check_access(address, sizeof(*address), "atomic add", scope);
  maybe_preempt(kPreemptAtomicOneIn);
  machine->global.check_atomic(address, sizeof(*address), true, true, scope);
  if (acquires(order)) acquire(address, scope);
  if (releases(order)) release(address, scope);  // without release the earlier release sequence goes on
  const uint32_t found = *address;
  *address = found + value;
  global_memory_changed();
  maybe_preempt(kPreemptAtomicOneIn);
  return found;
}

uint32_t atomic_cas_u32(uint32_t* address, uint32_t expected, uint32_t desired, Order order, Scope scope) {
  check_access(address, sizeof(*address), "atomic compare and swap", scope);
  maybe_preempt(kPreemptAtomicOneIn);
  const uint32_t found = *address;
  machine->global.check_atomic(address, sizeof(*address), true, found == expected, scope);
  if (acquires(order)) acquire(address, scope);
  if (found != expected) return found;
  if (releases(order)) release(address, scope);
  *address = desired;
  global_memory_changed();
  return found;
}

}  // namespace sgl_lowlatency::emulation

namespace sgl_lowlatency::dialect {

using namespace emulation;

uint64_t timer_ns() { return machine->now_ns += kTimerReadNs; }

void trap() { trap_rank(); }

void await_previous_launch() { machine->current->has_awaited = true; }

}  // namespace sgl_lowlatency::dialect
