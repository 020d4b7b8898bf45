// Who wins a step: the largest key, among equal ones the lowest token id; of a warp, a block, a rank, all ranks.
//
// Between blocks and ranks a candidate is two words, each its own flag (sync/handover.hpp): key, and id. A word is used once a launch. The two
// generations of the words take turns: launch L uses generation L % 2 and clears the other. Within a rank the ends of launches order that: launch
// L - 1 has read what L clears, L + 1 finds it cleared. Between ranks a fence does (order_mailbox).
#pragma once
#include "sgl_lowlatency/stages/draft_noise.hpp"
#include "sgl_lowlatency/stages/draft_state.hpp"
#include "sgl_lowlatency/sync/handover.hpp"

namespace sgl_lowlatency::stages {

SGL_DEVICE Candidate better(const Candidate& a, const Candidate& b) {
  if (a.key != b.key) return a.key > b.key ? a : b;
  return (a.id < b.id) != dialect::planted(dialect::Planted::kTieToHigherId) ? a : b;
}

// The best of the 32 lanes, to each of them. Entry: all lanes.
SGL_DEVICE Candidate best_of_warp(const Candidate& own) {
  const uint32_t key = dialect::reduce_max(own.key);
  if (dialect::planted(dialect::Planted::kTieToHigherId)) return {key, dialect::reduce_max(own.key == key ? own.id : 0u)};
  return {key, dialect::reduce_min(own.key == key ? own.id : 0xffffffffu)};
}

// What a candidate's reader waits for.
struct DraftWait {
  abi::FaultKind kind;
  int32_t step;
  int32_t whom;  // block or rank
  int32_t request;
};

template <class Load>
SGL_DEVICE Candidate await_candidate(const sync::FaultSink& sink, const DraftWait& what, const Load& load) {
  uint32_t words[abi::kCandidateWords];
  sync::wait_until(
      sink, what.kind, what.step, what.whom, static_cast<uint32_t>(what.request),
      [&] {
        load(words);
        return sync::is_written(words) || dialect::planted(dialect::Planted::kMissingAwait);
      },
      [] { return abi::kUnwritten; });
  return {words[0], words[1]};
}

// A block's words of this launch and of the one before.
struct DraftWords {
  const DraftSamplerParams& p;
  const DraftBlock& b;
  uint32_t launch;

  SGL_DEVICE uint32_t* candidates(uint32_t generation) const {
    return p.ranks[b.local_rank].candidates + generation % 2 * abi::candidate_words(p.gamma, p.max_batch, b.num_blocks);
  }
  SGL_DEVICE uint32_t* mailbox(int32_t rank, uint32_t generation) const {
    return p.peers[rank].mailbox + generation % 2 * abi::mailbox_words(p.gamma, p.max_batch);
  }
  SGL_DEVICE uint32_t* candidate(int32_t step, int32_t request, int32_t block) const {
    return candidates(launch) + ((step * p.max_batch + request) * b.num_blocks + block) * abi::kCandidateWords;
  }
  SGL_DEVICE uint32_t* letter(int32_t to, int32_t step, int32_t request, int32_t from) const {
    return mailbox(to, launch) + ((step * p.max_batch + request) * abi::kMaxDraftRanks + from) * abi::kCandidateWords;
  }

  // Clears the block's share of the words of the launch before. The leader's share of the rank's mailbox, which is all of it, must be ordered before
  // what the other ranks write into it in their next launch. Entry: all consumer threads; the leader passes a consumer barrier.
  SGL_DEVICE void clear() const {
    const int32_t thread = dialect::thread_idx(), num_vecs = abi::candidate_words(p.gamma, p.max_batch, b.num_blocks) / 4;
    for (int32_t v = b.block * kConsumerThreads + thread; v < num_vecs; v += b.num_blocks * kConsumerThreads) {
      dialect::clear_words(candidates(launch + 1) + v * 4);
    }
    if (!b.is_leader() || p.num_ranks == 1) return;
    for (int32_t v = thread; v < abi::mailbox_words(p.gamma, p.max_batch) / 4; v += kConsumerThreads) {
      dialect::clear_words(mailbox(b.rank, launch + 1) + v * 4);
    }
    sync_consumers();
    order_ranks();
  }

  // Acquire and release, system scope: pairs with the same fence of the other ranks, through the words they hand over. What this rank has done
  // before its letters of a launch, clears and step logits, comes before what another does behind the last of them.
  SGL_DEVICE void order_ranks() const { dialect::fence_acq_rel_system(); }
};

// The token that all ranks agree on, from the block's candidate for the request. Entry: all lanes of one warp; own: the same in all of them.
SGL_DEVICE int32_t agree_on_token(const DraftWords& words, int32_t step, int32_t request, const Candidate& own) {
  const DraftSamplerParams& p = words.p;
  const DraftBlock& b = words.b;
  const sync::FaultSink sink = fault_sink(p, b.rank);
  const int32_t lane = dialect::thread_idx() % 32;
  const bool is_last = step + 1 == p.gamma && p.num_ranks > 1;
  // Of one rank, its last block says nothing; of several, the last rank.
  const bool is_lost = dialect::planted(dialect::Planted::kWithheldSignal) && b.rank + 1 == p.num_ranks && step == p.gamma / 2;
  if (lane == 0) {
    if (is_last) words.order_ranks();  // the block's step logits, which a barrier ordered before this
    const uint32_t own_words[abi::kCandidateWords] = {own.key, own.id};
    if (!is_lost || p.num_ranks > 1 || b.block + 1 < b.num_blocks) dialect::store_words(words.candidate(step, request, b.block), own_words);
  }
  Candidate best{0u, 0u};
  if (p.num_ranks == 1 || b.is_leader()) {
SGL_NO_UNROLL
    for (int32_t block = lane; block < b.num_blocks; block += 32) {
      best = better(best, await_candidate(sink, {abi::kFaultCandidate, step, block, request},
                                          [&](uint32_t (&w)[2]) { dialect::load_words(w, words.candidate(step, request, block)); }));
    }
    if (is_last) words.order_ranks();  // all blocks' step logits: every lane has read some blocks' words
    dialect::sync_warp();
    best = best_of_warp(best);
  }
  if (p.num_ranks == 1) return static_cast<int32_t>(best.id);
  if (b.is_leader() && lane < p.num_ranks) {
    if (dialect::planted(dialect::Planted::kLatePeer) && b.rank + 1 == p.num_ranks && lane == 0) dialect::pause_ns(static_cast<uint32_t>(p.deadline_ns / 2));
    const uint32_t letter[abi::kCandidateWords] = {best.key, best.id};
    if (!is_lost) dialect::store_words_system(words.letter(lane, step, request, b.rank), letter);
  }
  best = {0u, 0u};
  if (lane < p.num_ranks) {
    best = await_candidate(sink, {abi::kFaultPeer, step, lane, request},
                           [&](uint32_t (&w)[2]) { dialect::load_words_system(w, words.letter(b.rank, step, request, lane)); });
    if (is_last) words.order_ranks();
  }
  dialect::sync_warp();
  return static_cast<int32_t>(best_of_warp(best).id);
}

}  // namespace sgl_lowlatency::stages
