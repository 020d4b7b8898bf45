// Structs of the `fused_moe` kernel, shared by host C++, CUDA, the host dialect and (through the bindings) Python.
#pragma once
#include <cstddef>
#include <cstdint>

#include "sgl_lowlatency/abi/hyper_connection.hpp"
#include "sgl_lowlatency/abi/weight_map.hpp"

namespace sgl_lowlatency::abi {

constexpr int32_t kMoeMaxRows = 48;        // rows of one launch
constexpr int32_t kMoeMaxTopK = 8;
constexpr int32_t kMoeColumns = 8;         // of the MMA: rows that one tile of weights is multiplied with at a time
constexpr int32_t kMoeStepK = 128;         // K elements of a step: a lane has 32 consecutive ones, one FP4 scale a row of weights
constexpr int32_t kMoeSplitK = 1024;       // K elements of a router item
constexpr int32_t kMoeRowWords = 2;        // words of a set of rows: row r is bit r % 32 of word r / 32
constexpr int32_t kMoeMaxDepth = 5;        // chunks of a warp's own ring
constexpr int32_t kMoeMinDepth = 2;
constexpr int32_t kMoeChunkSteps = 2;      // of FP4 in a chunk; of FP8 and bf16 it is one
constexpr int32_t kMoeScaleBytes = kMoeChunkSteps * 256;          // of a chunk of FP4: 64 rows'
constexpr int32_t kMoeChunkBytes = kPairBytes + 2 * kMoeScaleBytes;  // two tiles, and their scales
constexpr int32_t kMoeDownRows = 32;       // of a unit of down
constexpr int32_t kMoeMaxHidden = 5120;    // a panel of kMoeColumns rows is a third of shared memory
constexpr int32_t kMoeMaxIntermediate = 2560;
constexpr int32_t kMoeProducerWarps = 2;   // behind the consumers; a lane of them fills one consumer's ring
constexpr int32_t kMoeRouterWarp = kNumConsumerWarps + kMoeProducerWarps;
constexpr int32_t kMoeThreads = (kMoeRouterWarp + 1) * 32;
constexpr int32_t kMoeSmemBytes = 232448;  // of one block on sm_90a, sm_100a and sm_103a
static_assert(kMoeChunkBytes % kStageAlignment == 0, "chunks lie side by side");
constexpr int32_t kMoeSharedCost = 2;      // of a shared expert's unit, in routed ones: FP8 beside FP4
constexpr uint32_t kMoeMaxScaleByte = 128; // e8m0: 2^1; what a bf16 factor can express beside the rebias of e2m1
constexpr uint32_t kMoeNoExpert = 0x7fffffffu;  // of a row that chooses nothing

// What blocks stream weights for, in this order.
enum MoeOp : int32_t {
  kMoeRouter = 0,        // logits: 16 experts and kMoeSplitK columns an item
  kMoeSharedGateUp = 1,  // 16 gate rows and their up rows
  kMoeGateUp = 2,
  kMoeSharedDown = 3,    // kMoeDownRows rows
  kMoeDown = 4,
  kNumMoeOps = 5
};

// Edges, for fault records.
enum MoeEdge : int32_t {
  kMoeEdgeLogits = 0,
  kMoeEdgeChoices = 1,
  kMoeEdgeActivation = 2,
  kMoeEdgeOutput = 3,
  kMoeEdgeMix = 4,
  kMoeEdgeCoefficients = 5
};

// Points of a block's way through a launch, of which FusedMoeParams::trace keeps the times.
enum MoePoint : int32_t {
  kMoePointBegin = 0,  // the launch in front is over
  kMoePointRouter = 1,
  kMoePointSharedGateUp = 2,
  kMoePointRouted = 3,  // the jobs are there
  kMoePointGateUp = 4,
  kMoePointSharedDown = 5,
  kMoePointDown = 6,
  kMoePointSums = 7,
  kNumMoePoints = 8
};

struct MoeGeometry {
  int32_t hidden;        // a multiple of 128 up to kMoeMaxHidden
  int32_t intermediate;  // of an expert and of the shared one, a multiple of 128 up to kMoeMaxIntermediate
  int32_t num_experts;   // a multiple of 16, at most kMaxExperts
  int32_t top_k;         // at most kMoeMaxTopK and num_experts
};

SGL_ABI_FUNCTION int32_t moe_ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }
SGL_ABI_FUNCTION int32_t moe_groups(int32_t rows) { return moe_ceil_div(rows, kMoeColumns); }
SGL_ABI_FUNCTION int32_t moe_splits(const MoeGeometry& g) { return moe_ceil_div(g.hidden, kMoeSplitK); }

// Units of one matrix: the tiles of an op.
SGL_ABI_FUNCTION int32_t moe_tiles(const MoeGeometry& g, MoeOp op) {
  if (op == kMoeRouter) return g.num_experts / 16 * moe_splits(g);
  return op == kMoeSharedGateUp || op == kMoeGateUp ? g.intermediate / 16 : g.hidden / kMoeDownRows;
}

