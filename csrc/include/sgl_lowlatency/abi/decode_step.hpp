// Structs of the `decode_step` kernel, shared by host C++, CUDA, the host dialect and (through the bindings) Python.
// They exist here once: Python reads the fields that csrc/bindings exports and never restates sizes or offsets.
#pragma once
#include <cstddef>
#include <cstdint>

#include "sgl_lowlatency/abi/abi_function.hpp"
#include "sgl_lowlatency/abi/routing_layout.hpp"

namespace sgl_lowlatency::abi {

// How weight matrices lie in memory. A matrix [N, K] is its elements times, for FP8, their scales, fp32.
enum WeightFormat : int32_t {
  kWeightsBf16 = 0,
  kWeightsFp8Block = 1,    // e4m3fn, a scale a block of 128 x 128: [N / 128, K / 128]
  kWeightsFp8Channel = 2,  // e4m3fn, a scale a row: [N]
  kNumWeightFormats = 3
};

// bf16 as it lies in memory. Arithmetic happens in float (dialect::to_float, dialect::to_bf16).
struct bf16 {
  uint16_t bits;
};
static_assert(sizeof(bf16) == 2, "bf16 tensors are read in place");

constexpr int32_t kMaxRows = 32;                        // rows of one step: four N tiles of the m16n8k16 MMA
constexpr int32_t kTileRows = 16;                       // output rows of one weight tile: the M of the MMA
constexpr int32_t kMaxHeadsPerItem = 8;                 // columns of one attention item, each a query head of a row: the N of the MMA
constexpr int32_t kMinItemTokens = 64;                  // least tokens of an item of a sequence that has them
constexpr int32_t kWarpTokens = 16;                     // tokens that one warp attends to at a time: the M of the MMA
constexpr int32_t kItemTokenMultiple = kWarpTokens;     // an item begins at a multiple of this
constexpr int32_t kNumConsumerWarps = 8;
constexpr int32_t kNumProducerWarps = 1;
constexpr int32_t kNumThreads = (kNumConsumerWarps + kNumProducerWarps) * 32;  // consumers first
constexpr int32_t kStageBytes = 16384;                  // of one ring stage: kTileRows rows by stage_k columns
constexpr int32_t kMaxStages = 16;
constexpr int32_t kMaxStagesInFlight = 4;               // stages of a block requested and not yet landed
constexpr int32_t kMaxStagesInFlightAhead = 2;          // the same for a ring's worth of stages at the begin of an operation (produce_weights)
constexpr int32_t kRowStateBytes = 512;                 // of RowState, without what it has a row
constexpr int32_t kRowBytes = 24;
constexpr int32_t kPanelPadBytes = 16;                  // padding of one activation-panel row, for ldmatrix as well
constexpr int32_t kScratchPitch = 18;                   // floats from one column of a partial tile to the next: even, for pairs; few bank conflicts
constexpr int32_t kMergePadFloats = 4;                  // padding of one head in the attention merge: no bank conflicts
constexpr uint32_t kUnwritten = 0xffffffffu;            // a hand-over word nobody has written: a NaN that no arithmetic gives (publish turns a copied one into another)
constexpr int32_t kGenerations = 8;                     // copies of the hand-over buffers; consecutive layers take them in turn
constexpr int32_t kPaddingSlot = 0;                     // KV slot of the rows that pad a step to its graph's width: SGLang's pool gives it to no token
constexpr int32_t kClearAhead = 4;                      // layer l clears the generation of layer l + kClearAhead

constexpr int32_t kScaleBlock = 128;                    // rows and columns of a block that has one scale; the K of a warp's chunk in FP8
constexpr int32_t kMaxScaledPanelK = 32 * kStageBytes / kTileRows;  // largest panel of FP8: a warp keeps a scale a lane, one for every stage

SGL_ABI_FUNCTION int32_t element_bytes(WeightFormat format) { return format == kWeightsBf16 ? 2 : 1; }
// K elements of one ring stage: 512 of bf16, 1024 of FP8.
SGL_ABI_FUNCTION int32_t stage_k(int32_t element_bytes) { return kStageBytes / kTileRows / element_bytes; }

// The four weight matrices of a layer, in execution order, and the LM head, which follows the last layer in a step that has logits.
// A MoE layer has a router between out_proj and gate_up, and in those two the matrices of all its experts.
enum OpIdx : int32_t { kOpQkv = 0, kOpOutProj = 1, kOpGateUp = 2, kOpDown = 3, kNumOps = 4, kOpHead = kNumOps, kOpRouter = 5 };
constexpr int32_t kNumMatrices = kOpRouter + 1;  // that a block may own tiles of
constexpr int32_t kNumMoeMaps = kNumOps + 1;     // WeightMaps of a MoE layer, in execution order: qkv, out_proj, router, gate_up, down

// What a layer hands from block to block: words in a hand-over buffer (HandoverLayout), each its own flag (sync/handover.hpp).
enum EdgeIdx : int32_t {
  kEdgeQkv = 0,        // q, k and v before norm and rope    -> attention
  kEdgePartial = 1,    // un-normalised outputs of splits    -> attention, the splits of the same row and heads
  kEdgeAttention = 2,  // attention output                   -> out_proj
  kEdgeOutProj = 3,    // residual after attention           -> gate_up (MoE: router), down
  kEdgeGateUp = 4,     // SwiGLU activations                 -> down
  kEdgeDown = 5,       // residual after the MLP             -> next layer's qkv and out_proj, final norm, LM head; also the embedding
  kEdgeRouter = 6,     // MoE: router logits                 -> every block's routing
  kNumEdges = 7
};

// The four weight matrices of a layer in SGLang's own tensors, of one WeightFormat, row-major, contiguous, are read through WeightMaps
// (abi/weight_map.hpp) in the order of OpIdx:
//   qkv [(num_q_heads + 2 * num_kv_heads) * head_dim, hidden], rows q | k | v;  out_proj [hidden, num_q_heads * head_dim];
//   gate_up [2 * intermediate, hidden], rows gate | up, two parts;  down [hidden, intermediate]
// Of a MoE layer: router [num_experts, hidden], bf16 always;  gate_up [num_experts * 2 * moe_intermediate, hidden], of every expert rows gate | up, two
// parts each;  down [num_experts * hidden, moe_intermediate].
// The LM head is [vocab or more, hidden] bf16, whatever the layers' format; rows beyond vocab are read and dropped.
struct WeightMap;

// What else a layer has: vectors of bf16, and where the stream that enters it goes.
struct LayerWeights {
  const bf16* input_norm;  // [hidden]
  const bf16* qkv_bias;    // [(num_q_heads + 2 * num_kv_heads) * head_dim], or null: no bias
  const bf16* q_norm;      // [head_dim], or null: q is not normalised
  const bf16* k_norm;      // [head_dim], or null: k is not normalised
  const bf16* post_norm;   // [hidden]
  int64_t aux_column;      // first column of DecodeStepParams::aux_out that keeps the stream which enters the layer, or -1: it is not captured
};
static_assert(sizeof(LayerWeights) % 16 == 0, "entries are copied in units of 16 bytes");

// The scales of a layer's FP8 matrices, as WeightFormat says, in the order of OpIdx; of the experts' matrices in blocks, one expert's after the other's.
struct LayerScales {
  const float* of[kNumOps];
};
static_assert(sizeof(LayerScales) % 16 == 0, "entries are copied in units of 16 bytes");

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
  int32_t num_experts;       // 0: dense layers, and the rest is 0; else MoE layers, and `intermediate` is nobody's
  int32_t top_k;             // experts of a row
  int32_t moe_intermediate;  // channels of an expert
  int32_t norm_topk_prob;    // 1: a row's weights are divided by their sum
};

