// Parameter checks shared by the CUDA launcher and the emulation. They see the parameters, not the device memory behind pointers.
#include "launch/attention_out.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

namespace sgl_lowlatency::launch {
namespace {

void require(bool is_met, const std::string& what) {
  if (!is_met) throw std::invalid_argument("attention_out: " + what);
}

void require_within(int64_t value, int64_t least, int64_t most, const std::string& name) {
  require(value >= least && value <= most, name + " " + std::to_string(value) + " is outside " + std::to_string(least) + ".." + std::to_string(most));
}

void require_multiple(int32_t value, int32_t of, const std::string& name) {
  require(value > 0 && value % of == 0, name + " " + std::to_string(value) + " is not a positive multiple of " + std::to_string(of));
}

}  // namespace

void check_attention_out(const abi::AttentionOutParams& p, int32_t grid) {
  const abi::AttnOutGeometry& g = p.geometry;
  require_within(p.rows, 1, abi::kSliceMaxRows, "rows");
  require_multiple(g.hidden, abi::kMixColumns, "hidden");
  require(g.groups > 0, "groups " + std::to_string(g.groups) + " is below 1");
  require_multiple(g.heads, g.groups, "heads");
  require_multiple(g.head_dim, 8, "head_dim");
  require_multiple(g.rope_dim, 8, "rope_dim");
  require_within(g.rope_dim, 8, g.head_dim, "rope_dim");
  require_multiple(g.lora, abi::kTileRows, "lora");
  require_multiple(abi::attn_out_group_k(g), abi::chunk_k(2), "a group's width");
  require_within(abi::attn_out_group_k(g), abi::chunk_k(2), abi::kAttnOutMaxPanel, "a group's width");
  require_multiple(abi::attn_out_latent(g), abi::chunk_k(1), "latent width");
  require_within(abi::attn_out_latent(g), abi::chunk_k(1), abi::kAttnOutMaxLatent, "latent width");
  require_within(grid, 1, 4096, "grid");
  require(p.sinkhorn_iterations >= 1, "sinkhorn_iterations " + std::to_string(p.sinkhorn_iterations) + " is below 1");
  require(p.mix_eps >= 0.0f && p.mix_rms_eps >= 0.0f && p.norm_eps >= 0.0f, "an eps is negative");
  require(p.max_position >= 1, "max_position " + std::to_string(p.max_position) + " is below 1");
  require(p.x_stride % 8 == 0 && p.x_stride >= g.heads * g.head_dim,
          "x_stride " + std::to_string(p.x_stride) + " is not a multiple of 8 that holds a row");
  require(p.streams != p.streams_out, "streams_out is streams");
  const abi::SliceSmem shared = abi::attn_out_smem(g, p.rows);
  require(std::memcmp(&shared, &p.shared, sizeof(shared)) == 0, "shared is not attn_out_smem of geometry and rows");
  require(shared.num_stages >= 2, "rows " + std::to_string(p.rows) + " leave the ring fewer than 2 stages");
  require(p.generation_words % 4 == 0 && p.generation_words >= abi::attn_out_handover(g, p.rows).total_words,
          "generation_words are too few for the rows");
  require(p.deadline_ns > 0, "deadline_ns is 0");
  const void* const pointers[] = {p.x, p.positions, p.freqs, p.streams, p.mix, p.mix_scale, p.mix_base, p.norm, p.maps, p.scales, p.streams_out,
                                  p.out, p.workspace, p.state, p.fault};
  for (const void* pointer : pointers) require(pointer != nullptr, "a pointer of the parameters is null");
}

}  // namespace sgl_lowlatency::launch
