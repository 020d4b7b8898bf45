// Who wins a step: the largest key, among equal ones the lowest token id, of all columns of all blocks of all ranks.
//
// Each block hands its candidate to every rank's mailbox, and every block reads all candidates from its own rank's: one trip, whatever the number
// of ranks. A candidate is two words, each its own flag (sync/handover.hpp): key and id. A word is used once a launch. The two generations of a
// mailbox take turns: launch L uses generation L % 2, and its rank clears the other one, which launch L - 1 has read and L + 1 will use. Ends of
// launches order that within a rank, a fence between ranks (order_ranks).
#pragma once
#include "sgl_lowlatency/stages/draft_noise.hpp"
#include "sgl_lowlatency/stages/draft_state.hpp"
#include "sgl_lowlatency/sync/handover.hpp"

namespace sgl_lowlatency::stages {

constexpr int32_t kPollBatch = 8;  // candidates that a lane asks for at a time

SGL_DEVICE Candidate better(const Candidate& a, const Candidate& b) {
  const bool is_lower = (a.id < b.id) != dialect::planted(dialect::Planted::kTieToHigherId);
  return a.key > b.key || (a.key == b.key && is_lower) ? a : b;
}

// The best of the 32 lanes, to each of them. Entry: all lanes.
SGL_DEVICE Candidate best_of_warp(const Candidate& own) {
  const uint32_t key = dialect::reduce_max(own.key);
  if (dialect::planted(dialect::Planted::kTieToHigherId)) return {key, dialect::reduce_max(own.key == key ? own.id : 0u)};
  return {key, dialect::reduce_min(own.key == key ? own.id : 0xffffffffu)};
}

// Acquire and release, system scope: pairs with the same fence of the other ranks' blocks, through the candidates that they hand over. What a block
// has done before the last step's candidate, clears and step logits, comes before what another rank does behind that step.
SGL_DEVICE void order_ranks(const DraftSamplerParams& p, int32_t step) {
  if (p.num_ranks > 1 && step + 1 == p.gamma) dialect::fence_acq_rel_system();
}

// The mailboxes in a launch.
struct DraftMail {
  const DraftSamplerParams& p;
  const DraftBlock& b;
  uint32_t launch;

  SGL_DEVICE int32_t senders() const { return p.num_ranks * b.num_blocks; }
  SGL_DEVICE uint32_t* generation(int32_t rank, uint32_t of_launch) const {
    return p.peers[rank].mailbox + of_launch % 2 * abi::mailbox_words(p.gamma, p.max_batch, senders());
  }
  // Of sender 0; the others follow.
  SGL_DEVICE uint32_t* letters(int32_t to, int32_t step, int32_t request) const {
    return generation(to, launch) + (step * p.max_batch + request) * senders() * abi::kCandidateWords;
  }

  // The block's share of what the launch before has used. Entry: all consumer threads.
  SGL_DEVICE void clear() const {
    const int32_t num_vecs = abi::mailbox_words(p.gamma, p.max_batch, senders()) / 4;
    for (int32_t v = b.block * kConsumerThreads + dialect::thread_idx(); v < num_vecs; v += b.num_blocks * kConsumerThreads) {
      dialect::clear_words(generation(b.rank, launch + 1) + v * 4);
    }
  }

  // Hands the block's candidate to all ranks. Entry: all lanes of one warp; a barrier lies behind what the whole block did before.
  SGL_DEVICE void send(int32_t step, int32_t request, const Candidate& own) const {
    const int32_t lane = dialect::thread_idx() % 32, half = p.gamma / 2;
    // The last rank's last block.
    const bool is_last = b.rank + 1 == p.num_ranks && b.block + 1 == b.num_blocks;
    if (dialect::planted(dialect::Planted::kWithheldSignal) && is_last && step == half) return;
    if (dialect::planted(dialect::Planted::kLatePeer) && is_last && step == half) dialect::pause_ns(static_cast<uint32_t>(p.deadline_ns / 2));
    if (lane >= p.num_ranks) return;
    order_ranks(p, step);
    const uint32_t letter[abi::kCandidateWords] = {own.key, own.id};
    dialect::store_words_system(letters(lane, step, request) + (b.rank * b.num_blocks + b.block) * abi::kCandidateWords, letter);
  }

  // The token that all ranks agree on. Entry: all lanes of one warp.
  SGL_DEVICE int32_t receive(int32_t step, int32_t request) const {
    const int32_t lane = dialect::thread_idx() % 32, num_senders = senders();
    const uint32_t* const from = letters(b.rank, step, request);
    Candidate best{0u, 0u};
SGL_NO_UNROLL
    for (int32_t first = lane; first < num_senders; first += kPollBatch * 32) {
      uint32_t words[kPollBatch][abi::kCandidateWords];
      const auto is_missed = [&](int32_t u) { return first + u * 32 < num_senders && !sync::is_written(words[u]); };
SGL_UNROLL
      for (int32_t u = 0; u < kPollBatch; ++u) words[u][0] = words[u][1] = abi::kUnwritten;
      int32_t missed = 0;
      sync::wait_until(
          fault_sink(p, b.rank), abi::kFaultCandidate, step, request, static_cast<uint32_t>(b.num_blocks),
          [&] {
            missed = -1;
SGL_UNROLL
            for (int32_t u = 0; u < kPollBatch; ++u) {
              if (is_missed(u)) dialect::load_words_system(words[u], from + (first + u * 32) * abi::kCandidateWords);
            }
SGL_UNROLL
            for (int32_t u = 0; u < kPollBatch; ++u) {
              if (is_missed(u)) missed = first + u * 32;
            }
            return missed < 0 || dialect::planted(dialect::Planted::kMissingAwait);
          },
          [&] { return static_cast<uint32_t>(missed); });
SGL_UNROLL
      for (int32_t u = 0; u < kPollBatch; ++u) {
        if (first + u * 32 < num_senders && sync::is_written(words[u])) best = better(best, {words[u][0], words[u][1]});
      }
    }
    order_ranks(p, step);
    dialect::sync_warp();
    return static_cast<int32_t>(best_of_warp(best).id);
  }
};

}  // namespace sgl_lowlatency::stages
