// Who wins a step: the largest key, among equal ones the lowest token id, of all columns of all blocks of all ranks.
//
// Each block hands its candidate to every rank's mailbox, and every block reads all candidates from its own rank's: one trip, whatever the number
// of ranks. A candidate is two words, each its own flag (sync/handover.hpp): key and id. A word is used once a launch. The two generations of a
// mailbox take turns: launch L uses generation L % 2, and its rank clears the other one, which launch L - 1 has read and L + 1 will use. Ends of
// launches order that within a rank, a fence between ranks (order_ranks). Of the last step only each rank's block 0 reads.
#pragma once
#include "sgl_lowlatency/stages/draft_state.hpp"
#include "sgl_lowlatency/sync/handover.hpp"

namespace sgl_lowlatency::stages {

constexpr uint32_t kNoToken = 0xffffffffu;  // above every id
constexpr int32_t kPollBatch = 5;  // pairs of candidates that a lane asks for at a time

SGL_DEVICE Candidate better(const Candidate& a, const Candidate& b) {
  const bool is_lower = (a.id < b.id) != dialect::planted(dialect::Planted::kTieToHigherId);
  return a.key > b.key || (a.key == b.key && is_lower) ? a : b;
}

// The best of the 32 lanes, to each of them. Entry: all lanes.
SGL_DEVICE Candidate best_of_warp(const Candidate& own) {
  const uint32_t key = dialect::reduce_max(own.key);
  if (dialect::planted(dialect::Planted::kTieToHigherId)) return {key, dialect::reduce_max(own.key == key ? own.id : 0u)};
  return {key, dialect::reduce_min(own.key == key ? own.id : kNoToken)};
}

// Acquire and release, system scope: pairs with the same fence of the other ranks' blocks, through the candidates that they hand over. What a block
// has done before, clears and step logits, comes before what another rank does behind the last step.
SGL_DEVICE void order_ranks(const DraftSamplerParams& p) {
  if (p.num_ranks > 1) dialect::fence_acq_rel_system();
}

// The mailboxes in a launch, as a thread sees them.
struct DraftMail {
  const DraftSamplerParams& p;
  const DraftBlock& b;
  uint32_t launch;
  uint32_t* inbox;   // the own rank's letters of the launch
  uint32_t* outbox;  // the block's letter to rank `lane`, of step 0 and request 0; null of other lanes

  SGL_DEVICE DraftMail(const DraftSamplerParams& params, const DraftBlock& block, uint32_t of_launch)
      : p(params), b(block), launch(of_launch), inbox(generation(block.rank, of_launch)), outbox(nullptr) {
    const int32_t lane = dialect::thread_idx() % 32;
    if (lane < p.num_ranks) outbox = generation(lane, launch) + (b.rank * b.num_blocks + b.block) * abi::kCandidateWords;
  }

  SGL_DEVICE int32_t senders() const { return p.num_ranks * b.num_blocks; }
  SGL_DEVICE uint32_t* generation(int32_t rank, uint32_t of_launch) const {
    return p.peers[rank].mailbox + of_launch % 2 * abi::mailbox_words(p.gamma, p.max_batch, senders());
  }
  // 1/rms of the rank's rows, words that its own blocks write and read.
  SGL_DEVICE uint32_t* inverse_rms() const { return inbox + abi::mailbox_letters(p.gamma, p.max_batch, senders()); }
  // Of sender 0; the others follow.
  SGL_DEVICE int32_t letters(int32_t step, int32_t request) const {
    return (step * p.max_batch + request) * abi::mailbox_senders(senders()) * abi::kCandidateWords;
  }
  // The fence in front of the last candidates, where no step logits come before these: only clears, so it may come long before. Entry: all consumer
  // threads, behind a barrier behind the clears.
  SGL_DEVICE void order_clears() const {
    if (p.greedy != 0 && outbox != nullptr) order_ranks(p);
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
    const int32_t half = p.gamma / 2;
    // The last rank's last block.
    const bool is_last = b.rank + 1 == p.num_ranks && b.block + 1 == b.num_blocks;
    if (dialect::planted(dialect::Planted::kWithheldSignal) && is_last && step == half) return;
    if (dialect::planted(dialect::Planted::kLatePeer) && is_last && step == half) dialect::pause_ns(static_cast<uint32_t>(p.deadline_ns / 2));
    if (outbox == nullptr) return;
    if (step + 1 == p.gamma && p.greedy == 0) order_ranks(p);
    const uint32_t letter[abi::kCandidateWords] = {own.key, own.id};
    dialect::store_words_system(outbox + letters(step, request), letter);
  }