struct OpPlan {
  int32_t k_extent;   // K of the matrix
  int32_t k_panel;    // K elements of activations in shared memory at a time, a multiple of stage_k or all of K
  int32_t num_tiles;  // tiles of kTileRows output rows; gate_up: 8 gate rows and their 8 up rows
};  // Of a MoE layer, gate_up: of one expert; down: k_extent is one expert's.

struct TileRange {
  int32_t begin;
  int32_t count;
};

// A block's share of `total` tiles whose number is known on the device only: floor or ceil of the mean, contiguous, all of them once.
// total * grid < 2^32 (check_moe): divisions of 64 bits are calls.
SGL_ABI_FUNCTION TileRange even_share(int32_t total, int32_t block, int32_t grid) {
  const uint32_t tiles = static_cast<uint32_t>(total), blocks = static_cast<uint32_t>(grid), number = static_cast<uint32_t>(block);
  const int32_t begin = static_cast<int32_t>(tiles * number / blocks);
  return {begin, static_cast<int32_t>(tiles * (number + 1) / blocks) - begin};
}

// Why a kernel ended itself.
enum FaultKind : uint32_t {
  kFaultNone = 0,
  kFaultEdgeDeadline = 1,   // a word of a hand-over buffer was not written in time
  kFaultRingFull = 2,       // a consumer or the producer waited too long for a stage's weights to land
  kFaultRingEmpty = 3,      // the producer waited too long for the consumers to free a stage
  kFaultBadTokenId = 4,     // input id outside [0, vocab)
  kFaultBadPosition = 5,    // position outside [0, max_position)
  kFaultBadLength = 6,      // sequence length that with the step's new tokens is above req_to_token_stride
  kFaultBadRequestRow = 7,  // request row outside req_to_token
  kFaultBadSlot = 8,        // KV slot outside the pool
  kFaultBadExpertId = 9,    // expert id outside [-1, num_experts)
  kFaultPartial = 10,       // a consumer warp waited too long for another one's part of a tile
  kFaultRouting = 11,       // the producer waited too long for the block's routing of a layer
  kFaultCandidate = 12,     // draft_sampler: a block, of this rank or of another, did not hand over its candidate in time
  kFaultPeerTile = 13,      // another rank's partial sum of a tile was not there in time; the abort word of every rank is raised
  kFaultPeerAbort = 14,     // another rank has raised this rank's abort word, while it waited itself for what the record names, or for nothing
};

