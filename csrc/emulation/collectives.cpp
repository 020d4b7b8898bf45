// Warp collectives and block barriers. Lanes leave their operands and give way; the last one computes for all.
#include <algorithm>
#include <cstring>

#include "machine.hpp"

namespace sgl_lowlatency::emulation {
namespace {

constexpr uint32_t kPreemptCollectiveOneIn = 64;
constexpr uint32_t kPreemptBarrierOneIn = 4;

struct Shuffle {
  uint32_t value;
  int32_t src_lane;
  uint32_t result;
};

struct Ldmatrix {
  const unsigned char* row;
  uint32_t* r;
};

struct Mma {
  float* c;
  const uint32_t* a;
  const uint32_t* b;
};

struct Ballot {
  bool vote;
  uint64_t votes;
};

template <typename T>
const T& argument(const Warp& warp, int32_t lane) {
  return *static_cast<const T*>(warp.arguments[lane]);
}

// True for the last lane: the others wait with their arguments in place until finish(). False: the collective is over.
bool enter(Collective kind, void* arguments) {
  Lane& lane = *machine->current;
  Warp& warp = *lane.warp;
  if (warp.exited != 0) misuse(std::string("calls ") + name(kind) + " after lanes of its warp have exited");
  if (warp.collective != Collective::kNone && warp.collective != kind) {
    misuse(std::string("calls ") + name(kind) + " while other lanes of its warp wait in " + name(warp.collective));
  }
  warp.collective = kind;
  warp.arguments[lane.idx] = arguments;
  warp.in_collective |= lane.bit;
  warp.runnable &= ~lane.bit;
  if (warp.in_collective == machine->all_lanes) return true;
  leave_lane();
  return false;
}

void finish(Warp& warp) {
  warp.in_collective = 0;
  warp.collective = Collective::kNone;
  warp.runnable = machine->all_lanes;
}

void collective(Collective kind, void* arguments, void (*compute)(Warp&)) {
  if (!enter(kind, arguments)) return;
  Warp& warp = *machine->current->warp;
  compute(warp);
  finish(warp);
  maybe_preempt(kPreemptCollectiveOneIn);
}

void compute_shuffle(Warp& warp) {
  for (int32_t l = 0; l < machine->warp_size; ++l) {
    Shuffle& mine = *static_cast<Shuffle*>(warp.arguments[l]);
    mine.result = argument<Shuffle>(warp, mine.src_lane).value;
  }
}

template <class Combine>
void reduce(Warp& warp, Combine combine) {
  uint32_t result = argument<uint32_t>(warp, 0);
  for (int32_t l = 1; l < machine->warp_size; ++l) result = combine(result, argument<uint32_t>(warp, l));
  for (int32_t l = 0; l < machine->warp_size; ++l) *static_cast<uint32_t*>(warp.arguments[l]) = result;
}

void compute_max(Warp& warp) {
  reduce(warp, [](uint32_t a, uint32_t b) { return std::max(a, b); });
}
void compute_min(Warp& warp) {
  reduce(warp, [](uint32_t a, uint32_t b) { return std::min(a, b); });
}
void compute_or(Warp& warp) {
  reduce(warp, [](uint32_t a, uint32_t b) { return a | b; });
}

void compute_ldmatrix(Warp& warp) {
  for (int32_t l = 0; l < machine->warp_size; ++l) check_shared_read(warp.lanes[l], argument<Ldmatrix>(warp, l).row);
  for (int32_t l = 0; l < machine->warp_size; ++l) {
    for (int32_t matrix = 0; matrix < 4; ++matrix) {
      const unsigned char* const row = argument<Ldmatrix>(warp, matrix * 8 + l / 4).row;
      std::memcpy(&argument<Ldmatrix>(warp, l).r[matrix], row + (l % 4) * 4, 4);
    }
  }
}

float low_half(uint32_t pair) {
  const uint32_t bits = pair << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

float high_half(uint32_t pair) {
  const uint32_t bits = pair & 0xffff0000u;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

typedef float Float4 __attribute__((vector_size(16)));

// PTX m16n8k16 fragments, group = lane / 4, pair = lane % 4: a[0..3] hold rows group and group + 8, columns 2 pair (+1) and
// 2 pair + 8 (+1); b[0..1] hold k = 2 pair (+1) and 2 pair + 8 (+1) of column group; c: rows group, group + 8, columns 2 pair (+1).
void compute_mma(Warp& warp) {
  float a[16][16], b[16][8], c[16][8];
  for (int32_t l = 0; l < machine->warp_size; ++l) {
    const Mma& mma = argument<Mma>(warp, l);
    const int32_t group = l / 4, column = (l % 4) * 2;
    for (int32_t i = 0; i < 4; ++i) {
      a[group + (i & 1) * 8][column + (i >> 1) * 8] = low_half(mma.a[i]);
      a[group + (i & 1) * 8][column + (i >> 1) * 8 + 1] = high_half(mma.a[i]);
      c[group + (i >> 1) * 8][column + (i & 1)] = mma.c[i];
    }
    for (int32_t i = 0; i < 2; ++i) {
      b[column + i * 8][group] = low_half(mma.b[i]);
      b[column + i * 8 + 1][group] = high_half(mma.b[i]);
    }
  }
  for (int32_t m = 0; m < 16; m += 4) {
    Float4 sum[4][2];
    std::memcpy(sum, c[m], sizeof(sum));
    for (int32_t k = 0; k < 16; ++k) {
      Float4 column[2];
      std::memcpy(column, b[k], sizeof(column));
      for (int32_t row = 0; row < 4; ++row) {
        sum[row][0] += a[m + row][k] * column[0];
        sum[row][1] += a[m + row][k] * column[1];
      }
    }
    std::memcpy(c[m], sum, sizeof(sum));
  }
  for (int32_t l = 0; l < machine->warp_size; ++l) {
    const Mma& mma = argument<Mma>(warp, l);
    for (int32_t i = 0; i < 4; ++i) mma.c[i] = c[l / 4 + (i >> 1) * 8][(l % 4) * 2 + (i & 1)];
  }
}

// v_mfma_f32_16x16x32_bf16, lane = 16 group + i: a holds row i, b column i, both k = 8 group .. 8 group + 7; c: rows 4 group .. 4 group + 3 of
// column i.
void compute_mfma(Warp& warp) {
  float a[32][16], b[32][16], c[16][16];
  for (int32_t l = 0; l < 64; ++l) {
    const Mma& mma = argument<Mma>(warp, l);
    const int32_t i = l % 16, group = l / 16;
    for (int32_t w = 0; w < 4; ++w) {
      const int32_t k = group * 8 + w * 2;
      a[k][i] = low_half(mma.a[w]);
      a[k + 1][i] = high_half(mma.a[w]);
      b[k][i] = low_half(mma.b[w]);
      b[k + 1][i] = high_half(mma.b[w]);
    }
    for (int32_t j = 0; j < 4; ++j) c[group * 4 + j][i] = mma.c[j];
  }
  for (int32_t m = 0; m < 16; ++m) {
    Float4 sum[4];
    std::memcpy(sum, c[m], sizeof(sum));
    for (int32_t k = 0; k < 32; ++k) {
      Float4 column[4];
      std::memcpy(column, b[k], sizeof(column));
      for (int32_t n = 0; n < 4; ++n) sum[n] += a[k][m] * column[n];
    }
    std::memcpy(c[m], sum, sizeof(sum));
  }
  for (int32_t l = 0; l < 64; ++l) {
    const Mma& mma = argument<Mma>(warp, l);
    for (int32_t j = 0; j < 4; ++j) mma.c[j] = c[l / 16 * 4 + j][l % 16];
  }
}

void compute_ballot(Warp& warp) {
  uint64_t votes = 0;
  for (int32_t l = 0; l < machine->warp_size; ++l) votes |= static_cast<uint64_t>(argument<Ballot>(warp, l).vote) << l;
  for (int32_t l = 0; l < machine->warp_size; ++l) static_cast<Ballot*>(warp.arguments[l])->votes = votes;
}

uint32_t exchange(uint32_t value, int32_t src_lane) {
  if (src_lane < 0 || src_lane >= machine->warp_size) misuse("shuffle from lane " + std::to_string(src_lane));
  Shuffle shuffle{value, src_lane, 0};
  collective(Collective::kShuffle, &shuffle, compute_shuffle);
  return shuffle.result;
}

std::string barrier_text(int32_t id, int32_t num_threads) {
  return "barrier " + std::to_string(id) + " with " + std::to_string(num_threads) + " threads";
}

void release_barrier(NamedBarrier& barrier, Block& block) {
  for (Warp* waiting : barrier.waiting) {
    if (waiting->barrier_orders) join_in_block(waiting->clock, *barrier.clock, block.range, machine->next_tag);
    waiting->barrier_id = -1;
    wake_lanes(*waiting, machine->all_lanes);
  }
  barrier.waiting.clear();
  barrier.clock.reset();
  barrier.num_threads = 0;
  barrier.arrived = 0;
}

// The whole warp has arrived at warp.barrier_id; the current lane is its last.
void arrive_warp(Warp& warp) {
  Block& block = *warp.block;
  NamedBarrier& barrier = block.barriers[warp.barrier_id];
  const int32_t num_threads = warp.barrier_threads;
  if (barrier.num_threads != 0 && barrier.num_threads != num_threads) {
    misuse(barrier_text(warp.barrier_id, num_threads) + ", but other warps wait in it with " + std::to_string(barrier.num_threads));
  }
  if (warp.barrier_orders) barrier_in_warp(warp);
  barrier.num_threads = num_threads;
  check_barriers_can_complete(block);
  if (!barrier.clock && warp.barrier_orders) {
    barrier.clock = std::make_unique<Clock>(warp.clock);
  } else if (warp.barrier_orders) {
    join_in_block(*barrier.clock, warp.clock, block.range, machine->next_tag);
  }
  barrier.arrived += machine->warp_size;
  finish(warp);
  if (barrier.arrived == num_threads) {
    if (warp.barrier_orders) join_in_block(warp.clock, *barrier.clock, block.range, machine->next_tag);
    warp.barrier_id = -1;
    release_barrier(barrier, block);
    maybe_preempt(kPreemptBarrierOneIn);
  } else {
    barrier.waiting.push_back(&warp);
    warp.runnable = 0;
    warp.at_barrier = machine->all_lanes;
    leave_lane();
  }
}

}  // namespace

void require_warp_size(int32_t warp_size, const char* call) {
  if (machine->warp_size != warp_size) misuse(std::string(call) + ": this machine's warps have " + std::to_string(machine->warp_size) + " lanes");
}

void check_barriers_can_complete(Block& block) {
  for (int32_t id = 0; id < kNumNamedBarriers; ++id) {
    const int32_t num_threads = block.barriers[id].num_threads;
    if (num_threads > block.live_warps * machine->warp_size) {
      misuse(barrier_text(id, num_threads) + " can never complete: only " +
             std::to_string(block.live_warps * machine->warp_size) + " threads of the block have not exited");
    }
  }
}

const char* name(Collective kind) {
  switch (kind) {
    case Collective::kNone: return "nothing";
    case Collective::kSyncWarp: return "sync_warp";
    case Collective::kShuffle: return "shuffle";
    case Collective::kReduceMax: return "reduce_max";
    case Collective::kReduceMin: return "reduce_min";
    case Collective::kReduceOr: return "reduce_or";
    case Collective::kLdmatrix: return "ldmatrix_x4";
    case Collective::kMma: return "mma_m16n8k16";
    case Collective::kMfma: return "mfma_16x16x32";
    case Collective::kBallot: return "ballot";
    case Collective::kBarrier: return "a block barrier";
  }
  return "unknown";
}

}  // namespace sgl_lowlatency::emulation

namespace sgl_lowlatency::dialect {

using namespace emulation;

void sync_warp() { collective(Collective::kSyncWarp, nullptr, barrier_in_warp); }

namespace {

void sync(int32_t id, int32_t num_threads, bool orders) {
  Warp& warp = *machine->current->warp;
  if (id < 0 || id >= kNumNamedBarriers) misuse("barrier " + std::to_string(id) + ": ids are 0 to 15");
  if (num_threads <= 0 || num_threads % machine->warp_size != 0) {
    misuse(barrier_text(id, num_threads) + ": not a multiple of " + std::to_string(machine->warp_size));
  }
  if (warp.collective == Collective::kBarrier && (warp.barrier_id != id || warp.barrier_threads != num_threads || warp.barrier_orders != orders)) {
    misuse(barrier_text(id, num_threads) + ", but other lanes of its warp wait in " +
           barrier_text(warp.barrier_id, warp.barrier_threads));
  }
  if (warp.collective == Collective::kNone) {
    warp.barrier_id = id;
    warp.barrier_threads = num_threads;
    warp.barrier_orders = orders;
  }
  if (enter(Collective::kBarrier, nullptr)) arrive_warp(warp);
}

int32_t threads_of_block() {
  const BlockRange& range = machine->current->warp->block->range;
  return static_cast<int32_t>(range.own_end - range.own_begin) * machine->warp_size;
}

}  // namespace

void sync_named(int32_t id, int32_t num_threads) { sync(id, num_threads, true); }

void sync_block() { sync(0, threads_of_block(), true); }

void sync_shared() { sync(0, threads_of_block(), false); }

float shuffle_xor(float value, int32_t lane_mask) {
  if (lane_mask < 0 || lane_mask >= machine->warp_size) misuse("shuffle_xor with mask " + std::to_string(lane_mask));
  return shuffle(value, machine->current->idx ^ lane_mask);
}

uint32_t shuffle(uint32_t value, int32_t src_lane) { return exchange(value, src_lane); }

float shuffle(float value, int32_t src_lane) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits = exchange(bits, src_lane);
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint32_t reduce_max(uint32_t value) {
  collective(Collective::kReduceMax, &value, compute_max);
  return value;
}

uint32_t reduce_min(uint32_t value) {
  collective(Collective::kReduceMin, &value, compute_min);
  return value;
}

uint32_t reduce_or(uint32_t value) {
  collective(Collective::kReduceOr, &value, compute_or);
  return value;
}

void ldmatrix_x4(uint32_t (&r)[4], const void* shared_row) {
  require_warp_size(32, "ldmatrix_x4");
  Ldmatrix ldmatrix{static_cast<const unsigned char*>(shared_row), r};
  collective(Collective::kLdmatrix, &ldmatrix, compute_ldmatrix);
}

void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  require_warp_size(32, "mma_m16n8k16");
  Mma mma{c, a, b};
  collective(Collective::kMma, &mma, compute_mma);
}

void mfma_16x16x32(float (&c)[4], const Vec16& a, const Vec16& b) {
  require_warp_size(64, "mfma_16x16x32");
  Mma mma{c, a.w, b.w};
  collective(Collective::kMfma, &mma, compute_mfma);
}

uint64_t ballot(bool vote) {
  Ballot all{vote, 0};
  collective(Collective::kBallot, &all, compute_ballot);
  return all.votes;
}

}  // namespace sgl_lowlatency::dialect
