// The text of a deadlock report: who waits for what.
#include <cstdio>

#include "machine.hpp"

namespace sgl_lowlatency::emulation {
namespace {

constexpr int32_t kMaxLines = 32;

std::string lanes_text(LaneMask lanes) {
  if (lanes == machine->all_lanes) return "all lanes ";
  char text[32];
  std::snprintf(text, sizeof(text), machine->warp_size == 32 ? "lanes 0x%08llx " : "lanes 0x%016llx ", static_cast<unsigned long long>(lanes));
  return text;
}

std::string mbarrier_text(const Block& block, const Mbarrier& mbarrier) {
  return "wait for the mbarrier at shared byte " + std::to_string(reinterpret_cast<const char*>(mbarrier.address) - block.shared) +
         " (" + std::to_string(mbarrier.pending_arrivals) + " arrivals, " + std::to_string(mbarrier.pending_bytes) + " bytes missing)";
}

std::string describe(const Warp& warp) {
  const Block& block = *warp.block;
  std::string text = rank_text(*block.rank) + "block " + std::to_string(block.idx) + " warp " + std::to_string(warp.idx_in_block) + ":";
  if (warp.at_barrier != 0) {
    const NamedBarrier& barrier = block.barriers[warp.barrier_id];
    text += " wait in barrier " + std::to_string(warp.barrier_id) + " (" + std::to_string(barrier.arrived) + " of " +
            std::to_string(barrier.num_threads) + " threads arrived)";
  }
  if (warp.in_collective != 0) text += " " + lanes_text(warp.in_collective) + "wait in " + name(warp.collective);
  for (const auto& mbarrier : block.mbarriers) {
    const LaneMask lanes = mbarrier->waiting_lanes[warp.idx_in_block] & warp.at_mbarrier;
    if (lanes != 0) text += " " + lanes_text(lanes) + mbarrier_text(block, *mbarrier);
  }
  if (warp.polling != 0) text += " " + lanes_text(warp.polling) + "poll";
  if (warp.exited != 0) text += " " + lanes_text(warp.exited) + "exited";
  return text;
}

}  // namespace

std::string describe_waits(const Machine& m) {
  std::string text;
  int32_t num_lines = 0;
  for (const auto& warp : m.warps) {
    if (warp->exited == machine->all_lanes) continue;
    if (++num_lines > kMaxLines) return text + "\n  ...";
    text += "\n  " + describe(*warp);
  }
  return text;
}

}  // namespace sgl_lowlatency::emulation
