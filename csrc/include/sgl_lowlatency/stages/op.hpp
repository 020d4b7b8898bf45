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

}  // namespace sgl_lowlatency::stages
