// Parameter checks shared by the CUDA launcher and the emulation. They see the parameters, not the device memory behind pointers.
#include "launch/attention_out.hpp"

#include <string>

#include "launch/hyper_connection.hpp"

namespace sgl_lowlatency::launch {

void check_attention_out(const abi::AttentionOutParams& p, int32_t grid) {
  const abi::AttnOutGeometry& g = p.geometry;
  const SliceCheck check{"attention_out"};
  check.require_within(p.rows, 1, abi::kSliceMaxRows, "rows");
  check.require_multiple(g.hidden, abi::kMixColumns, "hidden");
  check.require(g.groups > 0, "groups " + std::to_string(g.groups) + " is below 1");
  check.require_multiple(g.heads, g.groups, "heads");
  check.require_multiple(g.head_dim, 8, "head_dim");
  check.require_multiple(g.rope_dim, 8, "rope_dim");
  check.require_within(g.rope_dim, 8, g.head_dim, "rope_dim");
  check.require_multiple(g.lora, abi::kTileRows, "lora");
  check.require_multiple(abi::attn_out_group_k(g), abi::chunk_k(2), "a group's width");
  check.require_within(abi::attn_out_group_k(g), abi::chunk_k(2), abi::kAttnOutMaxPanel, "a group's width");
  check.require_multiple(abi::attn_out_latent(g), abi::chunk_k(1), "latent width");
  check.require_within(abi::attn_out_latent(g), abi::chunk_k(1), abi::kAttnOutMaxLatent, "latent width");
  check.require(p.norm_eps >= 0.0f, "norm_eps is negative");
  check_hyper_connection(check.kernel, p.hyper);
  check.require(p.x_stride % 8 == 0 && p.x_stride >= g.heads * g.head_dim,
          "x_stride " + std::to_string(p.x_stride) + " is not a multiple of 8 that holds a row");
  check.require_launch(p, grid, abi::attn_out_smem(g, p.rows), abi::attn_out_handover(g, p.rows, grid).total_words,
                       {p.x, p.positions, p.freqs, p.norm, p.maps, p.scales, p.out, p.workspace, p.state, p.fault});
}

}  // namespace sgl_lowlatency::launch
