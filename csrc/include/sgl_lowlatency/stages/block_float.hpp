// Weights of fewer bits than the MMA takes: its A fragments from words of FP4 and FP8, exactly, in registers.
#pragma once
#include "sgl_lowlatency/dialect/dialect.hpp"

namespace sgl_lowlatency::stages {

// The factor of e2m1 values of a block with e8m0 scale `byte` <= abi::kMoeMaxScaleByte, twice. fp4_fragment leaves values 2^126 too small:
// 2^(byte - 127) times 2^126 has the exponent field byte + 126.
SGL_DEVICE uint32_t fp4_factor(uint32_t byte) { return (byte + 126u) * 0x00800080u; }

// A fragment of m16n8k16 from one word of the interleaved FP4 layout. The word holds, for a lane's rows g and g + 8, columns 2t, 2t + 1 and
// 2t + 8, 2t + 9: in each half, sign and e2m1 bits of a[0] at bits 15 and 8..6, where bf16 has its sign, the low exponent bits and the high
// mantissa bit; of a[1] three bits below, of a[2] six; of a[3] what is left: sign at 14, mantissa at 13, exponent at 11..10.
// Subnormals are no exception: 0.5 comes as a subnormal bf16. first, last: factors (fp4_factor) of rows g and g + 8.
SGL_DEVICE void fp4_fragment(uint32_t word, uint32_t first, uint32_t last, uint32_t (&a)[4]) {
  constexpr uint32_t kValue = 0x81c081c0u;
  a[0] = dialect::multiply_bf16x2(word & kValue, first);
  a[1] = dialect::multiply_bf16x2(word << 3 & kValue, last);
  a[2] = dialect::multiply_bf16x2(word << 6 & kValue, first);
  a[3] = dialect::multiply_bf16x2((word << 1 & 0x80008000u) | (word >> 3 & 0x01800180u) | (word >> 7 & 0x00400040u), last);
}

// The factor of e4m3fn values of a block with scale `scale`, a power of two up to 2^7, twice: fp8_pairs leaves values 2^120 too small.
SGL_DEVICE uint32_t fp8_factor(float scale) {
  const uint32_t bits = (dialect::float_to_bits(scale) >> 16) + (120u << 7);
  return bits | bits << 16;
}

// Four e4m3fn times the factor: pairs[0] has bytes 0 and 2 as two bf16, pairs[1] bytes 1 and 3. The NaN codes come out as 480 and -480.
SGL_DEVICE void fp8_pairs(uint32_t word, uint32_t factor, uint32_t (&pairs)[2]) {
  const uint32_t even = word << 8;
  pairs[0] = dialect::multiply_bf16x2((even & 0x80008000u) | (even >> 4 & 0x07f007f0u), factor);
  pairs[1] = dialect::multiply_bf16x2((word & 0x80008000u) | (word >> 4 & 0x07f007f0u), factor);
}

// The B fragment that goes with fp8_pairs, from four consecutive columns in two words.
SGL_DEVICE void split_pairs(uint32_t first, uint32_t second, uint32_t (&b)[2]) {
  b[0] = (first & 0xffffu) | second << 16;
  b[1] = first >> 16 | (second & 0xffff0000u);
}

}  // namespace sgl_lowlatency::stages
