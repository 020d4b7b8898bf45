// Structs of the `draft_sampler` kernel, shared by host C++, CUDA, the host dialect and (through the bindings) Python.
#pragma once
#include <cstddef>
#include <cstdint>

#include "sgl_lowlatency/abi/decode_step.hpp"

namespace sgl_lowlatency::abi {

constexpr int32_t kMarkovRank = 256;      // K of the Markov product
constexpr int32_t kMaxDraftBatch = 16;    // requests of one launch
constexpr int32_t kMaxDraftRows = 80;     // rows of one launch: requests times gamma
constexpr int32_t kMaxGamma = 16;
constexpr int32_t kMaxDraftRanks = 8;
constexpr int32_t kUnitColumns = 2 * kTileRows;  // of the vocabulary: two tiles of the LM head, one ring stage of markov_w2
constexpr int32_t kDraftPairs = kNumConsumerWarps / 2;  // pairs of consumer warps; a pair has tiles and units of its own
constexpr int32_t kPairStages = 2;                      // ring stages of one pair
constexpr int32_t kDraftStages = kDraftPairs * kPairStages;
constexpr int32_t kExchangeTiles = 2;  // N tiles that a pair adds up at a time
constexpr int32_t kLatentPitch = kMarkovRank * 2 + kPanelPadBytes;  // bytes of one row of the latents
constexpr int32_t kCandidateWords = 2;                               // of one candidate: key (ordered_key), token id

// N tiles of the LM head's MMA for so many rows: one of those that instances have.
SGL_ABI_FUNCTION int32_t draft_row_tiles(int32_t rows) {
  return rows <= 8 ? 1 : rows <= 16 ? 2 : rows <= 24 ? 3 : rows <= 40 ? 5 : kMaxDraftRows / 8;
}

// Tiles of the LM head whose sums a pair has registers for, of so many N tiles.
SGL_ABI_FUNCTION int32_t most_tiles_at_once(int32_t row_tiles) { return row_tiles < 5 ? 4 : row_tiles == 5 ? 2 : 1; }

enum StepLogitsType : int32_t { kStepLogitsFloat32 = 0, kStepLogitsBf16 = 1, kNumStepLogitsTypes = 2 };

// State of a rank in device memory that outlives a launch, zero before the first one.
struct DraftState {
  uint32_t exit_ticket[32];  // [0]: blocks that finished; the last one closes the launch
  uint32_t launches[32];     // [0]: launches that are over
};
static_assert(sizeof(DraftState) == 256, "counters keep their lines");

// What a rank lets the others reach. Of a rank in another process: mapped memory.
struct DraftPeer {
  uint32_t* mailbox;  // two generations of mailbox_words, all bits set before the first launch; [generation][step][request][sender] Candidate
  void* step_logits;  // [max_batch, gamma, vocab] of step_logits_type, or null: nobody samples
};

// What only the rank itself touches.
struct DraftRank {
  const WeightMap* maps;   // [2], device memory: of the LM head's rows, of markov_w2's rows, two of them a row of the map
  int32_t vocab_begin;     // first token id of the rank, a multiple of 4
  int32_t vocab_count;     // token ids of the rank, even; the rest of its columns are padding
  int32_t num_head_tiles;  // of kTileRows rows, in the rank's part of the LM head
  int32_t num_units;       // of kUnitColumns columns: those that hold vocab_count
  bf16* base_logits;       // [rows, num_units * kUnitColumns]
  int64_t* draft_tokens;   // [batch, gamma]
  int64_t* noise_offset;   // [1]
  DraftState* state;
};

// Dynamic shared memory of one block, in this order.
struct DraftSmem {
  int32_t barriers;     // full[kDraftStages], empty[kDraftStages] as uint64_t
  int32_t zero_row;     // 128 zero bytes: the B rows beyond `rows`
  int32_t block_state;  // DraftBlockState (stages/draft_state.hpp)
  int32_t exchange;     // [2][kDraftPairs][kExchangeTiles * 4][32] float: what a pair adds up
  int32_t panel;        // [rows + 1] of panel_row_bytes(k_panel): x, and in the last row the norm. Behind the LM head: noise [batch][max_units *
                        // kUnitColumns] float, then latents [kMaxDraftBatch] of kLatentPitch
  int32_t latents;
  int32_t ring;         // [kDraftStages] of kStageBytes, at a multiple of 1024
  int32_t total_bytes;
};

constexpr int32_t kDraftBlockStateBytes = 2048;

// Most units of one block.
SGL_ABI_FUNCTION int32_t draft_max_units(int32_t num_units, int32_t blocks) { return (num_units + blocks - 1) / blocks; }

SGL_ABI_FUNCTION DraftSmem draft_smem(int32_t rows, int32_t batch, int32_t k_panel, int32_t max_units) {
  DraftSmem at{};
  at.barriers = 0;
  at.zero_row = 2 * kDraftStages * 8;
  at.block_state = at.zero_row + 128;
  at.exchange = at.block_state + kDraftBlockStateBytes;
  at.panel = at.exchange + 2 * kDraftPairs * kExchangeTiles * 4 * 32 * 4;
  at.latents = at.panel + batch * max_units * kUnitColumns * 4;
  const int32_t panel_end = at.panel + (rows + 1) * panel_row_bytes(k_panel), latents_end = at.latents + kMaxDraftBatch * kLatentPitch;
  at.ring = ((panel_end > latents_end ? panel_end : latents_end) + 1023) / 1024 * 1024;
  at.total_bytes = at.ring + kDraftStages * kStageBytes;
  return at;
}

// Words of one generation of a mailbox, a multiple of 4. senders: the blocks of all ranks, of which every rank has as many.
SGL_ABI_FUNCTION int32_t mailbox_words(int32_t gamma, int32_t max_batch, int32_t senders) {
  return (gamma * max_batch * senders * kCandidateWords + 3) / 4 * 4;
}

// The memory of a rank in a process of its own, which the others map: byte offsets from its begin, multiples of 128.
struct DraftLayout {
  int64_t rendezvous;   // Rendezvous (abi/symmetric_workspace.hpp)
  int64_t step_logits;  // DraftPeer's; nothing of a greedy draft. Zero before the first launch, as all in front of the mailbox
  int64_t mailbox;      // DraftPeer's
  int64_t total_bytes;
};

SGL_ABI_FUNCTION DraftLayout draft_layout(int32_t gamma, int32_t max_batch, int32_t senders, int64_t step_logits_bytes) {
  DraftLayout at{};
  at.step_logits = 128;
  at.mailbox = at.step_logits + (step_logits_bytes + 127) / 128 * 128;
  at.total_bytes = at.mailbox + (2ll * 4 * mailbox_words(gamma, max_batch, senders) + 127) / 128 * 128;
  return at;
}

struct DraftSamplerParams {
  int32_t batch;      // requests, 1..max_batch
  int32_t gamma;      // tokens drafted a request, 1..kMaxGamma; batch * gamma <= kMaxDraftRows
  int32_t max_batch;  // what mailboxes and step_logits were sized for, 1..kMaxDraftBatch
  int32_t hidden;     // a multiple of 64
  int32_t k_panel;    // columns of activations in shared memory at a time: all of hidden, or a multiple of stage_k(2)
  int32_t tiles_at_once;  // of a pair in one walk through K: 1, or most_tiles_at_once. Of a K in several panels each is loaded once a walk
  int32_t vocab;      // token ids of all ranks, even
  int32_t has_norm;   // 1: hidden_states are normed first
  float rms_eps;
  int32_t greedy;     // 1: every request takes the arg-max, whatever its temperature, and noise_offset stays
  StepLogitsType step_logits_type;  // bf16: base logits plus bias are rounded to it before anything else
  int32_t rounds_bias;    // 1: the bias is rounded to bf16, as products of SGLang's are; 0: it stays fp32, as in its fused greedy step
  int32_t anchor_stride;  // elements from one request's anchor token to the next one's

  int32_t num_ranks;        // 1..kMaxDraftRanks
  int32_t num_local_ranks;  // that this launch runs: 1, or several virtual ones, each of grid / num_local_ranks blocks
  int32_t first_rank;       // of these
  int32_t max_units;        // of one block of any local rank
  DraftSmem shared;         // draft_smem of rows, batch, k_panel and max_units
  uint64_t deadline_ns;     // of a wait for another block or rank; a wait for the ring lasts twice as long

  const bf16* hidden_states;        // [batch * gamma, hidden], row r: step r % gamma of request r / gamma
  const bf16* norm;                 // [hidden], or null without has_norm
  const int64_t* anchor_tokens;     // [batch], anchor_stride apart
  const float* step_temperatures;   // [batch], 0: arg-max
  const bf16* markov_w1;            // [vocab, kMarkovRank]
  uint64_t noise_key;
  FaultRecord* fault;  // host-visible
  DraftRank ranks[kMaxDraftRanks];  // of the local ranks, from 0 on
  DraftPeer peers[kMaxDraftRanks];  // of all ranks
};
static_assert(sizeof(DraftSamplerParams) <= 4096, "parameters of a launch");

}  // namespace sgl_lowlatency::abi