  // The token that all ranks agree on. Behind the last step's, order_ranks must follow. Entry: all lanes of one warp.
  SGL_DEVICE int32_t receive(int32_t step, int32_t request) const {
    const int32_t lane = dialect::thread_idx() % 32, num_senders = senders(), num_pairs = abi::mailbox_senders(num_senders) / 2;
    const uint32_t* const from = inbox + letters(step, request);
    Candidate best{0u, 0u};
SGL_NO_UNROLL
    for (int32_t first = lane; first < num_pairs; first += kPollBatch * 32) {
      uint32_t words[kPollBatch][2 * abi::kCandidateWords] = {};
      const auto is_missed = [&](int32_t u, int32_t half) {
        const uint32_t largest = sync::max_word(words[u][half * 2], words[u][half * 2 + 1]);
        return (first + u * 32) * 2 + half < num_senders && largest == abi::kUnwritten;
      };
SGL_UNROLL
      for (int32_t u = 0; u < kPollBatch; ++u) words[u][0] = words[u][1] = words[u][2] = words[u][3] = abi::kUnwritten;
      sync::wait_until(
          fault_sink(p, b.rank), abi::kFaultCandidate, step, request, static_cast<uint32_t>(b.num_blocks),
          [&] {
            bool is_any_missed = false;
SGL_UNROLL
            for (int32_t u = 0; u < kPollBatch; ++u) {
              if (is_missed(u, 0) || is_missed(u, 1)) dialect::load_words_system(words[u], from + (first + u * 32) * 2 * abi::kCandidateWords);
            }
SGL_UNROLL
            for (int32_t u = 0; u < kPollBatch; ++u) is_any_missed = is_any_missed || is_missed(u, 0) || is_missed(u, 1);
            return !is_any_missed || dialect::planted(dialect::Planted::kMissingAwait);
          },
          [&] {
            int32_t missed = 0;
SGL_UNROLL
            for (int32_t u = 0; u < kPollBatch; ++u) {
SGL_UNROLL
              for (int32_t half = 0; half < 2; ++half) missed = is_missed(u, half) ? (first + u * 32) * 2 + half : missed;
            }
            return static_cast<uint32_t>(missed);
          });
      // Keys first: one tree of maxima, then one of the ids that have it.
      const bool is_higher_id = dialect::planted(dialect::Planted::kTieToHigherId);
      Candidate own{0u, is_higher_id ? 0u : kNoToken};
SGL_UNROLL
      for (int32_t u = 0; u < kPollBatch; ++u) {
SGL_UNROLL
        for (int32_t half = 0; half < 2; ++half) {
          const bool is_there = (first + u * 32) * 2 + half < num_senders && !is_missed(u, half);
          if (!is_there) words[u][half * 2] = 0u;
          own.key = sync::max_word(own.key, words[u][half * 2]);
        }
      }
SGL_UNROLL
      for (int32_t u = 0; u < kPollBatch; ++u) {
SGL_UNROLL
        for (int32_t half = 0; half < 2; ++half) {
          const uint32_t id = words[u][half * 2] == own.key ? words[u][half * 2 + 1] : is_higher_id ? 0u : kNoToken;
          own.id = is_higher_id == (id > own.id) ? id : own.id;
        }
      }
      best = better(best, own);
    }
    dialect::sync_warp();
    return static_cast<int32_t>(best_of_warp(best).id);
  }
};

}  // namespace sgl_lowlatency::stages
