// The block's view of its shared memory and of the step's rows.
#pragma once
#include "sgl_lowlatency/stages/numbers.hpp"
#include "sgl_lowlatency/sync/wait_mbarrier.hpp"

namespace sgl_lowlatency::stages {

using abi::DecodeStepParams;

constexpr int32_t kConsumerThreads = abi::kNumConsumerWarps * 32;
constexpr int32_t kConsumerBarrier = 1;  // named barrier of the consumer warps; 0 is the whole block's

// Two floats that lie side by side in shared memory.
struct alignas(8) Float2 {
  float x;
  float y;
};

// One layer's pointers.
struct alignas(16) LayerTables {
  abi::LayerWeights weights;
  abi::KvLayer kv;
};

// One attention item: query heads of one KV head of consecutive rows of one request, over tokens [begin, end). It has a column of
// the MMA for each head of each row, kMaxHeadsPerItem at most: column c is head_begin + c % num_heads of row + c / num_heads.
struct AttentionItem {
  int32_t row;         // the first
  int32_t num_rows;
  int32_t kv_head;
  int32_t head_begin;  // first query head
  int32_t num_heads;
  int32_t begin;
  int32_t end;         // what the last row sees; in the last split, each row before it sees a token less
  int32_t split;       // index among the request's splits
  int32_t num_splits;
  int32_t first_slot;  // partial slot of split 0 of these rows and heads; split i is slot_stride further each
  int32_t slot_stride;
};
constexpr int32_t kKeptItems = 4;

// What a block knows of each row, read and checked once a launch, and what the phases keep of it.
struct Row {
  int32_t token;
  int32_t position;
  int32_t slot;  // KV slot of the new token
  float inverse_rms;
  // Of the request whose number this is, not the row's:
  int32_t length;   // tokens, all new ones included; 0 for a request without any
  int32_t request;  // row of req_to_token
};
static_assert(sizeof(Row) == abi::kRowBytes, "smem_layout reserves kRowBytes a row");

// What a block knows of a launch, and its rows, as many as the step has.
struct RowState {
  abi::TileRange tiles[abi::kNumMatrices];  // the block's tiles of each operation
  LayerTables tables[2];                  // of this layer and of the next one: layer % 2
  AttentionItem items[kKeptItems];        // the block's first attention items: they are the same in every layer
  int32_t num_items;                      // of the block
  int32_t first_generation;               // SyncState::first_generation
  int32_t used_bytes[abi::kGenerations];  // SyncState::used_bytes
  alignas(16) abi::LayerScales scales[2];  // as tables; of FP8 weights only
  Row row[abi::kMaxRows];
};
static_assert(offsetof(RowState, row) <= abi::kRowStateBytes, "smem_layout reserves kRowStateBytes beside the rows");

// The sections of the block's shared memory (abi::SmemLayout), addressed anew at each use: nothing to keep in registers.
struct Shared {
  const abi::SmemLayout& at;
  // Phase complete: the weights of the stage have landed.
  SGL_DEVICE uint64_t* full(int32_t stage) const { return reinterpret_cast<uint64_t*>(dialect::shared_base() + at.barriers) + stage; }
  // Phase complete: every consumer warp has read the stage.
  SGL_DEVICE uint64_t* empty(int32_t stage) const { return full(abi::kMaxStages + stage); }
  // Phase complete: every consumer warp has delivered its part of the tile in half `half` of scratch (run_tiles).
  SGL_DEVICE uint64_t* partials(uint32_t half) const { return full(2 * abi::kMaxStages) + half; }
  // MoE. Phase complete: the layer's routing is in `routing`.
  SGL_DEVICE uint64_t* routed() const { return full(2 * abi::kMaxStages) + 2; }
  SGL_DEVICE RowState* rows() const { return reinterpret_cast<RowState*>(dialect::shared_base() + at.row_state); }
  SGL_DEVICE char* zero_row() const { return dialect::shared_base() + at.zero_row; }
  SGL_DEVICE bf16* vectors() const { return reinterpret_cast<bf16*>(dialect::shared_base() + at.vectors); }
  SGL_DEVICE uint32_t* slots(int32_t warp, int32_t batch) const {
    return reinterpret_cast<uint32_t*>(dialect::shared_base() + at.slots) + (warp * 2 + batch) * abi::kWarpTokens;
  }
  SGL_DEVICE float* scratch() const { return reinterpret_cast<float*>(dialect::shared_base() + at.scratch); }
  SGL_DEVICE float* accumulators() const { return reinterpret_cast<float*>(dialect::shared_base() + at.accumulators); }
  SGL_DEVICE char* panel() const { return dialect::shared_base() + at.panel; }
  SGL_DEVICE char* stage(int32_t stage) const { return dialect::shared_base() + at.ring + stage * abi::kStageBytes; }
};

SGL_DEVICE sync::FaultSink fault_sink(const DecodeStepParams& p) { return {p.fault, p.rank, p.deadline_ns}; }

// kIsVerify: of the kernel's instance, rows_per_request may be more than 1. What it costs to tell the rows of a request apart folds
// away in the other one.
template <bool kIsVerify>
SGL_DEVICE int32_t rows_per_request(const DecodeStepParams& p) { return kIsVerify ? p.rows_per_request : 1; }
template <bool kIsVerify>
SGL_DEVICE int32_t request_of(const DecodeStepParams& p, int32_t row) { return row / rows_per_request<kIsVerify>(p); }

SGL_DEVICE void sync_consumers() { dialect::sync_named(kConsumerBarrier, kConsumerThreads); }

// Reads and checks one row's inputs, and with its first row a request's. Entry: one thread a row, before the block's first barrier.
// A value outside its range ends the launch with a record (row, limit, value): it would read or write foreign memory.
// A request shorter than the new tokens it should count has none, as graphs pad steps: nothing is written for it. num_tokens: ids of the vocabulary.
template <bool kIsVerify>
SGL_DEVICE void load_row(const DecodeStepParams& p, const Shared& s, int32_t row, int32_t num_tokens) {
  const sync::FaultSink sink = fault_sink(p);
  // The record's value is loaded once more: kept in registers for it, the values spilled.
  const auto checked = [&](const int64_t* at, int64_t limit, abi::FaultKind kind) {
    const int64_t value = dialect::load_constant(at);
    if (value < 0 || value >= limit) {
      const uint64_t bad = static_cast<uint64_t>(dialect::load_plain(at));
      sync::raise_fault(sink.record, sink.rank, kind, 0, row, static_cast<uint32_t>(limit), static_cast<uint32_t>(bad), bad);
    }
    return static_cast<int32_t>(value);
  };
  const abi::Geometry& g = p.geometry;
  s.rows()->row[row].token = checked(p.input_ids + row, num_tokens, abi::kFaultBadTokenId);
  s.rows()->row[row].position = checked(p.positions + row, g.max_position, abi::kFaultBadPosition);
  s.rows()->row[row].slot = checked(p.out_cache_loc + row, g.num_kv_slots, abi::kFaultBadSlot);
  const int32_t num_new = rows_per_request<kIsVerify>(p), request = request_of<kIsVerify>(p, row), uncounted = num_new - p.counted_tokens;
  if (row != request * num_new) return;
  const int32_t length = checked(p.seq_lens + request, static_cast<int64_t>(g.req_to_token_stride) + 1 - uncounted,
                                 abi::kFaultBadLength) + uncounted;
  s.rows()->row[request].length = length >= num_new ? length : 0;
  s.rows()->row[request].request = checked(p.req_pool_indices + request, g.num_request_rows, abi::kFaultBadRequestRow);
}

}  // namespace sgl_lowlatency::stages
