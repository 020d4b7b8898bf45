// Which of a layer's operations a stage runs: a number that is known when the code is compiled, or one that code shared by several
// operations is handed. What depends on it is written once, `op == abi::kOpGateUp`, and folds away for a StaticOp.
#pragma once
#include "sgl_lowlatency/abi/decode_step.hpp"
#include "sgl_lowlatency/dialect/dialect.hpp"

namespace sgl_lowlatency::stages {

template <int32_t kOp>
struct StaticOp {
  SGL_DEVICE constexpr operator int32_t() const { return kOp; }
};

// One of a MoE layer's operations of static tiles, which share code: qkv, out_proj or router. That it is another one folds away.
struct MoeOp {
  int32_t number;
  SGL_DEVICE operator int32_t() const { return number; }
};
SGL_DEVICE bool operator==(MoeOp op, abi::OpIdx other) {
  return (other == abi::kOpQkv || other == abi::kOpOutProj || other == abi::kOpRouter) && op.number == static_cast<int32_t>(other);
}

// Bytes of a weight of operation `op` where those of layers have kElementBytes: a router is bf16 always.
template <int32_t kElementBytes, class Op>
SGL_DEVICE int32_t weight_bytes(Op) { return kElementBytes; }
template <int32_t kElementBytes>
SGL_DEVICE int32_t weight_bytes(MoeOp op) { return op == abi::kOpRouter ? 2 : kElementBytes; }

}  // namespace sgl_lowlatency::stages
