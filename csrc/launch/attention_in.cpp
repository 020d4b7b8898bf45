// Parameter checks shared by the CUDA launcher and the emulation. They see the parameters, not the device memory behind pointers.
#include "launch/attention_in.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

namespace sgl_lowlatency::launch {
namespace {

void require(bool is_met, const std::string& what) {
  if (!is_met) throw std::invalid_argument("attention_in: " + what);
}

void require_within(int64_t value, int64_t least, int64_t most, const std::string& name) {
  require(value >= least && value <= most, name + " " + std::to_string(value) + " is outside " + std::to_string(least) + ".." + std::to_string(most));
}

void require_multiple(int64_t value, int64_t of, const std::string& name) {
  require(value > 0 && value % of == 0, name + " " + std::to_string(value) + " is not a positive multiple of " + std::to_string(of));
}

}  // namespace

void check_attention_in(const abi::AttentionInParams& p, int32_t grid) {
  const abi::AttnInGeometry& g = p.geometry;
  require_within(p.rows, 1, abi::kSliceMaxRows, "rows");
  require_multiple(g.hidden, abi::kPieceColumns, "hidden");
  require_multiple(g.lora, abi::kPieceColumns, "lora");
  require_within(g.lora, abi::kPieceColumns, abi::kAttnInMaxLora, "lora");
  require_within(g.heads, 1, 1024, "heads");
  require_within(grid, 1, 4096, "grid");
  const int64_t work = static_cast<int64_t>(abi::attn_in_units(g, abi::kAttnInA)) * (abi::kAttnInPanel / abi::kPieceColumns) +
                       static_cast<int64_t>(abi::attn_in_units(g, abi::kAttnInB)) * (g.lora / abi::kPieceColumns);
  require(work * grid < int64_t{1} << 32, "grid " + std::to_string(grid) + " has shares that 32 bits do not hold");
  require(p.norm_eps >= 0.0f && p.q_norm_eps >= 0.0f && p.kv_norm_eps >= 0.0f, "an eps is negative");
  require(p.max_position >= 1, "max_position " + std::to_string(p.max_position) + " is below 1");
  require(p.pre == nullptr || (p.pre_stride % 4 == 0 && p.pre_stride >= abi::kStreams),
          "pre_stride " + std::to_string(p.pre_stride) + " is not a multiple of 4 that holds a row");
  require(p.q_stride % 8 == 0 && p.q_stride >= g.heads * abi::kHeadDim,
          "q_stride " + std::to_string(p.q_stride) + " is not a multiple of 8 that holds a row");
  require(p.page_size >= 1 && p.num_pages >= 1 && static_cast<int64_t>(p.page_size) * p.num_pages < int64_t{1} << 31,
          "page_size and num_pages are not positive, or have slots that 31 bits do not hold");
  require_multiple(p.page_bytes, 16, "page_bytes");
  require(p.page_bytes >= static_cast<int64_t>(p.page_size) * (abi::kKvDataBytes + abi::kKvScaleBytes),
          "page_bytes " + std::to_string(p.page_bytes) + " do not hold " + std::to_string(p.page_size) + " slots");
  const abi::SliceSmem shared = abi::attn_in_smem(g, p.rows);
  require(std::memcmp(&shared, &p.shared, sizeof(shared)) == 0, "shared is not attn_in_smem of geometry and rows");
  require(shared.num_stages >= 2, "rows " + std::to_string(p.rows) + " leave the ring fewer than 2 stages");
  require(p.generation_words % 4 == 0 && p.generation_words >= abi::attn_in_handover(g, p.rows).total_words,
          "generation_words are too few for the rows");
  require(p.deadline_ns > 0, "deadline_ns is 0");
  const void* const pointers[] = {p.streams, p.norm, p.q_norm, p.kv_norm, p.positions, p.freqs, p.slots, p.maps, p.scales[0], p.scales[1], p.cache,
                                  p.x, p.q_lora, p.q, p.workspace, p.state, p.fault};
  for (const void* pointer : pointers) require(pointer != nullptr, "a pointer of the parameters is null");
}

}  // namespace sgl_lowlatency::launch
