// One warp of each block mixes streams: the coefficients that mHC's post and combine need, from the streams that the sublayer's input was made of.
//
//   mixes = (mix @ r) / sqrt(mean(r^2) + mix_rms_eps),   r: a row's streams, kStreams * hidden values
//   pre = sigmoid(mixes[0..3] * scale[0] + base[0..3]) + eps;   post = 2 sigmoid(mixes[4..7] * scale[1] + base[4..7])
//   comb = softmax of the rows of (mixes[8..] * scale[2] + base[8..]) [4, 4], + eps;   comb /= sums of columns + eps;
//   then sinkhorn_iterations - 1 times: comb /= sums of rows + eps, comb /= sums of columns + eps
//
// Every block has a share of the columns, for all rows; one block a row adds up and normalises. All of it is hidden behind the weights' stream:
// attention_out's mixer warp does it, and fused_moe's router warp once the rows are routed.
#pragma once
#include "sgl_lowlatency/stages/hyper_connection.hpp"

namespace sgl_lowlatency::stages {

constexpr int32_t kMixBatch = 8;  // vectors of partial sums that a lane asks for at a time

// Of 2 kHalf values a lane, lane l gets the sum of value l over the lanes that differ from it in bits below 2 kHalf. With 16, the warp's sums.
// Entry: all lanes.
template <int32_t kHalf>
SGL_DEVICE float scatter_sums(float (&v)[2 * kHalf]) {
  const bool is_upper = (dialect::thread_idx() & kHalf) != 0;
  float sums[kHalf];
SGL_UNROLL
  for (int32_t i = 0; i < kHalf; ++i) {
    const float keep = is_upper ? v[i + kHalf] : v[i], give = is_upper ? v[i] : v[i + kHalf];
    sums[i] = keep + dialect::shuffle_xor(give, kHalf);
  }
  if constexpr (kHalf == 1) {
    return sums[0];
  } else {
    return scatter_sums<kHalf / 2>(sums);
  }
}

// Partial sums of a unit's kMixColumns columns for all rows; a lane has four. Entry: all lanes of the warp, behind the launch in front.
SGL_DEVICE void mix_unit(const HyperView& v, int32_t unit) {
  const int32_t lane = dialect::thread_idx() % 32, width = abi::kStreams * v.hidden, column = unit * abi::kMixColumns + lane * 4;
  float weights[abi::kMixes][4];
SGL_UNROLL
  for (int32_t m = 0; m < abi::kMixes; ++m) {
    const Vec16 w = dialect::load_constant(reinterpret_cast<const Vec16*>(v.hyper.mix + static_cast<int64_t>(m) * width + column));
SGL_UNROLL
    for (int32_t i = 0; i < 4; ++i) weights[m][i] = dialect::bits_to_float(w.w[i]);
  }
SGL_NO_UNROLL
  for (int32_t row = 0; row < v.rows; ++row) {
    const uint32_t* const from = reinterpret_cast<const uint32_t*>(v.hyper.streams + static_cast<int64_t>(row) * width + column);
    const uint32_t low = dialect::load_plain(from), high = dialect::load_plain(from + 1);
    const float r[4] = {low_float(low), high_float(low), low_float(high), high_float(high)};
    float sums[32] = {};
SGL_UNROLL
    for (int32_t i = 0; i < 4; ++i) {
SGL_UNROLL
      for (int32_t m = 0; m < abi::kMixes; ++m) sums[m] += weights[m][i] * r[i];
      sums[abi::kMixes] += r[i] * r[i];
    }
    uint32_t word[1] = {dialect::float_to_bits(scatter_sums<16>(sums))};
    if (dialect::planted(dialect::Planted::kWithheldMix) && unit == 0 && row == 0) continue;
    if (lane < abi::kMixWords) sync::publish(v.mix + (static_cast<int64_t>(unit) * v.rows + row) * abi::kMixWords + lane, word);
  }
}

// A row's sums over all units: lane l, l < kMixWords / 4, and those 8, 16 and 24 further have the words 4l .. 4l + 3. The lanes of one l add up every
// fourth unit each, in order, and then their sums. Entry: all lanes.
SGL_DEVICE void await_mixes(const HyperView& v, int32_t row, float (&sum)[4]) {
  const int32_t lane = dialect::thread_idx() % 32, vector = lane % 8, units = abi::mix_units(v.hidden);
  const auto index = [&](int32_t unit) { return (static_cast<int64_t>(unit) * v.rows + row) * abi::kMixWords + vector * 4; };
  sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
SGL_NO_UNROLL
  for (int32_t first = lane / 8; first < units; first += 4 * kMixBatch) {
    uint32_t part[kMixBatch][4];
    const auto is_there = [&](int32_t i) { return vector < abi::kMixWords / 4 && first + 4 * i < units; };
SGL_UNROLL
    for (int32_t i = 0; i < kMixBatch; ++i) part[i][0] = part[i][1] = part[i][2] = part[i][3] = is_there(i) ? abi::kUnwritten : 0u;
    sync::wait_until(
        v.sink, abi::kFaultEdgeDeadline, 0, v.mix_edge, static_cast<uint32_t>(index(first)),
        [&] {
          bool is_complete = true;
SGL_UNROLL
          for (int32_t i = 0; i < kMixBatch; ++i) {
            if (!sync::is_written(part[i])) dialect::load_words(part[i], v.mix + index(first + 4 * i));
          }
SGL_UNROLL
          for (int32_t i = 0; i < kMixBatch; ++i) is_complete = is_complete && sync::is_written(part[i]);
          return is_complete || dialect::planted(dialect::Planted::kMissingAwait);
        },
        [] { return abi::kUnwritten; });
SGL_UNROLL
    for (int32_t i = 0; i < kMixBatch; ++i) {
SGL_UNROLL
      for (int32_t j = 0; j < 4; ++j) sum[j] += dialect::bits_to_float(part[i][j]);
    }
  }
  dialect::sync_warp();
SGL_UNROLL
  for (int32_t mask = 8; mask < 32; mask *= 2) {
SGL_UNROLL
    for (int32_t j = 0; j < 4; ++j) sum[j] += dialect::shuffle_xor(sum[j], mask);
  }
}

SGL_DEVICE float sigmoid(float x) { return dialect::divide_full(1.0f, 1.0f + dialect::exp(-x)); }

// comb[i]: row lane % 4 of the matrix. Entry: all lanes.
SGL_DEVICE void normalise_rows(float (&comb)[4], float eps) {
  const float sum = comb[0] + comb[1] + comb[2] + comb[3] + eps;
SGL_UNROLL
  for (int32_t i = 0; i < 4; ++i) comb[i] = dialect::divide_full(comb[i], sum);
}
SGL_DEVICE void normalise_columns(float (&comb)[4], float eps) {
SGL_UNROLL
  for (int32_t i = 0; i < 4; ++i) {
    float sum = comb[i] + dialect::shuffle_xor(comb[i], 1);
    sum += dialect::shuffle_xor(sum, 2);
    comb[i] = dialect::divide_full(comb[i], sum + eps);
  }
}

// Hands a row's coefficients to all blocks. Entry: all lanes of the warp.
SGL_DEVICE void make_coefficients(const HyperView& v, int32_t row) {
  const int32_t lane = dialect::thread_idx() % 32, j = lane % 4;
  float sum[4], pre[4], post[4], comb[4];
  await_mixes(v, row, sum);
  const float square_sum = dialect::bits_to_float(dialect::shuffle(dialect::float_to_bits(sum[0]), abi::kMixes / 4));
  const float inverse_rms = dialect::rsqrt(square_sum / static_cast<float>(abi::kStreams * v.hidden) + v.hyper.mix_rms_eps);
  const auto mixed = [&](int32_t i, int32_t vector, int32_t part) {
    const float value = dialect::bits_to_float(dialect::shuffle(dialect::float_to_bits(sum[i]), vector));
    return value * inverse_rms * dialect::load_constant(v.hyper.mix_scale + part) + dialect::load_constant(v.hyper.mix_base + vector * 4 + i);
  };
SGL_UNROLL
  for (int32_t i = 0; i < 4; ++i) {
    pre[i] = sigmoid(mixed(i, 0, 0)) + v.hyper.mix_eps;
    post[i] = 2.0f * sigmoid(mixed(i, 1, 1));
    comb[i] = mixed(i, 2 + j, 2);
  }
  float largest = comb[0];
SGL_UNROLL
  for (int32_t i = 1; i < 4; ++i) largest = comb[i] > largest ? comb[i] : largest;
SGL_UNROLL
  for (int32_t i = 0; i < 4; ++i) comb[i] = dialect::exp(comb[i] - largest);
  normalise_rows(comb, 0.0f);
SGL_UNROLL
  for (int32_t i = 0; i < 4; ++i) comb[i] += v.hyper.mix_eps;
  normalise_columns(comb, v.hyper.mix_eps);
  const int32_t iterations = dialect::planted(dialect::Planted::kShortSinkhorn) ? 1 : v.hyper.sinkhorn_iterations;
SGL_NO_UNROLL
  for (int32_t n = 1; n < iterations; ++n) {
    normalise_rows(comb, v.hyper.mix_eps);
    normalise_columns(comb, v.hyper.mix_eps);
  }
  if (lane >= abi::kMixes / 4) return;  // lanes 0..3: rows of comb; 4: pre; 5: post
  const int32_t vector = lane < 4 ? 2 + lane : lane - 4;
  uint32_t word[4];
SGL_UNROLL
  for (int32_t i = 0; i < 4; ++i) {
    const float value = lane < 4 ? comb[i] : lane == 4 ? pre[i] : post[i];
    word[i] = dialect::float_to_bits(value);
    if (v.hyper.coefficients != nullptr) dialect::store_plain(v.hyper.coefficients + row * abi::kMixes + vector * 4 + i, value);
  }
  if (dialect::planted(dialect::Planted::kWithheldCoefficients) && row == 0) return;
  sync::publish(v.coefficients + row * abi::kMixes + vector * 4, word);
}

// The block's units of all rows, then the rows whose coefficients it makes: of the last blocks, one each. Entry: all lanes of the warp.
SGL_DEVICE void mix_streams(const HyperView& v) {
  const abi::TileRange own = abi::even_share(abi::mix_units(v.hidden), dialect::block_idx(), dialect::grid_dim());
SGL_NO_UNROLL
  for (int32_t unit = own.begin; unit < own.begin + own.count; ++unit) mix_unit(v, unit);
SGL_NO_UNROLL
  for (int32_t row = dialect::grid_dim() - 1 - dialect::block_idx(); row < v.rows; row += dialect::grid_dim()) make_coefficients(v, row);
}

}  // namespace sgl_lowlatency::stages