// Written once, by the first thread whose wait outlived the deadline or that met invalid input. Host-visible memory.
struct FaultRecord {
  uint32_t state;  // 0 empty, 1 claimed, 2 complete: stored last, with system-scope release
  uint32_t kind;   // FaultKind
  int32_t rank;
  int32_t sm;
  int32_t block;
  int32_t layer;       // 0 for inputs that are checked before the first layer; num_layers for the ring stages of the LM head; a draft's step
  int32_t edge;        // EdgeIdx; the ring stage; the operation for kFaultPartial; the row for kFaultBad* (of what a request has, its first row);
                       // the request for kFaultCandidate; the rank that was waited for, for kFaultPeer*; -1: none
  uint32_t expected;   // the word's index in its buffer; the awaited phase parity; the value's exclusive limit for kFaultBad*; blocks of a rank for
                       // kFaultCandidate; phased_tile for kFaultPeer*
  uint32_t seen;       // the word; the other parity; its low 32 bits; for kFaultCandidate rank * blocks of a rank + block, of the one that is missed;
                       // the rank that gave up for kFaultPeer*
  uint32_t host_ack;   // the host sets 1 when it has read the record; the kernel then traps
  uint64_t waited_ns;  // for kFaultBad* the value itself, int64; for kFaultPeerAbort the abort word
  uint64_t group;      // address of a PeerGroup, or 0: this launch has no other ranks. Set by the host before the first launch
};
static_assert(sizeof(FaultRecord) == 56 && offsetof(FaultRecord, waited_ns) == 40, "read by the host while the kernel runs");

// State in device memory that outlives a launch, zero before the first one. Launches that share one run in turn.
struct SyncState {
  uint32_t exit_ticket[32];         // [0]: blocks that finished; the last one closes the launch
  int32_t first_generation[32];     // [0]: generation of the next launch's embedding, its layer -1
  int32_t used_bytes[32];           // [kGenerations]: of a generation, from its begin, that are not known to be clear
  uint64_t executed[kMaxRows + 1];  // completed launches by rows
  uint32_t pad[30];
};
static_assert(sizeof(SyncState) % 128 == 0, "counters keep their lines");

// The residual stream x as it is handed over, three tensors one after the other. offsets: bytes from their begin.
struct StreamLayout {
  int32_t x;        // [rows, hidden] bf16
  int32_t scaled;   // [rows, hidden] bf16: x * weight of the norm that follows; x / rms(x) * weight is this times 1 / rms(x)
  int32_t squares;  // [rows, hidden / kTileRows] fp32: sums of the squares of x, one a tile
  int32_t total_bytes;
};

