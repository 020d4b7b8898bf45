// Self-test of load_stage: what a stage holds and where, against the copy engine's rules written out here: boxes are laid out
// innermost first, and its 128-byte swizzle replaces address bits 4..6 by their exclusive or with bits 7..9.
#include "emulation/selftest.hpp"
#include "launch/weight_map.hpp"
#include "sgl_lowlatency/dialect/dialect.hpp"

namespace sgl_lowlatency::emulation {
namespace {

using namespace dialect;

constexpr int32_t kMatrixRows = 64, kMatrixK = 640;  // the second stage of a tile is a quarter inside the matrix

struct Source {
  alignas(16) bf16 elements[kMatrixRows * kMatrixK];
};
// The same memory as a matrix of single bytes: as many bytes a row, twice the columns.
constexpr int32_t kRowBytes = kMatrixK * 2;

// Element number i holds its own number, which 16 bits tell apart.
const Source& source() {
  static const Source filled = [] {
    Source s;
    for (int32_t i = 0; i < kMatrixRows * kMatrixK; ++i) s.elements[i] = bf16{static_cast<uint16_t>(i)};
    return s;
  }();
  return filled;
}

// values: [elements that are not the box's]. The copy of the tile whose first row is `row`, from chunk `chunk` on.
SelftestRun load(uint64_t seed, int32_t num_parts, int32_t row, int32_t chunk, int32_t misplaced_bytes = 0, int32_t element_bytes = 2,
                 int32_t part = 0) {
  const abi::WeightMap map =
      launch::encode_weight_map_host({source().elements, kMatrixRows, kRowBytes / element_bytes, num_parts, element_bytes});
  double wrong = 0;
  Options options;
  options.seed = seed;
  const Report report = emulation::launch(1, 32, 2048 + abi::kStageBytes, [&] {
    if (thread_idx() != 0) return;
    auto* const bar = reinterpret_cast<uint64_t*>(shared_base());
    char* const stage = shared_base() + 1024 + misplaced_bytes;
    mbarrier_init(bar, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_bytes(bar, abi::kStageBytes);
    load_stage(stage, &map, row, part, chunk, bar);
    while (!mbarrier_test(bar, 0)) backoff();
    const int32_t box_parts = abi::tile_parts(num_parts), box_rows = abi::kTileRows / box_parts;
    int32_t linear = 0;
    for (int32_t c = 0; c < abi::kStageChunks; ++c) {
      for (int32_t p = part; p < part + box_parts; ++p) {
        for (int32_t r = 0; r < box_rows; ++r) {
          for (int32_t x = 0; x < 64; ++x, linear += 2) {
            const int32_t from_row = p * (kMatrixRows / num_parts) + row + r, column = (chunk + c) * 64 + x;
            const uint16_t expected = column < kMatrixK ? source().elements[from_row * kMatrixK + column].bits : 0;
            const int32_t at = linear ^ (linear >> 7 & 7) << 4;
            wrong += reinterpret_cast<const bf16*>(stage + at)->bits != expected;
          }
        }
      }
    }
  }, options);
  return {report, {wrong}};
}

// values: [elements that are not the box's]. A tall stage of the same memory as 256 rows of two chunks: rows `row` and following of chunk 1.
SelftestRun load_tall(uint64_t seed, int32_t row) {
  constexpr int32_t kTallMatrixRows = 256, kTallMatrixK = 128;
  const abi::WeightMap map = launch::encode_weight_map_host({source().elements, kTallMatrixRows, kTallMatrixK, 1, 2, abi::kBoxTall});
  double wrong = 0;
  Options options;
  options.seed = seed;
  const Report report = emulation::launch(1, 32, 2048 + abi::kStageBytes, [&] {
    if (thread_idx() != 0) return;
    auto* const bar = reinterpret_cast<uint64_t*>(shared_base());
    char* const stage = shared_base() + 1024;
    mbarrier_init(bar, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_bytes(bar, abi::kStageBytes);
    load_stage(stage, &map, row, 0, 1, bar);
    while (!mbarrier_test(bar, 0)) backoff();
    int32_t linear = 0;
    for (int32_t r = row; r < row + abi::kTallRows; ++r) {
      for (int32_t x = 64; x < 128; ++x, linear += 2) {
        const int32_t at = linear ^ (linear >> 7 & 7) << 4;
        wrong += reinterpret_cast<const bf16*>(stage + at)->bits != source().elements[r * kTallMatrixK + x].bits;
      }
    }
  }, options);
  return {report, {wrong}};
}

// values: [bytes that are not the box's]. The same memory as `num_parts` parts of bytes, kMatrixRows rows of 1,280: the box of `kind` whose rows begin
// at `row` of part `part`, from chunk `chunk` on.
SelftestRun load_box(uint64_t seed, abi::WeightBox kind, int32_t num_parts, int32_t row, int32_t part, int32_t chunk) {
  const abi::WeightMatrix matrix{source().elements, kMatrixRows, kRowBytes, num_parts, 1, kind};
  const abi::WeightMap map = launch::encode_weight_map_host(matrix);
  const int32_t chunk_bytes = kind == abi::kBoxFp4Pair ? 64 : 128, box_parts = kind == abi::kBoxWide || num_parts == 1 ? 1 : 2;
  const int32_t box_rows = (kind == abi::kBoxWide ? 16 : 32) / box_parts, chunks = kind == abi::kBoxPair ? 1 : 2;
  double wrong = 0;
  Options options;
  options.seed = seed;
  const Report report = emulation::launch(1, 32, 2048 + abi::kPairBytes, [&] {
    if (thread_idx() != 0) return;
    auto* const bar = reinterpret_cast<uint64_t*>(shared_base());
    const auto* const stage = reinterpret_cast<const uint8_t*>(shared_base() + 1024);
    mbarrier_init(bar, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_bytes(bar, abi::kPairBytes);
    load_stage(shared_base() + 1024, &map, row, part, chunk, bar);
    while (!mbarrier_test(bar, 0)) backoff();
    int32_t linear = 0;
    for (int32_t c = chunk; c < chunk + chunks; ++c) {
      for (int32_t p = part; p < part + box_parts; ++p) {
        for (int32_t r = row; r < row + box_rows; ++r) {
          for (int32_t x = 0; x < chunk_bytes; ++x, ++linear) {
            const int32_t column = c * chunk_bytes + x, from = (p * (kMatrixRows / num_parts) + r) * kRowBytes + column;
            const uint8_t expected = column < kRowBytes ? reinterpret_cast<const uint8_t*>(source().elements)[from] : 0;
            wrong += stage[kind == abi::kBoxFp4Pair ? linear : linear ^ (linear >> 7 & 7) << 4] != expected;
          }
        }
      }
    }
    wrong += linear != abi::kPairBytes;
  }, options);
  return {report, {wrong}};
}

}  // namespace

void add_load_stage_selftests(Selftests& tests) {
  tests["load_stage"] = [](uint64_t seed) { return load(seed, 1, 32, 0); };
  tests["load_stage_two_parts"] = [](uint64_t seed) { return load(seed, 2, 16, 0); };
  tests["load_stage_four_parts"] = [](uint64_t seed) { return load(seed, 4, 8, 8, 0, 2, 2); };
  tests["load_stage_past_k"] = [](uint64_t seed) { return load(seed, 1, 48, 8); };
  tests["load_stage_fp8"] = [](uint64_t seed) { return load(seed, 2, 16, 8, 0, 1); };
  tests["load_stage_pair"] = [](uint64_t seed) { return load_box(seed, abi::kBoxPair, 1, 32, 0, 3); };
  tests["load_stage_pair_of_parts"] = [](uint64_t seed) { return load_box(seed, abi::kBoxPair, 4, 0, 2, 9); };
  tests["load_stage_pair_beyond"] = [](uint64_t seed) { return load_box(seed, abi::kBoxPair, 1, 48, 0, 0); };
  tests["load_stage_fp4_pair"] = [](uint64_t seed) { return load_box(seed, abi::kBoxFp4Pair, 1, 32, 0, 6); };
  tests["load_stage_fp4_pair_of_parts"] = [](uint64_t seed) { return load_box(seed, abi::kBoxFp4Pair, 2, 16, 0, 19); };  // its second step is past K
  tests["load_stage_wide"] = [](uint64_t seed) { return load_box(seed, abi::kBoxWide, 1, 16, 0, 9); };                // its second chunk as well
  tests["load_stage_tall"] = [](uint64_t seed) { return load_tall(seed, 128); };
  tests["load_stage_tall_row"] = [](uint64_t seed) { return load_tall(seed, 16); };
  tests["load_stage_misaligned"] = [](uint64_t seed) { return load(seed, 1, 0, 0, 128); };
  tests["load_stage_outside"] = [](uint64_t seed) { return load(seed, 2, 32, 0); };
  tests["load_stage_odd_part"] = [](uint64_t seed) { return load(seed, 4, 0, 0, 0, 2, 1); };
}

}  // namespace sgl_lowlatency::emulation
