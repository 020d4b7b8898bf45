// How a weight ring reads a matrix: one asynchronous copy brings a box of it.
#pragma once
#include <cstdint>

#include "sgl_lowlatency/abi/decode_step.hpp"

namespace sgl_lowlatency::abi {

constexpr int32_t kChunkBytes = 128;  // of a row of one chunk of a stage: the span of the swizzle
constexpr int32_t kStageChunks = kStageBytes / kTileRows / kChunkBytes;
constexpr int32_t kTallRows = kTileRows * kStageChunks;  // of a tall stage: chunk c has rows 16 c .. 16 c + 15 of the same columns
constexpr int32_t kStageAlignment = 1024;  // bytes; the swizzle repeats after eight rows of a chunk

constexpr int32_t kPairBytes = 4096;       // of the boxes of a warp's own ring: two tiles of 16 rows by 128 bytes

// What one copy brings.
enum WeightBox : int32_t {
  kBoxStage = 0,    // kTileRows rows by stage_k columns
  kBoxTall = 1,     // kTallRows rows by one chunk
  kBoxPair = 2,     // two tiles, of 32 rows or of 16 of two parts, by one chunk
  kBoxFp4Pair = 3,  // the same of interleaved FP4: two steps of kFp4StepBytes, one behind the other, not swizzled
  kBoxWide = 4      // kTileRows rows by two chunks
};
constexpr int32_t kFp4StepBytes = 64;      // 128 columns of a row

// Columns of one chunk: 64 of bf16, 128 of FP8.
SGL_ABI_FUNCTION int32_t chunk_k(int32_t element_bytes) { return kChunkBytes / element_bytes; }

// A row-major matrix [num_rows, k_extent] of elements of 2 bytes (bf16) or 1 (FP8) in num_parts equal parts of rows: one, or an even number. A
// tile is 16 consecutive rows of the only part, or 8 rows of part 2 i and the 8 rows of part 2 i + 1 at the same place: of gate and of up, the
// same neurons. The only part may end within a tile: rows beyond it read as zeros, as columns past K do.
struct WeightMatrix {
  const void* weight;  // aligned to 16 bytes
  int32_t num_rows;
  int32_t k_extent;  // a multiple of chunk_k; of FP4, which is bytes of two columns, of kFp4StepBytes
  int32_t num_parts;
  int32_t element_bytes;
  WeightBox box;
};

SGL_ABI_FUNCTION int32_t tile_parts(int32_t num_parts) { return num_parts == 1 ? 1 : 2; }

// [chunks][parts][rows of a part][chunk_bytes], innermost last.
struct WeightBoxShape {
  int32_t chunk_bytes;
  int32_t rows;
  int32_t parts;
  int32_t chunks;
};
SGL_ABI_FUNCTION WeightBoxShape weight_box(const WeightMatrix& m) {
  const int32_t parts = tile_parts(m.num_parts);
  if (m.box == kBoxTall) return {kChunkBytes, kTallRows, 1, 1};
  if (m.box == kBoxPair) return {kChunkBytes, 2 * kTileRows / parts, parts, 1};
  if (m.box == kBoxFp4Pair) return {kFp4StepBytes, 2 * kTileRows / parts, parts, 2};
  return {kChunkBytes, kTileRows / parts, parts, m.box == kBoxWide ? 2 : kStageChunks};
}
SGL_ABI_FUNCTION int32_t weight_box_bytes(const WeightBoxShape& box) { return box.chunk_bytes * box.rows * box.parts * box.chunks; }

// A WeightMatrix as the copy engine wants it: a CUtensorMap on CUDA, the WeightMatrix itself on the host. Made on the host by
// encode_weight_map, read in device memory.
struct alignas(64) WeightMap {
  uint64_t words[16];
};
static_assert(sizeof(WeightMap) == 128 && sizeof(WeightMatrix) <= sizeof(WeightMap), "the size of a CUtensorMap");

// Bytes from the begin of a stage to the 16 bytes number j of row `row` of its chunk `chunk`: chunks one after
// the other, 128 bytes a row, whose eight 16-byte columns are permuted so that eight rows of one column meet no bank twice.
SGL_ABI_FUNCTION int32_t stage_offset(int32_t chunk, int32_t row, int32_t j) { return (chunk * kTileRows + row) * 128 + (j ^ row % 8) * 16; }

}  // namespace sgl_lowlatency::abi