// One generation of the hand-over buffers of a step of `rows` rows: byte offsets, multiples of 128.
// items: attention items of a step, at most grid + requests * request_units; columns: item_columns.
struct HandoverLayout {
  int32_t qkv;              // [rows, (num_q_heads + 2 * num_kv_heads) * head_dim] fp32
  int32_t attention_out;    // [rows, num_q_heads * head_dim] bf16
  int32_t mid;              // the residual stream after attention, see StreamLayout
  int32_t activation;       // [rows, intermediate] bf16; MoE: [rows * top_k, moe_intermediate], by pair (MoeLayout)
  int32_t end;              // the residual stream after the MLP, or the embedding, see StreamLayout
  int32_t partial_out;      // [items, columns, head_dim] fp32, un-normalised, in the order of element_at (stages/attention_merge.hpp)
  int32_t partial_max_sum;  // [items, columns, 2] fp32: running max (log2 units) and sum
  int32_t total_bytes;      // a MoE layer's router logits end there: router_logits_at
};

// Dynamic shared memory of one block, in this order.
struct SmemLayout {
  int32_t barriers;      // full[kMaxStages], empty[kMaxStages], partials[2], routed as uint64_t
  int32_t row_state;     // RowState (stages/row_state.hpp), kRowStateBytes and kRowBytes a row
  int32_t zero_row;      // 16 zero bytes (128 reserved): the B rows beyond `rows`
  int32_t vectors;       // [kMaxHeadsPerItem + 2][head_dim] bf16: an attention item's q, k and v, kVectorBytes
  int32_t slots;         // [kNumConsumerWarps][2][kWarpTokens] int32: KV slots of the warps' first two batches of the first item
  int32_t scratch;       // [2][kNumConsumerWarps][rows][kScratchPitch] float: cross-warp partial tiles; new_vector in attention
  int32_t accumulators;  // [max_tiles_multi_panel][rows * kTileRows] float; empty when every op has one panel
  int32_t panel;         // max_panel_bytes: [rows] of panel_row_bytes(k_panel); or attention_panel_bytes; or of panel_pairs pairs, an expert's
                         // activations. In front of it, up to its begin, a MoE step has its MoeLayout
  int32_t ring;          // [num_stages] of kStageBytes, at a multiple of 1024 (abi/weight_map.hpp)
  int32_t total_bytes;
};

// Bytes of one row of an activation panel of k_panel bf16.
SGL_ABI_FUNCTION int32_t panel_row_bytes(int32_t k_panel) { return k_panel * 2 + kPanelPadBytes; }

// Tiles of one block that are walked panel by panel at a time: all that it has, but of the LM head, which may have more than there
// are accumulators, no more than those when K is in several panels.
SGL_ABI_FUNCTION int32_t tiles_at_once(int32_t op, const OpPlan& plan, int32_t num_tiles, int32_t max_tiles_multi_panel) {
  return op == kOpHead && plan.k_panel < plan.k_extent && max_tiles_multi_panel < num_tiles ? max_tiles_multi_panel : num_tiles;
}

// Attention items that share one kv head, because an item holds at most kMaxHeadsPerItem query heads.
SGL_ABI_FUNCTION int32_t head_subgroups(int32_t num_q_heads, int32_t num_kv_heads) {
  return (num_q_heads / num_kv_heads + kMaxHeadsPerItem - 1) / kMaxHeadsPerItem;
}

// Most query heads of one attention item.
SGL_ABI_FUNCTION int32_t item_heads(const Geometry& g) {
  const int32_t group = g.num_q_heads / g.num_kv_heads;
  return group < kMaxHeadsPerItem ? group : kMaxHeadsPerItem;
}

// Rows of one request that share an attention item, so that its K and V are read once for all of them. rows_per_request: the rows
// of each request of the step, consecutive; 1 in decode.
SGL_ABI_FUNCTION int32_t item_rows(const Geometry& g, int32_t rows_per_request) {
  const int32_t most = kMaxHeadsPerItem / item_heads(g);
  return most < rows_per_request ? most : rows_per_request;
}

