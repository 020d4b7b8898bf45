// The memory that the ranks of a tensor-parallel group have in common: each owns one workspace, mapped by all others. Shared by host C++,
// CUDA, the host dialect and (through the bindings) Python.
#pragma once
#include <cstddef>
#include <cstdint>

#include "sgl_lowlatency/abi/decode_step.hpp"

namespace sgl_lowlatency::abi {

constexpr int32_t kMaxRanks = 8;
constexpr int32_t kParities = 3;  // epilogue_multicast, attention_out, fused_moe: copies of the tiles' buffer; launches take them in turn

constexpr uint64_t kRendezvousMagic = 0x736c6c2d72647631ull;

// What a workspace says of itself, so that who maps it can tell that it is the one it was told of.
struct Rendezvous {
  uint64_t magic;        // kRendezvousMagic
  uint64_t address;      // of the workspace, in its owner's process
  uint64_t total_bytes;
  uint64_t terms[4];     // SHA-256 of what the ranks must have in common: spec, plan hash, grid, widths, layout
  int32_t rank;
  int32_t num_ranks;
};
static_assert(sizeof(Rendezvous) == 64, "compared as bytes");

// State of the owner alone, in its device memory; zero before the first launch.
struct SymmetricState {
  uint32_t exit_ticket[32];   // [0]: blocks of epilogue_multicast's reduction that finished; the last one closes the launch
  uint64_t launches[16];      // [0]: closed; launch number n uses parity n % kParities
  int32_t used_rows[32];      // [kParities]: rows of a parity's tiles that are not known to be clear; decode_step: [0], rows of the last launch
};
static_assert(sizeof(SymmetricState) % 128 == 0, "counters keep their lines");

// A rank's workspace: byte offsets from its begin, multiples of 128.
struct SymmetricLayout {
  int32_t num_ranks;  // 1..kMaxRanks
  int32_t max_rows;   // rows of a tile that there is room for
  int32_t hidden;     // columns of a sum, a multiple of kTileRows
  int32_t copies;     // of the tiles' buffer
  int64_t rendezvous;    // Rendezvous
  int64_t abort;         // uint64_t, 0 until a rank gives up: abort_word. Any rank may store it
  int64_t state;         // SymmetricState
  int64_t tiles;         // [copies][num_ranks][hidden / kTileRows][max_rows][kTileRows] words, each its own flag: fp32 of the rank whose
                         // index is the second, stored by it; kUnwritten until then
  int64_t parity_bytes;  // from one copy's tiles to the next
  int64_t total_bytes;
};

SGL_ABI_FUNCTION SymmetricLayout symmetric_layout(int32_t num_ranks, int32_t max_rows, int32_t hidden, int32_t copies = kParities) {
  SymmetricLayout at{};
  at.num_ranks = num_ranks;
  at.max_rows = max_rows;
  at.hidden = hidden;
  at.copies = copies;
  at.rendezvous = 0;
  at.abort = 128;
  at.state = 256;
  at.tiles = at.state + static_cast<int64_t>(sizeof(SymmetricState));
  at.parity_bytes = (static_cast<int64_t>(num_ranks) * hidden * max_rows * 4 + 127) / 128 * 128;
  at.total_bytes = at.tiles + copies * at.parity_bytes;
  return at;
}

// Index of the first word of a tile in its parity's words.
SGL_ABI_FUNCTION int32_t tile_word(const SymmetricLayout& at, int32_t rank, int32_t tile) {
  return (rank * (at.hidden / kTileRows) + tile) * at.max_rows * kTileRows;
}

// What a rank waits for another one's part of.
enum PeerPhase : int32_t {
  kPeerTiles = 0,      // epilogue_multicast: a product
  kPeerEmbedding = 1,  // decode_step: rows of the embedding that the other rank has
  kPeerOutProj = 2,
  kPeerDown = 3,
  kPeerNothing = 4,    // the rank gave up by itself: awaited is itself
  kPeerWoB = 5,        // attention_out: sums of wo_b
  kPeerExperts = 6,    // fused_moe: the sum of its experts
};

// Why a rank gave up: `waiter` waited for `tile` of `awaited` in vain. Never 0.
struct AbortReason {
  int32_t waiter;
  int32_t awaited;
  int32_t layer;  // 0..65535
  int32_t tile;   // below 2^24
  PeerPhase phase;
};

// Tile and phase as one number, as fault records have them.
SGL_ABI_FUNCTION uint32_t phased_tile(const AbortReason& reason) {
  return static_cast<uint32_t>(reason.phase) << 24 | static_cast<uint32_t>(reason.tile);
}

SGL_ABI_FUNCTION uint64_t abort_word(const AbortReason& reason) {
  return 1ull << 63 | static_cast<uint64_t>(reason.waiter) << 56 | static_cast<uint64_t>(reason.awaited) << 48 |
         static_cast<uint64_t>(reason.layer) << 32 | phased_tile(reason);
}

SGL_ABI_FUNCTION AbortReason abort_reason(uint64_t word) {
  return {static_cast<int32_t>(word >> 56 & 0x7f), static_cast<int32_t>(word >> 48 & 0xff), static_cast<int32_t>(word >> 32 & 0xffff),
          static_cast<int32_t>(word & 0xffffffu), static_cast<PeerPhase>(word >> 24 & 0xff)};
}

// Whom a fault that concerns no other rank must tell: behind FaultRecord::group, in memory that the device reads.
struct PeerGroup {
  int32_t rank;  // the own one
  int32_t num_ranks;
  uint64_t* abort[kMaxRanks];  // of every rank's workspace, as this device sees it
};

}  // namespace sgl_lowlatency::abi
