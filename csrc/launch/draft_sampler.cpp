// Parameter checks shared by the CUDA launcher and the emulation. They see the parameters, not the device memory behind pointers.
#include "launch/draft_sampler.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace sgl_lowlatency::launch {
namespace {

void require(bool is_met, const std::string& what) {
  if (!is_met) throw std::invalid_argument("draft_sampler: " + what);
}

void require_within(int64_t value, int64_t least, int64_t most, const std::string& name) {
  require(value >= least && value <= most, name + " " + std::to_string(value) + " is outside " + std::to_string(least) + ".." + std::to_string(most));
}

void check_rank(const abi::DraftSamplerParams& p, int32_t local_rank, int32_t num_blocks) {
  const abi::DraftRank& rank = p.ranks[local_rank];
  const std::string of = "ranks[" + std::to_string(local_rank) + "].";
  const auto text = [](int64_t v) { return std::to_string(v); };
  require(rank.vocab_begin >= 0 && rank.vocab_begin % 4 == 0, of + "vocab_begin " + text(rank.vocab_begin) + " is not a multiple of 4");
  require(rank.vocab_count > 0 && rank.vocab_count % 2 == 0 && rank.vocab_begin + rank.vocab_count <= p.vocab,
          of + "vocab_count " + text(rank.vocab_count) + " is not an even number within vocab " + text(p.vocab));
  require(rank.num_units == (rank.vocab_count + abi::kUnitColumns - 1) / abi::kUnitColumns, of + "num_units are not those of vocab_count");
  require(rank.num_head_tiles == (rank.vocab_count + abi::kTileRows - 1) / abi::kTileRows, of + "num_head_tiles are not those of vocab_count");
  require(abi::draft_max_units(rank.num_units, num_blocks) <= p.max_units, of + "a block has more units than max_units " + text(p.max_units));
  const void* const pointers[] = {rank.maps, rank.base_logits, rank.draft_tokens, rank.noise_offset, rank.state};
  for (const void* pointer : pointers) require(pointer != nullptr, of + "a pointer is null");
}

}  // namespace

void check_draft_sampler(const abi::DraftSamplerParams& p, int32_t grid) {
  const auto text = [](int64_t v) { return std::to_string(v); };
  require_within(p.max_batch, 1, abi::kMaxDraftBatch, "max_batch");
  require_within(p.batch, 1, p.max_batch, "batch");
  require_within(p.gamma, 1, abi::kMaxGamma, "gamma");
  require_within(p.batch * p.gamma, 1, abi::kMaxDraftRows, "rows");
  require(p.hidden > 0 && p.hidden % 64 == 0, "hidden " + text(p.hidden) + " is not a positive multiple of 64");
  require(p.k_panel == p.hidden || (p.k_panel > 0 && p.k_panel < p.hidden && p.k_panel % abi::stage_k(2) == 0),
          "k_panel " + text(p.k_panel) + " is neither all of hidden nor a multiple of " + text(abi::stage_k(2)));
  const int32_t at_once = abi::most_tiles_at_once(abi::draft_row_tiles(p.batch * p.gamma));
  require(p.tiles_at_once == 1 || p.tiles_at_once == at_once,
          "tiles_at_once " + text(p.tiles_at_once) + " is neither 1 nor " + text(at_once));
  require(p.vocab > 0 && p.vocab % 2 == 0, "vocab " + text(p.vocab) + " is not positive and even");
  require((p.norm != nullptr) == (p.has_norm != 0), "norm is there with has_norm, and null without");
  require(p.step_logits_type >= 0 && p.step_logits_type < abi::kNumStepLogitsTypes, "step_logits_type " + text(p.step_logits_type) + " is none");
  require(p.rounds_bias == 0 || p.rounds_bias == 1, "rounds_bias " + text(p.rounds_bias) + " is neither 0 nor 1");
  require(p.anchor_stride >= 1, "anchor_stride " + text(p.anchor_stride) + " is below 1");
  require_within(p.num_ranks, 1, abi::kMaxDraftRanks, "num_ranks");
  require_within(p.num_local_ranks, 1, p.num_ranks, "num_local_ranks");
  require_within(p.first_rank, 0, p.num_ranks - p.num_local_ranks, "first_rank");
  require(grid > 0 && grid % p.num_local_ranks == 0,
          "grid " + text(grid) + " is not as many blocks for each of num_local_ranks " + text(p.num_local_ranks));
  require(p.max_units >= 1, "max_units " + text(p.max_units) + " is below 1");
  const abi::DraftSmem shared = abi::draft_smem(p.batch * p.gamma, p.batch, p.k_panel, p.max_units);
  require(std::memcmp(&shared, &p.shared, sizeof(shared)) == 0, "shared is not draft_smem of rows, batch, k_panel and max_units");
  require(p.deadline_ns > 0, "deadline_ns is 0");
  const void* const pointers[] = {p.hidden_states, p.anchor_tokens, p.step_temperatures, p.markov_w1, p.fault};
  for (const void* pointer : pointers) require(pointer != nullptr, "a pointer of the parameters is null");
  for (int32_t i = 0; i < p.num_local_ranks; ++i) check_rank(p, i, grid / p.num_local_ranks);
  for (int32_t i = 0; i < p.num_ranks; ++i) {
    require(p.peers[i].mailbox != nullptr, "peers[" + text(i) + "] has no mailbox");
    require((p.peers[i].step_logits == nullptr) == (p.greedy != 0), "peers[" + text(i) + "] has step_logits, or none, against greedy");
  }
}

}  // namespace sgl_lowlatency::launch
