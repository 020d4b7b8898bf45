// How the weight ring reads a matrix: one asynchronous copy brings a stage, kTileRows rows by stage_k columns, or of a tall one kTallRows rows by one
// chunk.
#pragma once
#include <cstdint>

#include "sgl_lowlatency/abi/decode_step.hpp"

namespace sgl_lowlatency::abi {

constexpr int32_t kChunkBytes = 128;  // of a row of one chunk of a stage: the span of the swizzle
constexpr int32_t kStageChunks = kStageBytes / kTileRows / kChunkBytes;
constexpr int32_t kTallRows = kTileRows * kStageChunks;  // of a tall stage: chunk c has rows 16 c .. 16 c + 15 of the same columns
constexpr int32_t kStageAlignment = 1024;  // bytes; the swizzle repeats after eight rows of a chunk

// Columns of one chunk: 64 of bf16, 128 of FP8.
SGL_ABI_FUNCTION int32_t chunk_k(int32_t element_bytes) { return kChunkBytes / element_bytes; }

// A row-major matrix [num_rows, k_extent] of elements of 2 bytes (bf16) or 1 (FP8) in num_parts equal parts of rows: one, or an even number. A
// tile is 16 consecutive rows of the only part, or 8 rows of part 2 i and the 8 rows of part 2 i + 1 at the same place: of gate and of up, the
// same neurons. The only part may end within a tile: rows beyond it read as zeros, as columns past K do.
struct WeightMatrix {
  const void* weight;  // aligned to 16 bytes
  int32_t num_rows;
  int32_t k_extent;  // a multiple of chunk_k
  int32_t num_parts;
  int32_t element_bytes;
  int32_t is_tall;  // not 0: stages are tall; of one part, num_rows a multiple of kTallRows
};

SGL_ABI_FUNCTION int32_t tile_parts(int32_t num_parts) { return num_parts == 1 ? 1 : 2; }

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
