// The kernels of a rank's stream: each begins when the one before is over, with all that it did. Traps end a rank.
#include <algorithm>
#include <cstring>

#include "machine.hpp"

namespace sgl_lowlatency::emulation {
namespace {

constexpr size_t kRedZoneBytes = 128;  // poisoned memory behind every block's shared memory

void check_red_zones(const RankState& rank, size_t shared_bytes) {
  for (const auto& block : rank.blocks) {
    for (size_t i = shared_bytes; i < shared_stride(shared_bytes); ++i) {
      if (static_cast<unsigned char>(block->shared[i]) == kPoisonByte) continue;
      machine->report.status = Status::kMisuse;
      machine->report.message = rank_text(rank) + "block " + std::to_string(block->idx) + " wrote shared byte " + std::to_string(i) + " of " +
                                std::to_string(shared_bytes);
      return;
    }
  }
}

// Every warp of the rank knows all that any of them does.
void join_warps(RankState& rank) {
  Clock all(machine->warps.size());
  for (uint32_t i = 0; i < rank.num_warps; ++i) {
    Warp& warp = *machine->warps[rank.first_warp + i];
    barrier_in_warp(warp);
    join_across_blocks(all, warp.clock, machine->next_tag);
  }
  for (uint32_t i = 0; i < rank.num_warps; ++i) machine->warps[rank.first_warp + i]->clock = all;
}

void reset(Lane& lane, const Block& block, int32_t thread, int32_t grid) {
  lane.has_awaited = block.rank->next_kernel == 1;  // nothing is in front of the first
  lane.identity = {thread, block.idx, grid, block.shared};
  lane.fenced_interval = 0;  // its warp's next interval is above all that were used
  lane.publication.reset();
  lane.system_publication.reset();
  lane.pending.clear();
  lane.copies.clear();
  lane.copies_done = lane.copy_group = 0;
  lane.failed_mbarrier = -1;
  lane.failed_phase = 0;
  lane.looked_at_change = lane.looked_at = 0;
}

void reset(Warp& warp, Block& block, uint32_t idx_in_block) {
  Warp fresh(0, machine->all_lanes);
  fresh.clock = std::move(warp.clock);
  fresh.interval = warp.interval;
  fresh.block = &block;
  fresh.idx_in_block = idx_in_block;
  fresh.idx = warp.idx;
  fresh.lanes = warp.lanes;
  warp = std::move(fresh);
}

}  // namespace

size_t shared_stride(size_t shared_bytes) {
  return (shared_bytes + kRedZoneBytes + abi::kStageAlignment - 1) / abi::kStageAlignment * abi::kStageAlignment;
}

void start_kernel(RankState& rank) {
  Machine& m = *machine;
  const Kernel& kernel = rank.program.kernels[rank.next_kernel];
  if (rank.next_kernel > 0) join_warps(rank);
  ++rank.next_kernel;
  std::memset(rank.shared, kPoisonByte, shared_stride(kernel.shared_bytes) * kernel.grid);
  rank.blocks.clear();
  const uint32_t warps_per_block = static_cast<uint32_t>(kernel.block_threads / m.warp_size);
  for (int32_t b = 0; b < kernel.grid; ++b) {
    rank.blocks.push_back(std::make_unique<Block>());
    Block& block = *rank.blocks.back();
    const uint32_t first = rank.first_warp + b * warps_per_block;
    block.rank = &rank;
    block.idx = b;
    block.shared = rank.shared + b * shared_stride(kernel.shared_bytes);
    block.shared_bytes = kernel.shared_bytes;
    block.range = {first, first + warps_per_block, 0};
    block.live_warps = static_cast<int32_t>(warps_per_block);
    block.granules.resize(kernel.shared_bytes / kLineBytes + 1);
    for (uint32_t w = 0; w < warps_per_block; ++w) {
      Warp& warp = *m.warps[first + w];
      reset(warp, block, w);
      m.run_list.push_back(&warp);
      for (int32_t l = 0; l < m.warp_size; ++l) {
        reset(warp.lanes[l], block, static_cast<int32_t>(w) * m.warp_size + l, kernel.grid);
        prepare_lane(warp.lanes[l]);
      }
    }
  }
  const uint32_t used = static_cast<uint32_t>(kernel.grid) * warps_per_block;
  for (uint32_t i = used; i < rank.num_warps; ++i) {  // of a larger kernel: they sit this one out
    Warp& warp = *m.warps[rank.first_warp + i];
    reset(warp, *rank.blocks.front(), 0);
    warp.runnable = 0;
    warp.listed = false;
    warp.exited = m.all_lanes;
  }
  rank.live_warps = used;
  m.live_warps += used;
}

void finish_kernel(RankState& rank) {
  check_red_zones(rank, rank.blocks.front()->shared_bytes);
  if (machine->report.status == Status::kOk && rank.next_kernel < rank.program.kernels.size()) start_kernel(rank);
}

void kill_rank(RankState& rank) {
  Machine& m = *machine;
  const auto of_rank = [&](const Warp* warp) { return warp->block->rank == &rank; };
  m.run_list.erase(std::remove_if(m.run_list.begin(), m.run_list.end(), of_rank), m.run_list.end());
  m.polling_list.erase(std::remove_if(m.polling_list.begin(), m.polling_list.end(), of_rank), m.polling_list.end());
  for (size_t i = 0; i < m.polling_list.size(); ++i) m.polling_list[i]->polling_pos = static_cast<int32_t>(i);
  std::vector<BulkCopy>& copies = m.bulk_copies;
  copies.erase(std::remove_if(copies.begin(), copies.end(), [&](const BulkCopy& copy) { return copy.block->rank == &rank; }), copies.end());
  std::vector<Lane*>& lanes = m.copying_lanes;
  lanes.erase(std::remove_if(lanes.begin(), lanes.end(), [&](const Lane* lane) { return of_rank(lane->warp); }), lanes.end());
  for (uint32_t i = 0; i < rank.num_warps; ++i) {
    Warp& warp = *m.warps[rank.first_warp + i];
    warp.runnable = warp.polling = warp.at_mbarrier = warp.at_barrier = warp.in_collective = 0;
    warp.exited = m.all_lanes;
    warp.listed = false;
    warp.polling_pos = -1;
  }
  m.live_warps -= rank.live_warps;
  rank.live_warps = 0;
  rank.trapped = true;
  m.progress = true;
}

int32_t rank_of(const Lane& lane) { return lane.warp->block->rank->idx; }

std::string rank_text(const RankState& rank) { return machine->has_ranks() ? "rank " + std::to_string(rank.idx) + " " : ""; }

}  // namespace sgl_lowlatency::emulation
