// draft_sampler: the proposal of a DSpark draft, all of its tokens, in one persistent launch. DESIGN.md has the reasons.
//
//   x = rms_norm(hidden_states) * norm, or hidden_states;   base = bf16(x @ head.T);   previous = anchor_tokens
//   per step: value = base[:, step] + bf16(markov_w1[previous] @ markov_w2.T)
//             key = value, or of a request that samples value / temperature + Gumbel noise;   previous = draft_tokens[:, step] = arg max of key
//
// Tensors   (abi/draft_sampler.hpp has all) hidden_states [batch * gamma, hidden] bf16; of a rank, rows vocab_begin .. + vocab_count of head [vocab,
//           hidden] bf16 and of markov_w2 [vocab, kMarkovRank] bf16; markov_w1 [vocab, kMarkovRank] bf16; draft_tokens [batch, gamma] int64;
//           step_logits [batch, gamma, vocab] fp32 or bf16, of requests that sample.
// Grid      blocks a rank times local ranks, at most one block an SM (all run at once), kNumThreads threads each. kNTiles: N tiles of the LM head's
//           MMA, of 8 rows each; kBatchTiles: of the Markov product's, of 8 requests each; kAtOnce: tiles of the LM head that a pair of warps has.
// Roles     warps 0..7 consume, in pairs; warp 8 streams the block's rows of the LM head and of markov_w2 through the shared-memory ring.
// Phases    the norm and the LM head | per step: bias, keys, the block's candidates | the tokens that all agree on, and their latents.
// Hand-over every block's candidate to every rank's mailbox, each word its own flag (stages/draft_choice.hpp). Base logits stay with the block that
//           made them.
// Residency all blocks must run at once: the launcher checks occupancy and launches cooperatively. One launch at a time may use a rank's state.
#pragma once
#include "sgl_lowlatency/stages/draft_markov.hpp"

namespace sgl_lowlatency::kernels {

using namespace stages;

// The last block out of a rank closes its launch: generations move on, and the noise. Every block read both before its ticket.
// Entry: all consumer threads.
SGL_DEVICE void close_draft(const DraftSamplerParams& p, const DraftBlock& b) {
  sync_consumers();
  if (dialect::thread_idx() != 0) return;
  const abi::DraftRank& own = p.ranks[b.local_rank];
  // Acquire and release, gpu scope: pairs with the other blocks' arrivals, so that the stores below come after every block's reads of the state.
  if (dialect::fetch_add_acq_rel_gpu(own.state->exit_ticket, 1u) != static_cast<uint32_t>(b.num_blocks - 1)) return;
  dialect::store_plain(own.state->exit_ticket, 0u);
  dialect::store_plain(own.state->launches, dialect::load_plain(own.state->launches) + 1u);
  uint64_t* const noise_offset = reinterpret_cast<uint64_t*>(own.noise_offset);
  if (p.greedy == 0) dialect::store_plain(noise_offset, dialect::load_plain(noise_offset) + 1u);
}

// Entry: all consumer threads, after the block's first barrier.
template <int32_t kNTiles, int32_t kBatchTiles, int32_t kAtOnce>
SGL_DEVICE void draft_sampler_consume(const DraftSamplerParams& p, const DraftShared& s) {
  const DraftBlock b = draft_block(p);
  const abi::DraftRank& own = p.ranks[b.local_rank];
  const DraftMail mail{p, b, dialect::load_plain(own.state->launches)};
  // SGLang adds one behind each block; bits above 32 take no part.
  uint32_t noise_offset = 0;
  if (p.greedy == 0) noise_offset = static_cast<uint32_t>(dialect::load_plain(reinterpret_cast<uint64_t*>(own.noise_offset)));
  if (dialect::planted(dialect::Planted::kStaleNoise)) --noise_offset;
  check_anchors(p, b);
  run_draft_head<kNTiles, kAtOnce>(p, s);
  mail.clear();
  run_draft_steps<kBatchTiles>(p, s, b, mail, noise_offset);
  close_draft(p, b);
}

// Entry: every thread of every block. The threads of different warps prepare different parts of the block's state; the barrier publishes it
// (the mbarriers to the threads too, as the init fence does to the copies), and then the roles part for good.
template <int32_t kNTiles, int32_t kBatchTiles, int32_t kAtOnce>
SGL_DEVICE void draft_sampler_body(const DraftSamplerParams& p) {
  const DraftShared s{p.shared};
  const int32_t thread = dialect::thread_idx();
  if (thread == kConsumerThreads) {
    for (int32_t i = 0; i < abi::kDraftStages; ++i) {
      dialect::mbarrier_init(s.full(i), 1);
      dialect::mbarrier_init(s.empty(i), 2);
    }
    dialect::mbarrier_init_fence();
  }
  if (thread >= 96 && thread < 128) reinterpret_cast<uint32_t*>(s.zero_row())[thread - 96] = 0u;
  dialect::sync_block();
  if (thread >= kConsumerThreads) {
    produce_draft_weights(p, s, thread % 32);
  } else {
    draft_sampler_consume<kNTiles, kBatchTiles, kAtOnce>(p, s);
  }
}

}  // namespace sgl_lowlatency::kernels