// Most columns of one attention item.
SGL_ABI_FUNCTION int32_t item_columns(const Geometry& g, int32_t rows_per_request) { return item_rows(g, rows_per_request) * item_heads(g); }

// Attention items of one split of a request.
SGL_ABI_FUNCTION int32_t request_units(const Geometry& g, int32_t rows_per_request) {
  const int32_t most = item_rows(g, rows_per_request);
  return g.num_kv_heads * head_subgroups(g.num_q_heads, g.num_kv_heads) * ((rows_per_request + most - 1) / most);
}

// Bytes of one warp's share of the panel in the attention phase: kWarpTokens rows of K and of V, later its merge area, every head an
// output, a maximum and a sum in fp32.
SGL_ABI_FUNCTION int32_t attention_warp_bytes(int32_t head_dim) {
  const int32_t merge = kMaxHeadsPerItem * (head_dim + kMergePadFloats + 2) * 4, stage = 2 * kWarpTokens * head_dim * 2;
  return merge > stage ? merge : stage;
}
SGL_ABI_FUNCTION int32_t attention_panel_bytes(int32_t head_dim) { return kNumConsumerWarps * attention_warp_bytes(head_dim); }

constexpr int32_t kMaxHeadDim = 128;
constexpr int32_t kVectorBytes = (kMaxHeadsPerItem + 2) * kMaxHeadDim * 2;

SGL_ABI_FUNCTION StreamLayout stream_layout(const Geometry& g, int32_t rows) {
  StreamLayout at{};
  at.x = 0;
  at.scaled = rows * g.hidden * 2;
  at.squares = 2 * at.scaled;
  at.total_bytes = at.squares + rows * (g.hidden / kTileRows) * 4;
  return at;
}

SGL_ABI_FUNCTION HandoverLayout handover_layout(const Geometry& g, int32_t rows, int32_t grid, int32_t rows_per_request) {
  const int32_t columns = item_columns(g, rows_per_request);
  const int32_t items = grid + rows / rows_per_request * request_units(g, rows_per_request);
  HandoverLayout at{};
  const auto after = [](int32_t begin, int32_t bytes) { return begin + (bytes + 127) / 128 * 128; };
  at.qkv = 0;
  at.attention_out = after(at.qkv, rows * (g.num_q_heads + 2 * g.num_kv_heads) * g.head_dim * 4);
  at.mid = after(at.attention_out, rows * g.num_q_heads * g.head_dim * 2);
  at.activation = after(at.mid, stream_layout(g, rows).total_bytes);
  at.end = after(at.activation, rows * (g.num_experts > 0 ? g.top_k * g.moe_intermediate : g.intermediate) * 2);
  at.partial_out = after(at.end, stream_layout(g, rows).total_bytes);
  at.partial_max_sum = after(at.partial_out, items * columns * g.head_dim * 4);
  at.total_bytes = after(at.partial_max_sum, items * columns * 2 * 4);
  at.total_bytes = after(at.total_bytes, rows * g.num_experts * 2);
  return at;
}

// Of a MoE layer, [rows, num_experts] bf16: byte offset of the router's logits in a generation, a multiple of 128.
SGL_ABI_FUNCTION int32_t router_logits_at(const Geometry& g, const HandoverLayout& at, int32_t rows) {
  return at.total_bytes - (rows * g.num_experts * 2 + 127) / 128 * 128;
}

// max_tiles_multi_panel: most tiles of one block in an op with several panels. routing_bytes: of MoeLayout, 0 in a dense step.
SGL_ABI_FUNCTION SmemLayout smem_layout(int32_t rows, int32_t max_panel_bytes, int32_t max_tiles_multi_panel, int32_t num_stages,
                                        int32_t routing_bytes) {
  SmemLayout at{};
  at.barriers = 0;
  at.row_state = at.barriers + ((2 * kMaxStages + 3) * 8 + 127) / 128 * 128;
  at.zero_row = at.row_state + (kRowStateBytes + rows * kRowBytes + 127) / 128 * 128;
  at.vectors = at.zero_row + 128;
  at.slots = at.vectors + kVectorBytes;
  at.scratch = at.slots + kNumConsumerWarps * 2 * kWarpTokens * 4;
  at.accumulators = at.scratch + 2 * kNumConsumerWarps * rows * kScratchPitch * 4;
  at.panel = (at.accumulators + max_tiles_multi_panel * rows * kTileRows * 4 + routing_bytes + 127) / 128 * 128;
  at.ring = (at.panel + max_panel_bytes + 1023) / 1024 * 1024;
  at.total_bytes = at.ring + num_stages * kStageBytes;
  return at;
}

