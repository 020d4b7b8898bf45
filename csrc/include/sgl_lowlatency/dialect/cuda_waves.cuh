// Waves of 64 on CUDA, of the stages that were written for AMD (README.md): two warps and a named barrier, which meet in shared memory. It shows that
// the stages compute the same on a GPU of another kind; nothing here is fast. Waves run in step nowhere: a call of all lanes is a barrier of the wave.
#pragma once
#include "sgl_lowlatency/abi/monokernel.hpp"
#include "sgl_lowlatency/dialect/cuda.cuh"

namespace sgl_lowlatency::dialect {

constexpr abi::Isa kIsa = abi::kGfx950;  // whose shared memory and slots the stages are to take

// What a wave's lanes tell each other, behind the stages' shared memory.
struct WaveScratch {
  uint32_t a[abi::kTileRows][abi::kMfmaK / 2];  // operands of the MFMA, pairs of bf16
  uint32_t b[abi::kTileRows][abi::kMfmaK / 2];
  float c[abi::kTileRows][abi::kTileRows];
  uint32_t words[abi::kWaveSize];
};
constexpr int32_t kWaveSharedBytes = abi::lds_bytes(kIsa) + abi::kMonoWaves * static_cast<int32_t>(sizeof(WaveScratch));
static_assert(kWaveSharedBytes <= 232448, "the most that a block of sm_90 has");

SGL_DEVICE int32_t wave() { return thread_idx() / abi::kWaveSize; }
SGL_DEVICE int32_t wave_lane() { return thread_idx() % abi::kWaveSize; }
SGL_DEVICE WaveScratch& wave_scratch() { return reinterpret_cast<WaveScratch*>(shared_base() + abi::lds_bytes(kIsa))[wave()]; }

SGL_DEVICE void sync_warp() { sync_named(1 + wave(), abi::kWaveSize); }
SGL_DEVICE void sync_shared() { sync_block(); }
SGL_DEVICE void sync_publish() { sync_block(); }  // orders global accesses too
SGL_DEVICE uint32_t shuffle(uint32_t value, int32_t src_lane) {
  WaveScratch& scratch = wave_scratch();
  scratch.words[wave_lane()] = value;
  sync_warp();
  const uint32_t found = scratch.words[src_lane];
  sync_warp();  // the words are free again
  return found;
}
SGL_DEVICE float shuffle(float value, int32_t src_lane) { return __uint_as_float(shuffle(__float_as_uint(value), src_lane)); }
SGL_DEVICE float shuffle_xor(float value, int32_t lane_mask) { return shuffle(value, wave_lane() ^ lane_mask); }
SGL_DEVICE uint64_t ballot(bool vote) {
  WaveScratch& scratch = wave_scratch();
  const uint32_t half = __ballot_sync(0xffffffffu, vote);
  if (wave_lane() % 32 == 0) scratch.words[wave_lane() / 32] = half;
  sync_warp();
  const uint64_t both = scratch.words[0] | static_cast<uint64_t>(scratch.words[1]) << 32;
  sync_warp();
  return both;
}
SGL_DEVICE int32_t uniform(int32_t value) { return value; }
SGL_DEVICE int32_t varying(int32_t value) { return value; }
template <class Params>
SGL_DEVICE const Params& read_again(const Params& params) { return params; }

// As on gfx950: a lane reads back the 16 bytes that it has copied.
SGL_DEVICE int32_t copied_row() { return thread_idx() % 16; }
SGL_DEVICE int32_t copied_column() { return wave_lane() / 16 * 8; }
SGL_DEVICE void copy_tile(char* slot, const bf16* own) {
  copy_async_16(slot + wave_lane() * 16, own);
  copy_async_commit();
}
template <int32_t kYounger>
SGL_DEVICE void await_copies() {
  if (!planted(Planted::kRingNoWait)) copy_async_wait<kYounger>();
}
SGL_DEVICE Vec16 load_copied(const void* slot) { return reinterpret_cast<const Vec16*>(slot)[wave_lane()]; }

// Lane 16 g + i has columns 8 g .. 8 g + 7 of row i of both operands, and rows 4 g .. 4 g + 3 of column i of the sum. A warp has half of the columns.
SGL_DEVICE void mfma_16x16x32(float (&c)[4], const Vec16& a, const Vec16& b) {
  WaveScratch& scratch = wave_scratch();
  const int32_t lane = wave_lane(), group = lane / 16, row = lane % 16;
SGL_UNROLL
  for (int32_t i = 0; i < 4; ++i) {
    scratch.a[row][group * 4 + i] = a.w[i];
    scratch.b[row][group * 4 + i] = b.w[i];
  }
  sync_warp();
  const int32_t first = lane % 32 / 4, pair = lane % 4, columns = lane / 32 * 8;  // of PTX's fragments
  float sum[4] = {};
SGL_UNROLL
  for (int32_t k = 0; k < abi::kMfmaK / 2; k += 8) {
    const uint32_t left[4] = {scratch.a[first][k + pair], scratch.a[first + 8][k + pair], scratch.a[first][k + pair + 4], scratch.a[first + 8][k + pair + 4]};
    const uint32_t right[2] = {scratch.b[columns + first][k + pair], scratch.b[columns + first][k + pair + 4]};
    mma_m16n8k16(sum, left, right);
  }
SGL_UNROLL
  for (int32_t i = 0; i < 4; ++i) scratch.c[first + i / 2 * 8][columns + pair * 2 + i % 2] = sum[i];
  sync_warp();  // operands are free again; the next sums are stored behind another barrier
SGL_UNROLL
  for (int32_t i = 0; i < 4; ++i) c[i] += scratch.c[group * 4 + i][row];
}

SGL_DEVICE int32_t popcount(uint64_t x) { return __popcll(x); }

}  // namespace sgl_lowlatency::dialect
