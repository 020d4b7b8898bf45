// Joins of happens-before clocks; a join that would change nothing in other blocks' entries is recognised by a tag and skipped.
#include "clock.hpp"

namespace sgl_lowlatency::emulation {
namespace {

void join_range(Clock& dst, const Clock& src, size_t begin, size_t end) {
  for (size_t i = begin; i < end; ++i) dst.warps[i].join(src.warps[i]);
}

}  // namespace

void join_in_block(Clock& dst, const Clock& src, const BlockRange& range, uint64_t& next_tag) {
  join_range(dst, src, range.own_begin, range.own_end);
  for (uint32_t i = 0; i < range.num_mbarriers; ++i) {
    dst.mbarrier_phases[i] = std::max(dst.mbarrier_phases[i], src.mbarrier_phases[i]);
  }
  if (dst.foreign_tag != 0 && dst.foreign_tag == src.foreign_tag) return;
  bool dst_kept = true, became_src = true;
  for (size_t i = 0; i < dst.warps.size(); ++i) {
    if (i == range.own_begin) {
      i = range.own_end - 1;
      continue;
    }
    const Known before = dst.warps[i];
    dst.warps[i].join(src.warps[i]);
    dst_kept = dst_kept && dst.warps[i] == before;
    became_src = became_src && dst.warps[i] == src.warps[i];
  }
  if (dst_kept && dst.foreign_tag != 0) return;
  dst.foreign_tag = became_src && src.foreign_tag != 0 ? src.foreign_tag : next_tag++;
}

void join_across_blocks(Clock& dst, const Clock& src, uint64_t& next_tag) {
  join_range(dst, src, 0, dst.warps.size());
  dst.foreign_tag = next_tag++;
}

}  // namespace sgl_lowlatency::emulation
