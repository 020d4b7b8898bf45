// bitmap_routing: from router logits, or from choices already made, to the experts a step needs and where each row's share of them lies.
//
//   ids[r], weights[r] = top_k of softmax(logits[r])    by logit, ties to the lower id; weights over their sum, if asked for
//   row_bits[e] = { r : e in ids[r] };   experts = { e : row_bits[e] != 0 }, ascending;   places[r, k] = index of ids[r, k] in experts
//
// Tensors   logits [rows, num_experts] fp32 or bf16, or ids [rows, top_k] int32 and weights [rows, top_k] fp32; out: a RoutingLayout
//           (abi/bitmap_routing.hpp). rows 0..32, num_experts 1..384, top_k 1..32.
// Grid      one block of abi::routing_warps(rows) warps.
// Roles     all warps do the same, each for rows and words of its own.
// Phases    a warp a row: its choices | a warp a word of 32 experts: their row bits and places; a thread a choice: its place | the copy out.
// Hand-over none: the block's barriers part the phases. The launch in front may still run when this one begins: it waits before it reads.
#pragma once
#include <type_traits>

#include "sgl_lowlatency/stages/bitmap_routing.hpp"

namespace sgl_lowlatency::kernels {

using namespace stages;

SGL_DEVICE float logit_at(const float* row, int32_t expert) { return dialect::load_plain(row + expert); }
SGL_DEVICE float logit_at(const abi::bf16* row, int32_t expert) { return dialect::to_float(dialect::load_plain(row + expert)); }

// kWords: of 32 experts, enough for num_experts. Logit: abi::bf16 or float, as logits_type says. Loads are plain: the launch in front may
// write what is read here while this one already runs. Entry: every thread of the block.
template <int32_t kWords, class Logit>
SGL_DEVICE void bitmap_routing_body(const abi::BitmapRoutingParams& p) {
  dialect::await_previous_launch();
  dialect::allow_next_launch();
  const Routing r{p.at, dialect::shared_base()};
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32, num_warps = abi::routing_warps(p.rows);
  const int32_t num_live = p.num_live_rows == nullptr ? p.rows : dialect::load_plain(p.num_live_rows);
SGL_NO_UNROLL
  for (int32_t row = warp; row < p.rows; row += num_warps) {
    if (p.ids != nullptr) {
      take_choices(r, row, p.num_experts, p.top_k, row < num_live, p.ids + row * p.top_k, p.weights + row * p.top_k,
                   {p.fault, p.rank, 0}, 0);
    } else if (row < num_live) {
      const Logit* const logits = static_cast<const Logit*>(p.logits) + static_cast<int64_t>(row) * p.logits_stride;
      choose_experts<kWords, std::is_same_v<Logit, abi::bf16>>(r, row, p.num_experts, p.top_k, p.renormalizes != 0,
                                                               [&](int32_t w) { return logit_at(logits, w * 32 + lane); });
    } else {
      choose_nothing(r, row, p.top_k);
    }
  }
  if (!dialect::planted(dialect::Planted::kUnsyncedChoices)) dialect::sync_block();
  place_experts<kWords>(r, p.rows, p.num_experts, p.top_k, warp, num_warps);
  dialect::sync_block();
SGL_NO_UNROLL
  for (int32_t i = dialect::thread_idx(); i < p.at.out_bytes / 16; i += num_warps * 32) {
    dialect::store_plain(reinterpret_cast<dialect::Vec16*>(p.out) + i, reinterpret_cast<const dialect::Vec16*>(r.base)[i]);
  }
}

}  // namespace sgl_lowlatency::kernels
