// A workgroup's view of its shared memory, and what it knows of the rows of a step: stages of waves.
#pragma once
#include "sgl_lowlatency/abi/monokernel.hpp"
#include "sgl_lowlatency/stages/numbers.hpp"
#include "sgl_lowlatency/sync/peer.hpp"

namespace sgl_lowlatency::stages {

using abi::MonoLaunch;

SGL_DEVICE int32_t wave_idx() { return dialect::uniform(dialect::thread_idx() / abi::kWaveSize); }
SGL_DEVICE int32_t lane_idx() { return dialect::thread_idx() % abi::kWaveSize; }

struct MonoRow {
  int32_t position;
  int32_t slot;     // KV slot of the new token
  // Of the request whose number this is, not the row's:
  int32_t length;   // tokens, all new ones included; 0 for a request without any
  int32_t request;  // row of req_to_token
};
struct MonoRows {
  MonoRow row[abi::kMaxMonoRows];
  float squares[abi::kMonoWaves][abi::kMaxMonoRows];    // of a wave's columns of the operand
  float max_sum[abi::kMonoWaves][abi::kItemColumns][2];  // of an attention item, a wave's tokens
};
static_assert(sizeof(MonoRows) <= abi::kMonoRowsBytes, "mono_smem reserves as much");

template <abi::Isa kIsa>
struct MonoShared {
  static constexpr abi::MonoSmem kAt = abi::mono_smem(kIsa);
  static constexpr int32_t kSlots = abi::ring_slots(kIsa);
  char* base;
  SGL_DEVICE char* slot(int32_t wave, int32_t i) const { return base + kAt.ring + (wave * kSlots + i) * abi::kFragmentBytes; }
  SGL_DEVICE char* panel(int32_t wave) const { return base + kAt.panel + wave * kAt.panel_wave_bytes; }
  SGL_DEVICE float* partial(int32_t wave, int32_t column) const {
    return reinterpret_cast<float*>(base + kAt.partials) + (wave * abi::kMaxMonoRows + column) * abi::kPartialPitch;
  }
  SGL_DEVICE MonoRows* rows() const { return reinterpret_cast<MonoRows*>(base + kAt.rows); }
  SGL_DEVICE char* routing() const { return base + kAt.routing; }
  SGL_DEVICE float* merge() const { return reinterpret_cast<float*>(base); }  // of attention, over ring and panel
};

// Waits for words of this rank's other workgroups. Twice the deadline: who waits for a rank, and names it, is first.
SGL_DEVICE sync::FaultSink edge_sink(const MonoLaunch& l) { return {l.fault, l.rank, 2 * l.deadline_ns}; }
SGL_DEVICE sync::FaultSink peer_sink(const MonoLaunch& l) { return {l.fault, l.rank, l.deadline_ns}; }
SGL_DEVICE sync::Peers peers_of(const MonoLaunch& l) { return {l.symmetric, l.workspaces, l.rank}; }

// Words at byte offset `at` of the hand-over, those that `edge` fills.
SGL_DEVICE uint32_t* handover_words(const MonoLaunch& l, int32_t at) { return reinterpret_cast<uint32_t*>(l.handover + at); }
SGL_DEVICE sync::Awaited awaited(const MonoLaunch& l, int32_t at, abi::EdgeIdx edge) { return {handover_words(l, at), l.layer, edge}; }

// A value of the step's input, or the end of the launch. limit: exclusive.
SGL_DEVICE int32_t checked(const MonoLaunch& l, abi::FaultKind kind, int32_t row, int64_t value, int64_t limit) {
  if (value < 0 || value >= limit) {
    sync::raise_fault(l.fault, l.rank, kind, l.layer, row, static_cast<uint32_t>(limit), static_cast<uint32_t>(value), static_cast<uint64_t>(value));
  }
  return static_cast<int32_t>(value);
}

// Clears bytes [begin, end) of the hand-over, the block's share. Entry: all threads; nobody uses the words in this launch.
SGL_DEVICE void clear_handover(const MonoLaunch& l, int32_t begin, int32_t end) {
  const int32_t step = l.grid * abi::kMonoThreads;
  for (int32_t i = dialect::block_idx() * abi::kMonoThreads + dialect::thread_idx(); i < (end - begin) / 16; i += step) {
    dialect::clear_words(handover_words(l, begin) + i * 4);
  }
}

}  // namespace sgl_lowlatency::stages