struct DecodeStepParams {
  Geometry geometry;
  OpPlan ops[kNumMatrices];       // the LM head's: no tiles, no head
  int32_t reserved;               // 0. What follows keeps its place modulo 16 bytes: dense instances take more registers otherwise, and spill
  int32_t rows;                   // 1..kMaxRows
  int32_t num_stages;             // of the weight ring, 2..kMaxStages
  int32_t max_panel_bytes;        // of any op and of attention
  int32_t max_tiles_multi_panel;  // accumulators kept across panels, see smem_layout
  SmemLayout shared;              // smem_layout of rows, the three numbers above and moe.total_bytes: offsets that cost the kernel no registers
  int32_t rank;                   // for the fault record
  WeightFormat weights;           // of every matrix but the LM head
  uint64_t deadline_ns;           // of a wait for an edge; a wait for the ring lasts twice as long

  const LayerWeights* layers;  // [num_layers], device memory
  const WeightMap* maps;       // [num_layers][kNumOps], of MoE layers [kNumMoeMaps], then the LM head's where there is one, device memory
  const LayerScales* scales;   // [num_layers], device memory; null for bf16 weights
  const KvLayer* kv;           // [num_layers], device memory
  const TileRange* tiles;      // [grid][kNumMatrices], device memory
  const bf16* embedding;       // [vocab, hidden]
  const bf16* final_norm;      // [hidden]
  const float* cos_sin;        // [max_position, head_dim]: cos half | sin half

  const int64_t* input_ids;         // [rows]
  const int64_t* positions;         // [rows]
  const int64_t* seq_lens;          // [rows / rows_per_request]: tokens of a request, counted_tokens of this step's among them
  const int64_t* req_pool_indices;  // [rows / rows_per_request]
  const int64_t* out_cache_loc;     // [rows] KV slot of the new token
  const int32_t* req_to_token;      // [num_request_rows, req_to_token_stride] KV slots

  char* handover;            // [kGenerations] of generation_bytes, all bits set before the first launch
  int64_t generation_bytes;  // from one generation to the next: handover_layout of the most rows that share it
  HandoverLayout at;         // handover_layout of this step
  StreamLayout stream;       // stream_layout of this step
  bf16* hidden_out;          // [rows, hidden] after the final norm
  float* logits;             // [rows, vocab], rounded to bf16; null: this launch ends without the LM head

  SyncState* sync;            // device memory
  FaultRecord* fault;         // host-visible
  uint64_t* executed_mirror;  // [kMaxRows + 1] host-visible copy of SyncState::executed

  // Row r is token r % rows_per_request of request r / rows_per_request's new ones: it sees the request's older tokens, the new ones
  // before its own, and its own.
  int32_t rows_per_request;  // 1 in decode; divides rows
  int32_t counted_tokens;    // of a request's new tokens, how many seq_lens counts: all of them, or 0 where it has older ones only

  // The auxiliary hidden states: of every captured layer the residual stream that enters it, bf16, in the columns that
  // LayerWeights::aux_column says. Of layer 0 that is the embedding; what leaves the last layer is not among them.
  bf16* aux_out;        // [rows, aux_columns], or null: the step captures nothing
  int32_t aux_columns;  // captured layers * hidden

  MoeLayout moe;        // moe_layout of rows, num_experts and top_k; zeros in a dense step
  int32_t panel_pairs;  // MoE: pairs whose activations are in the panel of `down` at a time, rows or more

  // MoE: what the step routed, for whoever checks or counts it; both null: nobody does.
  int32_t* routed_ids;   // [num_layers, rows, top_k]: the experts of each row, by rank
  bf16* routed_logits;   // [num_layers, rows, num_experts]: what was ranked
};

}  // namespace sgl_lowlatency::abi
