// Structs of the kernels `k1` and `k2`, a decoder layer in two launches, shared by host C++, HIP, the host dialect and (through the bindings) Python.
#pragma once
#include <cstddef>
#include <cstdint>

#include "sgl_lowlatency/abi/symmetric_workspace.hpp"

namespace sgl_lowlatency::abi {

enum Isa : int32_t { kGfx942 = 942, kGfx950 = 950 };

constexpr int32_t kMaxMonoRows = 16;    // rows of one step: the N of the MFMA
constexpr int32_t kWaveSize = 64;
constexpr int32_t kMonoWaves = 8;
constexpr int32_t kMonoThreads = kMonoWaves * kWaveSize;
constexpr int32_t kMfmaK = 32;          // K of one MFMA, and columns of a copied tile
constexpr int32_t kFragmentBytes = kTileRows * kMfmaK * 2;
constexpr int32_t kPartialPitch = 20;   // floats from one column of a partial tile to the next: vectors of four, few bank conflicts
constexpr int32_t kItemColumns = 16;    // query heads of rows that share an attention item: the N of the MFMA
constexpr int32_t kBatchTokens = 32;    // tokens that a wave attends to at a time: the K of the MFMA; items begin at a multiple of it
constexpr int32_t kMaxMonoExperts = 256;
constexpr int32_t kMaxMonoTopK = 16;
constexpr int32_t kMonoExchanges = 2;   // sums over ranks in a layer: of out_proj, of the MLP

SGL_ABI_FUNCTION int32_t lds_bytes(Isa isa) { return isa == kGfx950 ? 163840 : 65536; }

// Tiles of weights that a wave has in flight.
SGL_ABI_FUNCTION int32_t ring_slots(Isa isa) { return isa == kGfx950 ? 8 : 3; }

// Shared memory of a workgroup, byte offsets in this order. Ring and panel are cut in equal parts, one a wave; attention merges in both.
struct MonoSmem {
  int32_t ring;         // [kMonoWaves][ring_slots] of kFragmentBytes
  int32_t panel;        // [kMonoWaves][panel_wave_bytes]: a wave's columns of the activations, as the MFMA reads them
  int32_t panel_wave_bytes;
  int32_t partials;     // [kMonoWaves][kMaxMonoRows][kPartialPitch] float
  int32_t rows;         // MonoRows (stages/wave_rows.hpp), kMonoRowsBytes
  int32_t routing;      // kMonoRoutingBytes: a MoE layer's routing
  int32_t total_bytes;  // lds_bytes
};
constexpr int32_t kMonoRowsBytes = 2048;
constexpr int32_t kMonoRoutingBytes = 8192;

SGL_ABI_FUNCTION MonoSmem mono_smem(Isa isa) {
  MonoSmem at{};
  at.ring = 0;
  at.panel = at.ring + kMonoWaves * ring_slots(isa) * kFragmentBytes;
  at.total_bytes = lds_bytes(isa);
  at.routing = at.total_bytes - kMonoRoutingBytes;
  at.rows = at.routing - kMonoRowsBytes;
  at.partials = at.rows - kMonoWaves * kMaxMonoRows * kPartialPitch * 4;
  at.panel_wave_bytes = (at.partials - at.panel) / kMonoWaves / 1024 * 1024;
  return at;
}
static_assert(mono_smem(kGfx942).panel_wave_bytes >= kFragmentBytes, "a panel holds the columns of one MFMA of every row");

// Query heads of an attention item: all of a KV head's. Rows of a request that share one, so that K and V are read once for all of them.
SGL_ABI_FUNCTION int32_t mono_item_rows(const Geometry& g, int32_t rows_per_request) {
  const int32_t most = kItemColumns / (g.num_q_heads / g.num_kv_heads);
  return most < rows_per_request ? most : rows_per_request;
}
// Attention items of one split of a request.
SGL_ABI_FUNCTION int32_t mono_request_units(const Geometry& g, int32_t rows_per_request) {
  const int32_t most = mono_item_rows(g, rows_per_request);
  return g.num_kv_heads * ((rows_per_request + most - 1) / most);
}

// Hand-over words of a step of `rows` rows, in memory of steps of up to max_rows: byte offsets, multiples of 128. The words of k1 are cleared by the
// k2 behind it, those of k2 by the next k1, of whatever step: launches of one stream are ordered, and no fence is needed. So the two never overlap.
struct MonoHandover {
  int32_t qkv;              // k1: [rows, (num_q_heads + 2 * num_kv_heads) * head_dim] fp32
  int32_t qkv_bytes;        // of this step
  int32_t k2;               // what follows is k2's: the same in every step
  int32_t attention_out;    // [rows, num_q_heads * head_dim] bf16
  int32_t mid;              // [rows, hidden] bf16: the residual stream after attention
  int32_t logits;           // MoE: [rows, num_experts] bf16, the router's
  int32_t activation;       // [rows, intermediate] bf16; MoE: [rows * top_k, moe_intermediate], by pair
  int32_t partial_out;      // [items, kItemColumns, head_dim] fp32, un-normalised
  int32_t partial_max_sum;  // [items, kItemColumns, 2] fp32: running max (log2 units) and sum
  int32_t total_bytes;
};

SGL_ABI_FUNCTION MonoHandover mono_handover(const Geometry& g, int32_t rows, int32_t max_rows, int32_t grid, int32_t rows_per_request) {
  const int32_t items = grid + rows / rows_per_request * mono_request_units(g, rows_per_request);
  const auto after = [](int32_t begin, int32_t bytes) { return begin + (bytes + 127) / 128 * 128; };
  MonoHandover at{};
  at.qkv = 0;
  const int32_t row_bytes = (g.num_q_heads + 2 * g.num_kv_heads) * g.head_dim * 4;
  at.qkv_bytes = rows * row_bytes;
  at.k2 = after(at.qkv, max_rows * row_bytes);
  at.attention_out = at.k2;
  at.mid = after(at.attention_out, rows * g.num_q_heads * g.head_dim * 2);
  at.logits = after(at.mid, rows * g.hidden * 2);
  at.activation = after(at.logits, rows * g.num_experts * 2);
  at.partial_out = after(at.activation, rows * (g.num_experts > 0 ? g.top_k * g.moe_intermediate : g.intermediate) * 2);
  at.partial_max_sum = after(at.partial_out, items * kItemColumns * g.head_dim * 4);
  at.total_bytes = after(at.partial_max_sum, items * kItemColumns * 2 * 4);
  return at;
}

// State in device memory that outlives a launch, zero before the first one. Launches that share one run in turn.
struct MonoState {
  uint32_t exit_ticket[32];  // [0]: workgroups of a k2 that finished; the last one closes the launch
  int32_t used_bytes[32];    // [0], [1]: begin and end of the newest k2's hand-over words
  uint64_t executed[kMaxMonoRows + 1];  // completed steps by rows
  uint32_t pad[30];
};
static_assert(sizeof(MonoState) % 128 == 0, "counters keep their lines");

// What both launches of a layer are told. Geometry: the rank's share of heads and channels.
struct MonoLaunch {
  Geometry geometry;
  Isa isa;                   // what the host dialect imitates
  int32_t grid;              // workgroups, at most one a CU: all run at once
  int32_t rows;              // 1..kMaxMonoRows
  int32_t rows_per_request;  // 1 in decode; divides rows. Row r is new token r % rows_per_request of its request
  int32_t layer;             // for fault records, 0..65535
  int32_t rank;
  uint64_t deadline_ns;      // of a wait for another rank; a wait for another workgroup lasts twice as long, so that the rank is named first
  char* handover;            // all bits set before the first launch
  MonoHandover at;           // mono_handover of this step and symmetric.max_rows
  MonoState* state;          // device memory
  FaultRecord* fault;        // host-visible
  SymmetricLayout symmetric; // of num_ranks, the most rows, kMonoExchanges * hidden: exchange e has the tiles from e * hidden / kTileRows on
  char* workspaces[kMaxRanks];  // of every rank, as this device sees them
};

// k1: the stream that enters a layer, normed and projected; q, k and v with their norm and rope; k and v into the pool.
struct K1Params {
  MonoLaunch launch;
  const bf16* x;           // [rows, hidden]: what the layer before left, or the embedding
  const bf16* residual;    // [rows, hidden] to add to it, or null
  bf16* residual_out;      // [rows, hidden]: the sum, or null: x, where there is no residual
  const bf16* input_norm;  // [hidden]
  const bf16* qkv;         // [(num_q_heads + 2 * num_kv_heads) * head_dim, hidden], rows q | k | v
  const bf16* q_norm;      // [head_dim]
  const bf16* k_norm;      // [head_dim]
  const float* cos_sin;    // [max_position, head_dim]: cos half | sin half
  const int64_t* positions;      // [rows]
  const int64_t* out_cache_loc;  // [rows] KV slots of the new tokens
  bf16* k_pool;            // [slots, num_kv_heads, head_dim], slot stride in Geometry
  bf16* v_pool;
  bf16* q_out;             // [rows, num_q_heads, head_dim]
};

// k2: attention over the pool, output projection, sum over ranks, norm, MLP, sum over ranks.
struct K2Params {
  MonoLaunch launch;
  const bf16* q;           // [rows, num_q_heads, head_dim], k1's
  const bf16* k_pool;
  const bf16* v_pool;
  const int64_t* seq_lens;          // [rows / rows_per_request]: tokens of a request, counted_tokens of this step's among them
  const int64_t* req_pool_indices;  // [rows / rows_per_request]
  const int32_t* req_to_token;      // [num_request_rows, req_to_token_stride] KV slots
  const bf16* out_proj;    // [hidden, num_q_heads * head_dim]
  const bf16* post_norm;   // [hidden]
  const bf16* router;      // MoE: [num_experts, hidden], else null
  const bf16* gate_up;     // [2 * intermediate, hidden], rows gate | up; MoE: [num_experts, 2 * moe_intermediate, hidden]
  const bf16* down;        // [hidden, intermediate]; MoE: [num_experts, hidden, moe_intermediate]
  const bf16* residual;    // [rows, hidden], k1's
  bf16* residual_out;      // [rows, hidden]: with attention's output
  bf16* x_out;             // [rows, hidden]: the MLP's output; may be k1's x
  uint64_t* executed_mirror;  // [kMaxMonoRows + 1] host-visible copy of MonoState::executed
  int32_t counted_tokens;  // of a request's new tokens, how many seq_lens counts: all, or 0 where it has older ones only
  int32_t ends_step;       // 1: the last layer's: the step is counted
  int32_t* routed_ids;     // MoE: [rows, top_k], the experts of each row, by rank; for whoever checks or counts, or null
  bf16* routed_logits;     // MoE: [rows, num_experts], what was ranked; or null
};
static_assert(sizeof(K1Params) <= 4096 && sizeof(K2Params) <= 4096, "kernel parameters");

}  // namespace sgl_lowlatency::abi
