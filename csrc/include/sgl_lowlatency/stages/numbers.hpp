// Pairs of bf16 as they lie in a word, and what every stage computes with.
#pragma once
#include "sgl_lowlatency/dialect/dialect.hpp"

namespace sgl_lowlatency::stages {

using abi::bf16;
using dialect::Vec16;

constexpr float kLog2e = 1.4426950408889634f;

SGL_DEVICE int32_t min_int(int32_t a, int32_t b) { return a < b ? a : b; }

SGL_DEVICE float low_float(uint32_t pair) { return dialect::to_float(bf16{static_cast<uint16_t>(pair & 0xffffu)}); }
SGL_DEVICE float high_float(uint32_t pair) { return dialect::to_float(bf16{static_cast<uint16_t>(pair >> 16)}); }
SGL_DEVICE uint32_t pack_bf16(float low, float high) {
  return static_cast<uint32_t>(dialect::to_bf16(low).bits) | static_cast<uint32_t>(dialect::to_bf16(high).bits) << 16;
}

SGL_DEVICE float swiglu(float gate, float up) { return gate / (1.0f + dialect::exp2(-gate * kLog2e)) * up; }

}  // namespace sgl_lowlatency::stages
