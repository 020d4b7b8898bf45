// The experts of a MoE layer on the MFMA. The active experts' tiles follow one another by place and are shared out evenly; columns of the MFMA are
// the rows of the step, of which an expert's are those that have chosen it.
#pragma once
#include "sgl_lowlatency/stages/wave_routing.hpp"
#include "sgl_lowlatency/stages/wave_tile.hpp"

namespace sgl_lowlatency::stages {

// gate_up of the active experts: tile t is number t % tiles of the expert at place t / tiles. weight: [num_experts, 2 * channels, k_extent].
struct ExpertGateUp {
  int64_t upper;
  const bf16* weight;
  const MonoRouting* routing;
  int32_t k_extent;
  int32_t channels;
  SGL_DEVICE ExpertGateUp(const bf16* gate_up, const MonoRouting* r, int32_t num_channels, int32_t k)
      : upper(static_cast<int64_t>(num_channels - abi::kTileRows / 2) * k), weight(gate_up), routing(r), k_extent(k), channels(num_channels) {}
  SGL_DEVICE int32_t tiles() const { return channels / (abi::kTileRows / 2); }
  SGL_DEVICE const bf16* at(int32_t tile) const {
    const int32_t expert = dialect::uniform(routing->experts[tile / tiles()]);
    return weight + (static_cast<int64_t>(expert) * 2 * channels + tile % tiles() * (abi::kTileRows / 2)) * k_extent;
  }
};

// down, for output tiles from `first` on: number t is tile first + t / num_active of the expert at place t % num_active. weight: [num_experts,
// hidden, k_extent].
struct ExpertDown {
  static constexpr int64_t upper = 0;
  const bf16* weight;
  const MonoRouting* routing;
  int32_t k_extent;
  int32_t hidden;
  int32_t first;
  int32_t num_active;
  SGL_DEVICE const bf16* at(int32_t t) const {
    int32_t expert = dialect::uniform(routing->experts[t % num_active]);
    if (dialect::planted(dialect::Planted::kNextExpert)) expert = expert > 0 ? expert - 1 : 1;
    return weight + (static_cast<int64_t>(expert) * hidden + (first + t / num_active) * abi::kTileRows) * k_extent;
  }
};

// The row's weight of the expert, 0 if it has not chosen it.
SGL_DEVICE float weight_of(const MonoRouting* r, int32_t row, int32_t expert, int32_t top_k) {
  float weight = 0.0f;
SGL_NO_UNROLL
  for (int32_t k = 0; k < top_k; ++k) weight = r->ids[row][k] == expert ? r->weights[row][k] : weight;
  if (dialect::planted(dialect::Planted::kUnweightedExpert)) return 1.0f;
  return weight;
}

// The block's output tiles of down: for each the sum over the experts, weighed in fp32, of all rows. activation: words [pairs, channels] bf16.
// Pairs go to the panel as many experts at a time as it holds; of an expert that does not fit, some columns at a time.
// finish(tile, n, m, sums) as run_wave_tiles has it. Entry: all threads; routing is there; ring, panel and partials are free. They are again at the
// end.
template <abi::Isa kIsa, class Finish>
SGL_DEVICE void run_expert_down(const MonoLaunch& l, const MonoShared<kIsa>& s, const bf16* weight, const abi::TileRange& own, const Finish& finish) {
  if (own.count == 0) return;
  const abi::Geometry& g = l.geometry;
  const MonoRouting* const r = routing_of(s);
  const int32_t lane = lane_idx(), group = lane / 16, column = lane % 16, thread = dialect::thread_idx(), channels = g.moe_intermediate;
  const int32_t num_active = dialect::uniform(r->num_active);
  const WaveColumns columns = wave_columns(channels);
  const int32_t num_chunks = columns.end - columns.begin, most = MonoShared<kIsa>::kAt.panel_wave_bytes / 64;  // chunks of a pair
  char* const panel = s.panel(wave_idx());
  const ExpertDown matrix{weight, r, channels, g.hidden, own.begin, num_active};
  WaveRing<kIsa, ExpertDown> ring(s, matrix, columns, {0, own.count * num_active});
  ring.fill();
SGL_NO_UNROLL
  for (int32_t tile = own.begin; tile < own.begin + own.count; ++tile) {
    float sum[4] = {};
SGL_NO_UNROLL
    for (int32_t place = 0; place < num_active && num_chunks > 0;) {
      const int32_t first_pair = dialect::uniform(r->first_pairs[place]);
      int32_t end = place + 1;
      while (end < num_active && (dialect::uniform(r->first_pairs[end + 1]) - first_pair) * num_chunks <= most) ++end;
      const int32_t num_pairs = dialect::uniform(r->first_pairs[end]) - first_pair, at_once = min_int(most / num_pairs, num_chunks);
SGL_NO_UNROLL
      for (int32_t begin = columns.begin; begin < columns.end; begin += at_once) {  // once, or of one expert
        const int32_t behind = min_int(begin + at_once, columns.end);
        load_columns(panel, num_pairs, begin, behind,
                     WordOperand{l, l.at.activation + first_pair * channels * 2, abi::kEdgeGateUp, channels, nullptr});
SGL_NO_UNROLL
        for (int32_t i = place; i < end; ++i) {
          const uint32_t bits = r->row_bits[i];
          const bool is_row = (bits >> column & 1u) != 0;
          const int32_t pair = r->first_pairs[i] - first_pair + rows_below(bits, column);
          float product[4] = {};
SGL_NO_UNROLL
          for (int32_t chunk = begin; chunk < behind; ++chunk) {
            const Vec16 a = ring.next();
            Vec16 b = {};
            if (is_row) b = reinterpret_cast<const Vec16*>(panel)[((chunk - begin) * 4 + group) * num_pairs + pair];
            dialect::mfma_16x16x32(product, a, b);
          }
          const float of_row = is_row ? weight_of(r, column, r->experts[i], g.top_k) : 0.0f;
SGL_UNROLL
          for (int32_t j = 0; j < 4; ++j) sum[j] += of_row * product[j];
        }
        dialect::sync_warp();  // the panel is free again
      }
      place = end;
    }
SGL_UNROLL
    for (int32_t j = 0; j < 4; ++j) s.partial(wave_idx(), column)[group * 4 + j] = sum[j];
    dialect::sync_shared();  // partials
    const int32_t n = thread / 8;
    if (n < l.rows) finish(tile, n, thread % 8 * 2, TileSums<kIsa>{s, n});
    dialect::sync_shared();  // partials are free again
  }
}

}  // namespace sgl_lowlatency::stages