// A block's share of `total` routed units beside its even share of `shared` static ones, kMoeSharedCost each: the sums are even. All units once,
// contiguous. Where static work alone is above what a block should have, routed units are shared evenly by themselves.
SGL_ABI_FUNCTION int32_t moe_routed_begin(int32_t total, int32_t shared, int32_t block, int32_t grid) {
  const int32_t work = total + kMoeSharedCost * shared, most_shared = moe_ceil_div(shared, grid);
  if (work / grid - 1 < kMoeSharedCost * most_shared) return even_share(total, block, grid).begin;
  return even_share(work, block, grid).begin - kMoeSharedCost * even_share(shared, block, grid).begin;
}
SGL_ABI_FUNCTION TileRange moe_routed_share(int32_t total, int32_t shared, int32_t block, int32_t grid) {
  const int32_t begin = moe_routed_begin(total, shared, block, grid);
  return {begin, moe_routed_begin(total, shared, block + 1, grid) - begin};
}

// One generation of the hand-over words: offsets in words, multiples of 4.
struct MoeHandover {
  int32_t logits;        // [splits, rows, num_experts] fp32: partial sums
  int32_t choices;       // [rows, top_k, 2]: expert or kMoeNoExpert, weight fp32
  int32_t activation;    // [rows + rows * top_k, intermediate / 2] pairs of bf16: the shared expert's rows, then pairs
  int32_t output;        // [rows + rows * top_k, hidden] fp32: the shared expert's rows, then pairs
  int32_t mix;           // [mix_units, rows, kMixWords] fp32; this and what follows of launches with streams alone
  int32_t coefficients;  // [rows, kMixes] fp32: pre, post, comb
  int32_t total_words;
};
SGL_ABI_FUNCTION MoeHandover moe_handover(const MoeGeometry& g, int32_t rows) {
  MoeHandover at{};
  const int32_t vectors = rows + rows * g.top_k;
  at.logits = 0;
  at.choices = at.logits + moe_splits(g) * rows * g.num_experts;
  at.activation = at.choices + (rows * g.top_k * 2 + 3) / 4 * 4;
  at.output = at.activation + vectors * (g.intermediate / 2);
  at.mix = at.output + vectors * g.hidden;
  at.coefficients = at.mix + mix_units(g.hidden) * rows * kMixWords;
  at.total_words = at.coefficients + rows * kMixes;
  return at;
}
// Words that a launch uses: those of the hyper-connection where it has streams.
SGL_ABI_FUNCTION int32_t moe_used_words(const MoeHandover& at, bool has_streams) { return has_streams ? at.total_words : at.mix; }

// State in device memory that outlives a launch, zero before the first one.
struct MoeState {
  uint32_t exit_ticket[32];  // [0]: blocks that finished; the last one closes the launch
  uint32_t launches[32];     // [0]: launches that are over
  int32_t used_words[32];    // [2]: of a generation, from its begin, that are not known to be clear
  uint64_t executed[kMoeMaxRows + 1];  // completed launches by rows, of those that are counted
};
static_assert(offsetof(MoeState, executed) == 384, "counters keep their lines");

// What the routing leaves in shared memory, beside the lists.
struct MoeBlockState {
  int32_t generation;      // of this launch, 0 or 1
  int32_t num_jobs;        // an active expert and up to kMoeColumns of its pairs
  int32_t words_to_clear;  // of the other generation
  int16_t parity;          // of ranks: of this launch, of the words that they push
  int16_t rows_to_clear;   // of ranks: rows of the parity before
};

// Dynamic shared memory of one block: byte offsets, multiples of 16.
struct MoeSmem {
  int32_t barriers;  // full and empty[kNumConsumerWarps][kMoeMaxDepth], routed as uint64_t
  int32_t state;     // MoeBlockState
  int32_t row_bits;  // [kMoeRowWords][num_experts] uint32
  int32_t first_pairs;  // [num_experts] int32: pairs of the experts before
  int32_t ids;       // [rows * top_k] uint32: choices
  int32_t weights;   // [rows * top_k] float
  int32_t pairs;     // [rows * top_k] int32: the pair of a choice, or -1
  int32_t pair_rows;   // [rows * top_k] int32, by pair: its row
  int32_t job_expert;  // [rows * top_k] int32, by job
  int32_t job_first;   // [rows * top_k] int32: its first pair
  int32_t job_count;   // [rows * top_k] int32: its pairs, at most kMoeColumns
  int32_t scratch;   // [kNumConsumerWarps][2][16 * kMoeColumns] float: what warps add up where K is split over them
  int32_t panel;     // [rows, at most kMoeColumns] of panel_pitch: the B operand
  int32_t ring;      // [kNumConsumerWarps][depth] of kMoeChunkBytes, at a multiple of kStageAlignment
  int32_t depth;
  int32_t limit_bytes;  // what total_bytes was to stay within
  int32_t total_bytes;
};
// Columns 16 u .. 16 u + 15 of a panel row are two pieces of 16 bytes, 64 apart, so that the pieces which the four lanes of a row read at a time lie
// side by side: the first at byte u / 8 * 256 + u % 2 * 128 + u % 8 / 2 * 16, columns 0 1, 8 9, 2 3, 10 11, the second 4 5, 12 13, 6 7, 14 15.
SGL_ABI_FUNCTION int32_t moe_panel_pitch(int32_t columns) { return columns * 2 + 64; }

