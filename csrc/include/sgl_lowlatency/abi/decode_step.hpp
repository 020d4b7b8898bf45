// Structs of the `decode_step` kernel, shared by host C++, CUDA, the host dialect and (through the bindings) Python.
// They exist here once: Python reads the fields that bindings.cpp exports and never restates sizes or offsets.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define SGL_ABI_FUNCTION __host__ __device__ constexpr
#else
#define SGL_ABI_FUNCTION constexpr
#endif

namespace sgl_lowlatency::abi {

// bf16 as it lies in memory. Arithmetic happens in float (dialect::to_float, dialect::to_bf16).
struct bf16 {
  uint16_t bits;
};
static_assert(sizeof(bf16) == 2, "bf16 tensors are read in place");

constexpr int32_t kMaxRows = 16;                        // rows of one step: two N tiles of the m16n8k16 MMA
constexpr int32_t kTileRows = 16;                       // output rows of one weight tile: the M of the MMA
constexpr int32_t kMaxHeadsPerItem = 8;                 // query heads of one attention item: the N of the MMA
constexpr int32_t kMinItemTokens = 64;                  // least tokens of an item of a sequence that has them
constexpr int32_t kItemTokenMultiple = 16;              // an item begins at a multiple of this
constexpr int32_t kNumConsumerWarps = 8;
constexpr int32_t kNumProducerWarps = 4;                // share the issue of a stage's row copies
constexpr int32_t kNumThreads = (kNumConsumerWarps + kNumProducerWarps) * 32;  // consumers first
constexpr int32_t kStageK = 512;                        // K elements of one ring stage
constexpr int32_t kStagePitchBytes = kStageK * 2 + 16;  // 16 bytes of padding keep ldmatrix free of bank conflicts
constexpr int32_t kStageBytes = kTileRows * kStagePitchBytes;
constexpr int32_t kMaxStages = 16;
constexpr int32_t kMaxStagesInFlight = 3;               // stages of a block requested and not yet landed
constexpr int32_t kRowStateBytes = 1024;
constexpr int32_t kPanelPadBytes = 16;                  // padding of one activation-panel row, for ldmatrix as well
constexpr int32_t kScratchPitch = 20;                   // floats from one column of a partial tile to the next: no bank conflicts

// The four weight matrices of a layer, in execution order.
enum OpIdx : int32_t { kOpQkv = 0, kOpOutProj = 1, kOpGateUp = 2, kOpDown = 3, kNumOps = 4 };

// Dependency edges of one layer. An edge is a monotonic counter; its consumers wait for base + (layer + 1) * signals of a
// layer: OpPlan::producers, for attention one a (row, kv head, head subgroup).
enum EdgeIdx : int32_t {
  kEdgeQkv = 0,        // qkv tiles written            -> attention
  kEdgeAttention = 1,  // attention output rows final  -> out_proj
  kEdgeOutProj = 2,    // residual after attention     -> gate_up
  kEdgeGateUp = 3,     // SwiGLU activations           -> down
  kEdgeDown = 4,       // residual after the MLP       -> next layer's qkv, final norm
  kNumEdges = 5
};

// One decoder layer's weights in SGLang's own tensors. All bf16, row-major, contiguous.
struct LayerWeights {
  const bf16* input_norm;  // [hidden]
  const bf16* qkv;         // [(num_q_heads + 2 * num_kv_heads) * head_dim, hidden], rows q | k | v
  const bf16* q_norm;      // [head_dim]
  const bf16* k_norm;      // [head_dim]
  const bf16* out_proj;    // [hidden, num_q_heads * head_dim]
  const bf16* post_norm;   // [hidden]
  const bf16* gate_up;     // [2 * intermediate, hidden], rows gate | up
  const bf16* down;        // [hidden, intermediate]
};

// One layer's KV pool: [slots, num_kv_heads, head_dim] bf16, slot stride in Geometry::kv_slot_stride.
struct KvLayer {
  bf16* k;
  bf16* v;
};

struct Geometry {
  int32_t num_layers;
  int32_t hidden;
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t head_dim;  // 64 or 128
  int32_t intermediate;
  int32_t vocab;
  int32_t max_position;    // rows of cos_sin
  int32_t kv_slot_stride;  // elements from one KV slot to the next
  int32_t req_to_token_stride;  // elements from one request's row to the next
  int32_t num_request_rows;     // rows of req_to_token
  int32_t num_kv_slots;         // slots of every KV buffer
  float rms_eps;
  float softmax_scale;
};

struct OpPlan {
  int32_t k_extent;   // K of the matrix
  int32_t k_panel;    // K elements of activations in shared memory at a time, a multiple of kStageK or all of K
  int32_t num_tiles;  // tiles of kTileRows output rows; gate_up: 8 gate rows and their 8 up rows
  int32_t producers;  // blocks that own at least one tile: signals per layer
};

struct TileRange {
  int32_t begin;
  int32_t count;
};

// Why a kernel ended itself.
enum FaultKind : uint32_t {
  kFaultNone = 0,
  kFaultEdgeDeadline = 1,   // a cross-block edge was not signalled in time
  kFaultRingFull = 2,       // a consumer or producer warp waited too long for a stage's weights to land
  kFaultRingEmpty = 3,      // a producer warp waited too long for the consumers to free a stage
  kFaultBadTokenId = 4,     // input id outside [0, vocab)
  kFaultBadPosition = 5,    // position outside [0, max_position)
  kFaultBadLength = 6,      // sequence length above req_to_token_stride
  kFaultBadRequestRow = 7,  // request row outside req_to_token
  kFaultBadSlot = 8,        // KV slot outside the pool
};

// Written once, by the first thread whose wait outlived the deadline or that met invalid input. Host-visible memory.
struct FaultRecord {
  uint32_t state;  // 0 empty, 1 claimed, 2 complete: stored last, with system-scope release
  uint32_t kind;   // FaultKind
  int32_t rank;
  int32_t sm;
  int32_t block;
  int32_t layer;       // 0 for inputs that are checked before the first layer
  int32_t edge;        // EdgeIdx, or the ring stage, or the row for kFaultBad*
  uint32_t expected;   // the counter's target; the awaited phase parity; the value's exclusive limit for kFaultBad*
  uint32_t seen;       // the counter; the other parity; the low 32 bits of the value
  uint32_t host_ack;   // the host sets 1 when it has read the record; the kernel then traps
  uint64_t waited_ns;  // 0 for kFaultBad*
};
static_assert(sizeof(FaultRecord) == 48 && offsetof(FaultRecord, waited_ns) == 40, "read by the host while the kernel runs");

// Counters in device memory, zero before the first launch, never reset by the host. Launches that share one run in turn.
struct SyncState {
  uint32_t edge[kNumEdges][32];     // [..][0] is the counter; one 128-byte line each
  uint32_t edge_base[32];           // [kNumEdges] value of edge[..][0] when this launch began
  uint32_t exit_ticket[32];         // [0]: blocks that finished; the last one closes the launch
  uint64_t executed[kMaxRows + 1];  // completed launches by rows
  uint32_t pad[30];
};
static_assert(sizeof(SyncState) % 128 == 0, "counters keep their lines");

// Dynamic shared memory of one block, in this order.
struct SmemLayout {
  int32_t barriers;      // full[kMaxStages], empty[kMaxStages] as uint64_t
  int32_t row_state;     // RowState (stages/row_state.hpp), kRowStateBytes
  int32_t zero_row;      // 16 zero bytes (128 reserved): the B rows beyond `rows`
  int32_t scratch;       // [2][kNumConsumerWarps][n_columns][kScratchPitch] float: cross-warp partial tiles; attention's q, k, v vectors
  int32_t accumulators;  // [max_tiles_multi_panel][n_columns * kTileRows] float; empty when every op has one panel
  int32_t panel;         // max_panel_bytes: [rows] of panel_row_bytes(k_panel); or the attention merge, merge_scratch_bytes
  int32_t ring;          // [num_stages][kTileRows][kStagePitchBytes]
  int32_t total_bytes;
};

// Bytes of one row of an activation panel of k_panel bf16.
SGL_ABI_FUNCTION int32_t panel_row_bytes(int32_t k_panel) { return k_panel * 2 + kPanelPadBytes; }

// Bytes of the attention merge: every consumer warp's heads, each an output, a maximum and a sum in fp32.
SGL_ABI_FUNCTION int32_t merge_scratch_bytes(int32_t head_dim) { return kNumConsumerWarps * kMaxHeadsPerItem * (head_dim + 2) * 4; }

// Attention items that share one kv head, because an item holds at most kMaxHeadsPerItem query heads.
SGL_ABI_FUNCTION int32_t head_subgroups(int32_t num_q_heads, int32_t num_kv_heads) {
  return (num_q_heads / num_kv_heads + kMaxHeadsPerItem - 1) / kMaxHeadsPerItem;
}

// n_columns is 8 for rows <= 8, else 16. max_tiles_multi_panel: most tiles of one block in an op with several panels.
SGL_ABI_FUNCTION SmemLayout smem_layout(int32_t rows, int32_t max_panel_bytes, int32_t max_tiles_multi_panel, int32_t num_stages) {
  const int32_t n_columns = rows <= 8 ? 8 : 16;
  SmemLayout at{};
  at.barriers = 0;
  at.row_state = at.barriers + 2 * kMaxStages * 8;
  at.zero_row = at.row_state + kRowStateBytes;
  at.scratch = at.zero_row + 128;
  at.accumulators = at.scratch + 2 * kNumConsumerWarps * n_columns * kScratchPitch * 4;
  at.panel = at.accumulators + max_tiles_multi_panel * n_columns * kTileRows * 4;
  at.ring = (at.panel + max_panel_bytes + 127) / 128 * 128;
  at.total_bytes = at.ring + num_stages * kStageBytes;
  return at;
}

struct DecodeStepParams {
  Geometry geometry;
  OpPlan ops[kNumOps];
  int32_t rows;                   // 1..kMaxRows
  int32_t num_stages;             // of the weight ring, 2..kMaxStages
  int32_t max_panel_bytes;        // of any op and of the attention merge
  int32_t max_tiles_multi_panel;  // accumulators kept across panels, see smem_layout
  SmemLayout shared;              // smem_layout of the four numbers above: offsets that cost the kernel no registers
  int32_t rank;                   // for the fault record
  uint64_t deadline_ns;           // of a wait for an edge; a wait for the ring lasts twice as long

