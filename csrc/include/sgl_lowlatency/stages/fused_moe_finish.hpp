// What becomes of a fused_moe unit's products: of a static one, of which each warp has a part, and of experts, which are a warp's own.
#pragma once
#include "sgl_lowlatency/stages/fused_moe_tile.hpp"

namespace sgl_lowlatency::stages {

// The warps' tiles into scratch: of slot `slot` and part `part`, [16][8]. A consumer barrier must follow.
SGL_DEVICE void keep_moe_tile(float* scratch, int32_t slot, int32_t part, const MoeTile& tile) {
  const int32_t lane = dialect::thread_idx() % 32;
  float* const at = scratch + (slot * 2 + part) * 128 + lane / 4 * 8 + lane % 4 * 2;
  at[0] = tile.sum(0);
  at[1] = tile.sum(1);
  at[64] = tile.sum(2);
  at[65] = tile.sum(3);
}

// Sum of kSlots slots from `first` on, in their order.
template <int32_t kSlots>
SGL_DEVICE float moe_scratch_sum(const float* scratch, int32_t first, int32_t part, int32_t element) {
  float sum = 0.0f;
SGL_UNROLL
  for (int32_t slot = 0; slot < kSlots; ++slot) sum += scratch[((first + slot) * 2 + part) * 128 + element];
  return sum;
}

SGL_DEVICE float clamped_swiglu(float gate, float up, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return swiglu(gate, up);
}

// Activations of 16 channels of every column, of the shared expert: part 0 is gate. Entry: all consumer threads, behind the barrier that follows
// keep_moe_tile.
SGL_DEVICE void finish_shared_gate_up(const FusedMoeParams& p, const float* scratch, int32_t tile, int32_t vector, int32_t count,
                                      const MoeWords& words) {
  const int32_t thread = dialect::thread_idx(), part = thread % 2, is_second = thread / 2 % 2, column = thread / 4 % 8, pair = thread / 32;
  const int32_t element = (pair * 2 + is_second) * 8 + column;  // of 16 channels; a warp has two of them, so that they meet in shuffles
  float gate = moe_scratch_sum<4>(scratch, part * 4, 0, element);
  float up = moe_scratch_sum<4>(scratch, part * 4, 1, element);
  gate += dialect::shuffle_xor(gate, 1);
  up += dialect::shuffle_xor(up, 1);
  const float own = clamped_swiglu(gate, up, p.swiglu_limit), next = dialect::shuffle_xor(own, 2);
  if (part != 0 || is_second != 0 || column >= count) return;
  if (dialect::planted(dialect::Planted::kWithheldSignal) && tile == 0) return;
  uint32_t word[1] = {pack_bf16(own, next)};
  sync::publish(words.activation() + static_cast<int64_t>(vector + column) * (p.geometry.intermediate / 2) + tile * 8 + pair, word);
}

// kMoeDownRows channels of every column, of the shared expert. Entry: as finish_shared_gate_up.
SGL_DEVICE void finish_shared_down(const FusedMoeParams& p, const float* scratch, int32_t tile, int32_t vector, int32_t count,
                                   const MoeWords& words) {
  static_assert(abi::kMoeDownRows == 32, "a row a lane, a column a warp");
  const int32_t row = dialect::thread_idx() % 32, column = dialect::thread_idx() / 32;
  if (column >= count) return;
  uint32_t word[1] = {dialect::float_to_bits(moe_scratch_sum<8>(scratch, 0, row / 16, row % 16 * 8 + column))};
  sync::publish(words.output() + static_cast<int64_t>(vector + column) * p.geometry.hidden + tile * abi::kMoeDownRows + row, word);
}

SGL_DEVICE void finish_router(const FusedMoeParams& p, const float* scratch, int32_t item, int32_t row, int32_t count, const MoeWords& words) {
  const int32_t thread = dialect::thread_idx(), expert = thread % 16, column = thread / 16, splits = abi::moe_splits(p.geometry);
  if (column >= count) return;
  uint32_t word[1] = {dialect::float_to_bits(moe_scratch_sum<8>(scratch, 0, 0, expert * 8 + column))};
  sync::publish(words.logits() + (item % splits * p.rows + row + column) * p.geometry.num_experts + item / splits * 16 + expert, word);
}

// Calls each(n, m, y): y are values m, m + 1 of a warp's 16, of column n < count. A lane of the MMA's result has rows g and g + 8 of columns 2t and
// 2t + 1: neighbouring lanes of g swap one each. v(i): the lane's value number i. Entry: all lanes.
template <class Value, class Each>
SGL_DEVICE void visit_moe_pairs(int32_t count, const Value& v, const Each& each) {
  const int32_t lane = dialect::thread_idx() % 32;
  const bool is_odd = lane / 4 % 2 != 0;
SGL_UNROLL
  for (int32_t half = 0; half < 2; ++half) {
    const float first = v(half * 2), second = v(half * 2 + 1), other = dialect::shuffle_xor(is_odd ? first : second, 4);
    const int32_t n = lane % 4 * 2 + is_odd, m = half * 8 + lane / 8 * 2;
    if (n < count) each(n, m, is_odd ? Float2{other, second} : Float2{first, other});
  }
}

// A warp's finished unit of experts: activations of 16 channels, the first tile being up, or kMoeDownRows channels. Entry: all lanes.
SGL_DEVICE void finish_routed(const FusedMoeParams& p, MoeOp op, const MoeTile (&tiles)[2], int32_t tile, int32_t vector, int32_t count,
                              const MoeWords& words) {
  if (op == abi::kMoeGateUp) {
    visit_moe_pairs(count, [&](int32_t i) { return clamped_swiglu(tiles[1].sum(i), tiles[0].sum(i), p.swiglu_limit); },
                    [&](int32_t n, int32_t m, const Float2& y) {
                      uint32_t word[1] = {pack_bf16(y.x, y.y)};
                      sync::publish(words.activation() + static_cast<int64_t>(vector + n) * (p.geometry.intermediate / 2) + tile * 8 + m / 2, word);
                    });
    return;
  }
SGL_UNROLL
  for (int32_t part = 0; part < 2; ++part) {
    visit_moe_pairs(count, [&](int32_t i) { return tiles[part].sum(i); }, [&](int32_t n, int32_t m, const Float2& y) {
      uint32_t word[2] = {dialect::float_to_bits(y.x), dialect::float_to_bits(y.y)};
      sync::publish(words.output() + static_cast<int64_t>(vector + n) * p.geometry.hidden + tile * abi::kMoeDownRows + part * 16 + m, word);
    });
  }
}

}  // namespace sgl_lowlatency::stages