// A ring as deep as `limit` bytes hold; of kMoeMinDepth, and above the limit, where nothing fits.
SGL_ABI_FUNCTION MoeSmem moe_smem(const MoeGeometry& g, int32_t rows, int32_t limit) {
  MoeSmem at{};
  int32_t end = 0;
  const int32_t pairs = rows * g.top_k, widest = g.hidden > g.intermediate ? g.hidden : g.intermediate;
  const auto take = [&](int32_t bytes) {
    const int32_t begin = end;
    end += (bytes + 15) / 16 * 16;
    return begin;
  };
  at.barriers = take((2 * kNumConsumerWarps * kMoeMaxDepth + 1) * 8);
  at.state = take(static_cast<int32_t>(sizeof(MoeBlockState)));
  at.row_bits = take(kMoeRowWords * g.num_experts * 4);
  at.first_pairs = take(g.num_experts * 4);
  at.ids = take(pairs * 4);
  at.weights = take(pairs * 4);
  at.pairs = take(pairs * 4);
  at.pair_rows = take(pairs * 4);
  at.job_expert = take(pairs * 4);
  at.job_first = take(pairs * 4);
  at.job_count = take(pairs * 4);
  at.scratch = take(kNumConsumerWarps * 2 * 16 * kMoeColumns * 4);
  at.panel = take((rows < kMoeColumns ? rows : kMoeColumns) * moe_panel_pitch(widest));
  at.ring = (end + kStageAlignment - 1) / kStageAlignment * kStageAlignment;
  const int32_t fit = (limit - at.ring) / (kNumConsumerWarps * kMoeChunkBytes);
  at.depth = fit > kMoeMaxDepth ? kMoeMaxDepth : fit < kMoeMinDepth ? kMoeMinDepth : fit;
  at.limit_bytes = limit;
  at.total_bytes = at.ring + kNumConsumerWarps * at.depth * kMoeChunkBytes;
  return at;
}

struct FusedMoeParams {
  int32_t rows;  // 1..kMoeMaxRows
  MoeGeometry geometry;
  float routed_scaling;   // factor of the normalised weights
  float swiglu_limit;     // gates are at most it, ups within +- it; infinity: none
  int64_t alt_token_id;   // rows of this token rank by bias_alt
  MoeSmem shared;         // moe_smem of geometry, rows and its limit
  uint64_t deadline_ns;   // of a wait for another block; a wait for the ring lasts twice as long
  int32_t rank;           // for the fault record

  const bf16* x;                // [rows, hidden]: the normed stream
  const float* bias;            // [num_experts]
  const float* bias_alt;        // [num_experts], or null
  const int64_t* token_ids;     // [rows], or null without bias_alt
  const int32_t* num_live_rows; // [1], or null: all; rows from there on choose nothing
  // [kNumMoeOps]. Router bf16 [num_experts, hidden], wide boxes. Of the shared expert FP8 e4m3fn, pairs: [2 intermediate, hidden] in two parts gate |
  // up, and [hidden, intermediate]. Of experts FP4 e2m1, two columns a byte, interleaved for sm_90's mixed-input GEMM (DESIGN.md), pairs:
  // [num_experts, 2 intermediate, hidden / 2] in parts up | gate of each, and [num_experts, hidden, intermediate / 2].
  const WeightMap* maps;
  const uint8_t* gate_up_scale;        // [num_experts, 2 intermediate / 64, hidden / 128, 16, 16]: e8m0 of 32 columns, interleaved likewise
  const uint8_t* down_scale;           // [num_experts, hidden / 64, intermediate / 128, 16, 16]
  const float* shared_gate_up_scale;   // [2 intermediate / 32, hidden / 32]: of 32 x 32 blocks, powers of two
  const float* shared_down_scale;      // [hidden / 32, intermediate / 32]

  HyperConnection hyper;  // the MoE's; without streams nothing follows the MoE here, and the rest of it is not looked at
  bf16* out;            // [rows, hidden]; with streams, or null
  int32_t* out_ids;     // [rows, top_k], or null: the choices by rank, -1 for none
  float* out_weights;   // [rows, top_k], or null with out_ids: their weights
  float* out_logits;    // [rows, num_experts], or null with out_ids
  uint64_t* trace;      // [grid, kNumMoePoints] of timer_ns, or null
  uint32_t* workspace;  // two generations of generation_words, all bits set before the first launch
  int32_t generation_words;  // a multiple of 4, at least moe_used_words of geometry and rows
  MoeState* state;
  uint64_t* executed_mirror;  // [kMoeMaxRows + 1] host-visible copy of the state's counts, or null: this launch is not counted
  FaultRecord* fault;  // host-visible
};
static_assert(sizeof(FusedMoeParams) <= 4096, "parameters of a launch");

}  // namespace sgl_lowlatency::abi
