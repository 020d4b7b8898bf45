// Parameter checks shared by the CUDA launcher and the emulation.
#include "launch/bitmap_routing.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace sgl_lowlatency::launch {
namespace {

void require(bool is_met, const std::string& what) {
  if (!is_met) throw std::invalid_argument("bitmap_routing: " + what);
}

}  // namespace

void check_bitmap_routing(const abi::BitmapRoutingParams& p) {
  const auto text = [](int64_t v) { return std::to_string(v); };
  require(p.rows >= 0 && p.rows <= abi::kMaxRows, "rows " + text(p.rows) + " is outside 0.." + text(abi::kMaxRows));
  require(p.num_experts >= 1 && p.num_experts <= abi::kMaxExperts, "num_experts " + text(p.num_experts) + " is outside 1.." + text(abi::kMaxExperts));
  const int32_t most = std::min(p.num_experts, abi::kMaxTopK);
  require(p.top_k >= 1 && p.top_k <= most, "top_k " + text(p.top_k) + " is outside 1.." + text(most));
  const abi::RoutingLayout at = abi::routing_layout(p.rows, p.num_experts, p.top_k);
  require(std::memcmp(&at, &p.at, sizeof(at)) == 0, "the layout is not that of rows, num_experts and top_k");
  require((p.logits != nullptr) != (p.ids != nullptr), "it takes either logits or ids");
  require((p.ids != nullptr) == (p.weights != nullptr), "ids and weights come together");
  require(p.logits_type >= 0 && p.logits_type < abi::kNumLogitsTypes, "logits_type " + text(p.logits_type) + " is not a LogitsType");
  require(p.logits == nullptr || p.logits_stride >= p.num_experts,
          "logits_stride " + text(p.logits_stride) + " is below num_experts " + text(p.num_experts));
  require(p.out != nullptr && reinterpret_cast<uintptr_t>(p.out) % 16 == 0, "the address of out is null or not a multiple of 16");
  require(p.fault != nullptr, "there is no fault record");
}

}  // namespace sgl_lowlatency::launch
