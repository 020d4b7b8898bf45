// Parameter checks shared by the CUDA launcher and the emulation. They see the parameters, not the device memory behind pointers.
#include "launch/attention_in.hpp"

#include <string>

namespace sgl_lowlatency::launch {

void check_attention_in(const abi::AttentionInParams& p, int32_t grid) {
  const abi::AttnInGeometry& g = p.geometry;
  const SliceCheck check{"attention_in"};
  check.require_within(p.rows, 1, abi::kSliceMaxRows, "rows");
  check.require_multiple(g.hidden, abi::kPieceColumns, "hidden");
  check.require_multiple(g.lora, abi::kPieceColumns, "lora");
  check.require_within(g.lora, abi::kPieceColumns, abi::kAttnInMaxLora, "lora");
  check.require_within(g.heads, 1, 1024, "heads");
  const int64_t units = static_cast<int64_t>(g.heads) * (abi::kHeadDim / abi::kTallRows);
  check.require(units * grid < int64_t{1} << 31, "grid " + std::to_string(grid) + " has shares that 31 bits do not hold");
  check.require(p.norm_eps >= 0.0f && p.q_norm_eps >= 0.0f && p.kv_norm_eps >= 0.0f, "an eps is negative");
  check.require(p.pre == nullptr || (p.pre_stride % 4 == 0 && p.pre_stride >= abi::kStreams),
          "pre_stride " + std::to_string(p.pre_stride) + " is not a multiple of 4 that holds a row");
  check.require(p.q_stride % 8 == 0 && p.q_stride >= g.heads * abi::kHeadDim,
          "q_stride " + std::to_string(p.q_stride) + " is not a multiple of 8 that holds a row");
  check.require(p.page_size >= 1 && p.num_pages >= 1 && static_cast<int64_t>(p.page_size) * p.num_pages < int64_t{1} << 31,
          "page_size and num_pages are not positive, or have slots that 31 bits do not hold");
  check.require_multiple(p.page_bytes, 16, "page_bytes");
  check.require(p.page_bytes >= static_cast<int64_t>(p.page_size) * (abi::kKvDataBytes + abi::kKvScaleBytes),
          "page_bytes " + std::to_string(p.page_bytes) + " do not hold " + std::to_string(p.page_size) + " slots");
  check.require_launch(p, grid, abi::attn_in_smem(g, p.rows), abi::attn_in_handover(g, p.rows, grid).total_words,
                       {p.streams, p.norm, p.q_norm, p.kv_norm, p.positions, p.freqs, p.slots, p.maps, p.scales[0], p.scales[1], p.cache,
                        p.x, p.q_lora, p.q, p.workspace, p.state, p.fault});
}

}  // namespace sgl_lowlatency::launch