  const LayerWeights* layers;  // [num_layers], device memory
  const KvLayer* kv;           // [num_layers], device memory
  const TileRange* tiles;      // [grid][kNumOps], device memory
  const bf16* embedding;       // [vocab, hidden]
  const bf16* final_norm;      // [hidden]
  const float* cos_sin;        // [max_position, head_dim]: cos half | sin half

  const int64_t* input_ids;         // [rows]
  const int64_t* positions;         // [rows]
  const int64_t* seq_lens;          // [rows], the new token included
  const int64_t* req_pool_indices;  // [rows]
  const int64_t* out_cache_loc;     // [rows] KV slot of the new token
  const int32_t* req_to_token;      // [num_request_rows, req_to_token_stride] KV slots

  bf16* residual;           // [rows, hidden]
  float* qkv;               // [rows, (num_q_heads + 2 * num_kv_heads) * head_dim]
  bf16* attention_out;      // [rows, num_q_heads * head_dim]
  bf16* activation;         // [rows, intermediate]
  // units = rows * num_kv_heads * head_subgroups; a step has at most grid + units attention items.
  float* partial_out;       // [grid + units, kMaxHeadsPerItem, head_dim] un-normalised split outputs
  float* partial_max_sum;   // [grid + units, kMaxHeadsPerItem, 2] running max (log2 units) and sum
  uint32_t* split_tickets;  // [units] splits that arrived, zero between layers
  bf16* hidden_out;         // [rows, hidden] after the final norm

  SyncState* sync;            // device memory
  FaultRecord* fault;         // host-visible
  uint64_t* executed_mirror;  // [kMaxRows + 1] host-visible copy of SyncState::executed
};

}  // namespace sgl_lowlatency::abi
