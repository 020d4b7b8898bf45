// Instantiates bitmap_routing for the host dialect.
#include "emulation/bitmap_routing.hpp"

#include "kernels/nvidia/bitmap_routing/bitmap_routing.hpp"
#include "launch/bitmap_routing.hpp"

namespace sgl_lowlatency::emulation {
namespace {

template <class Logit>
void run_words(const abi::BitmapRoutingParams& p) {
  if (p.num_experts <= 128) return kernels::bitmap_routing_body<4, Logit>(p);
  p.num_experts <= 256 ? kernels::bitmap_routing_body<8, Logit>(p) : kernels::bitmap_routing_body<abi::kExpertWords, Logit>(p);
}

}  // namespace

Report bitmap_routing(const abi::BitmapRoutingParams& params, const Options& options) {
  launch::check_bitmap_routing(params);
  return launch(1, abi::routing_warps(params.rows) * 32, static_cast<size_t>(params.at.total_bytes), [&] {
    params.logits_type == abi::kLogitsBf16 ? run_words<abi::bf16>(params) : run_words<float>(params);
  }, options);
}

}  // namespace sgl_lowlatency::emulation
