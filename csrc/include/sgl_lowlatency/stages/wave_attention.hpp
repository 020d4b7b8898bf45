// Decode attention over the paged pool on the MFMA, split over workgroups by tokens:
//   out[row, h] = sum_t softmax_t(scale * q[row, h] . k[slot_t, h / group]) v[slot_t, h / group],  t in [0, row's own token]
// The launch before has written the new tokens' k and v: every token comes from the pool.
//
// An item is a KV head, up to kItemColumns query heads of it (of one row, or of several of a request: the columns of the MFMA), and a range of
// tokens. A wave takes kBatchTokens of them at a time, straight from the pool into the MFMA's operands (lane = 16 g + i). K may be permuted if both
// operands agree:
//   S[16 tokens, columns] = K q^T   twice; A: token i, elements g * head_dim/4 + 8 j .. of step j; B: the same of q of column i
//   O[d, columns] += V^T P          A: row i of tile e is d = i * head_dim/16 + e; K: tokens 4 g .. 4 g + 3 of both halves of the batch. So B, P,
//                                   is S as the first MFMA left it, and V's rows are read in runs of head_dim/16 elements: neither
//                                   passes through shared memory.
#pragma once
#include "sgl_lowlatency/abi/monokernel.hpp"
#include "sgl_lowlatency/stages/wave_rows.hpp"

namespace sgl_lowlatency::stages {

constexpr float kLeastScore = -3.4028235e38f;  // the lowest finite float: no score is below it, and the difference of two is 0

// How a step's attention is cut, a pure function of lengths and grid. With U = mono_request_units and L_r the tokens of a request:
//   chunk = max(kMinItemTokens, ceil(sum_r L_r * U / grid)),  splits_r = max(1, floor(L_r / chunk)),  at most grid + requests * U items
struct WaveSplit {
  int32_t chunk;
  int32_t units;
  int32_t item_rows;
  int32_t row_groups;
  int32_t num_requests;
  int32_t num_items;
};
// Number idx of the items: requests in order, of each all units of split 0, then of split 1, ...
struct WaveItem {
  int32_t first_row, num_rows;
  int32_t request;
  int32_t kv_head;
  int32_t begin, end;  // tokens; end: what the last row sees
  int32_t split, num_splits;
  int32_t slot_stride;  // items from a split to the next
};

template <class Shared>
SGL_DEVICE int32_t wave_splits(const Shared& s, const WaveSplit& a, int32_t request) {
  const int32_t splits = s.rows()->row[request].length / a.chunk;
  return splits > 1 ? splits : 1;
}

// Entry: any thread, behind the barrier that follows MonoRow::length.
template <class Shared>
SGL_DEVICE WaveSplit split_items(const MonoLaunch& l, const Shared& s) {
  WaveSplit a;
  a.item_rows = abi::mono_item_rows(l.geometry, l.rows_per_request);
  a.row_groups = (l.rows_per_request + a.item_rows - 1) / a.item_rows;
  a.units = l.geometry.num_kv_heads * a.row_groups;
  a.num_requests = l.rows / l.rows_per_request;
  int32_t tokens = 0;
  for (int32_t request = 0; request < a.num_requests; ++request) tokens += s.rows()->row[request].length;
  const int32_t share = static_cast<int32_t>((static_cast<int64_t>(tokens) * a.units + l.grid - 1) / l.grid);
  a.chunk = share > abi::kMinItemTokens ? share : abi::kMinItemTokens;
  a.num_items = 0;
  for (int32_t request = 0; request < a.num_requests; ++request) a.num_items += wave_splits(s, a, request) * a.units;
  return a;
}

template <class Shared>
SGL_DEVICE WaveItem item_of(const MonoLaunch& l, const Shared& s, const WaveSplit& a, int32_t idx) {
  WaveItem item{};
  int32_t first = 0;
  for (int32_t request = 0; request < a.num_requests; ++request) {
    const int32_t splits = wave_splits(s, a, request), count = splits * a.units;
    if (idx < first + count) {
      const int32_t unit = (idx - first) % a.units, in_request = unit % a.row_groups * a.item_rows, length = s.rows()->row[request].length;
      const auto begin_of = [&](int32_t split) {
        return split == splits ? length : static_cast<int32_t>(static_cast<int64_t>(length) * split / splits) / abi::kBatchTokens * abi::kBatchTokens;
      };
      item.request = request;
      item.kv_head = unit / a.row_groups;
      item.first_row = request * l.rows_per_request + in_request;
      item.num_rows = min_int(a.item_rows, l.rows_per_request - in_request);
      item.split = (idx - first) / a.units;
      item.num_splits = splits;
      item.slot_stride = a.units;
      item.begin = begin_of(item.split);
      const int32_t seen = length - (l.rows_per_request - in_request - item.num_rows);
      item.end = min_int(begin_of(item.split + 1), seen);
      return item;
    }
    first += count;
  }
  return item;
}

// What of an item a lane's column is.
struct WaveColumn {
  bool is_live;
  int32_t row, head;
  int32_t end;  // tokens that the row sees
};
template <class Shared>
SGL_DEVICE WaveColumn column_of(const MonoLaunch& l, const Shared& s, const WaveItem& item, int32_t column) {
  const int32_t group = l.geometry.num_q_heads / l.geometry.num_kv_heads, row = item.first_row + column / group;
  WaveColumn c{column < item.num_rows * group, row, item.kv_head * group + column % group, 0};
  const int32_t behind = l.rows_per_request - 1 - row % l.rows_per_request;  // new tokens behind the row's own
  c.end = s.rows()->row[item.request].length - (dialect::planted(dialect::Planted::kSeesSibling) && behind > 0 ? behind - 1 : behind);
  return c;
}

// A run of V elements of one lane: 8 of a head of 128, 4 of 64.
template <int32_t kHeadDim>
SGL_DEVICE void load_run(const bf16* at, uint32_t (&words)[kHeadDim / 32]) {
  if constexpr (kHeadDim == 128) {
    const Vec16 v = dialect::load_plain(reinterpret_cast<const Vec16*>(at));
    for (int32_t i = 0; i < 4; ++i) words[i] = v.w[i];
  } else {
    const uint64_t v = dialect::load_plain(reinterpret_cast<const uint64_t*>(at));
    words[0] = static_cast<uint32_t>(v);
    words[1] = static_cast<uint32_t>(v >> 32);
  }
}

// Running softmax of a wave for column lane % 16: max_score (log2 units) is the column's, sum this lane's tokens', out[e][j] of d = (4 g + j) *
// head_dim/16 + e.
template <int32_t kHeadDim>
struct WaveSoftmax {
  static constexpr int32_t kRun = kHeadDim / 16;
  float max_score = kLeastScore;
  float sum = 0.0f;
  float out[kRun][4] = {};

  // Tokens [first, first + kBatchTokens) of the item, below `end`. Entry: all lanes.
  SGL_DEVICE void attend(const abi::K2Params& p, const int32_t* slots, int32_t first, int32_t end, int32_t row, const WaveColumn& column,
                         int32_t kv_head, const Vec16 (&q)[kHeadDim / 32]) {
    constexpr int32_t kSteps = kHeadDim / 32;
    const abi::Geometry& g = p.launch.geometry;
    const int32_t lane = lane_idx(), i = lane % 16, group = lane / 16;
    if (dialect::planted(dialect::Planted::kWrongKvHead)) kv_head = (kv_head + 1) % g.num_kv_heads;
    uint32_t slot[2];
    float score[2][4] = {};
SGL_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t shift = dialect::planted(dialect::Planted::kOffByOnePage) ? 1 : 0;
      slot[half] = static_cast<uint32_t>(dialect::load_constant(slots + min_int(first + half * 16 + i, end - 1) + shift));
      if (slot[half] >= static_cast<uint32_t>(g.num_kv_slots)) {
        sync::raise_fault(p.launch.fault, p.launch.rank, abi::kFaultBadSlot, p.launch.layer, row, static_cast<uint32_t>(g.num_kv_slots), slot[half],
                          static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(slot[half]))));
      }
      const bf16* const at = p.k_pool + static_cast<int64_t>(slot[half]) * g.kv_slot_stride + kv_head * kHeadDim + group * (kHeadDim / 4);
SGL_UNROLL
      for (int32_t j = 0; j < kSteps; ++j) dialect::mfma_16x16x32(score[half], dialect::load_plain(reinterpret_cast<const Vec16*>(at) + j), q[j]);
    }
    const float scale = g.softmax_scale * kLog2e;
    const int32_t oldest = dialect::planted(dialect::Planted::kMaskOffByOne) ? 1 : 0, seen = min_int(column.end, end);
    const auto is_live = [&](int32_t half, int32_t j) {
      const int32_t token = first + half * 16 + group * 4 + j;
      return token < seen && token >= oldest;
    };
    float most = max_score;
SGL_UNROLL
    for (int32_t t = 0; t < 8; ++t) {
      float& x = score[t / 4][t % 4];
      x = is_live(t / 4, t % 4) ? x * scale : kLeastScore;
      most = x > most ? x : most;
    }
SGL_UNROLL
    for (int32_t mask = 16; mask < 64; mask *= 2) {
      const float other = dialect::shuffle_xor(most, mask);
      most = other > most ? other : most;
    }
    const float keep = dialect::exp2(max_score - most);
    max_score = most;
    sum *= keep;
SGL_UNROLL
    for (int32_t t = 0; t < 8; ++t) {
      float& x = score[t / 4][t % 4];
      x = is_live(t / 4, t % 4) ? dialect::exp2(x - most) : 0.0f;
      sum += x;
    }
    const Vec16 weights{{pack_bf16(score[0][0], score[0][1]), pack_bf16(score[0][2], score[0][3]), pack_bf16(score[1][0], score[1][1]),
                         pack_bf16(score[1][2], score[1][3])}};
    uint32_t v[8][kRun / 2];
SGL_UNROLL
    for (int32_t t = 0; t < 8; ++t) {
      const int64_t from = static_cast<int64_t>(dialect::shuffle(slot[t / 4], group * 4 + t % 4));
      load_run<kHeadDim>(p.v_pool + from * g.kv_slot_stride + kv_head * kHeadDim + i * kRun, v[t]);
    }
SGL_UNROLL
    for (int32_t e = 0; e < kRun; ++e) {
      Vec16 a;
SGL_UNROLL
      for (int32_t w = 0; w < 4; ++w) {
        const uint32_t low = v[2 * w][e / 2], high = v[2 * w + 1][e / 2];
        a.w[w] = e % 2 == 0 ? (low & 0xffffu) | high << 16 : low >> 16 | (high & 0xffff0000u);
      }
SGL_UNROLL
      for (int32_t j = 0; j < 4; ++j) out[e][j] *= keep;
      dialect::mfma_16x16x32(out[e], a, weights);
    }
  }
};

// Where an item's outcome goes. Words of elements d, d + 1 of a column; of several splits, un-normalised and fp32, to be combined.
template <int32_t kHeadDim>
SGL_DEVICE void publish_output(const MonoLaunch& l, int32_t row, int32_t head, int32_t d, float low, float high) {
  uint32_t word[1] = {pack_bf16(low, high)};
  sync::publish(handover_words(l, l.at.attention_out) + ((static_cast<int64_t>(row) * l.geometry.num_q_heads + head) * kHeadDim + d) / 2, word);
}

// One item, its waves' parts merged. Entry: all threads; ring and panel are free. They are again at the end.
template <int32_t kHeadDim, abi::Isa kIsa>
SGL_DEVICE void run_item(const abi::K2Params& p, const MonoShared<kIsa>& s, const WaveItem& item, int32_t idx) {
  constexpr int32_t kRun = kHeadDim / 16, kAtOnce = 4;  // tiles of `out` that are merged at a time
  static_assert(kRun % kAtOnce == 0 && abi::kMonoWaves * kAtOnce * 4 * 64 * 4 <= MonoShared<kIsa>::kAt.partials,
                "the waves' tiles fit ring and panel");
  const MonoLaunch& l = p.launch;
  const int32_t lane = lane_idx(), wave = wave_idx(), group = lane / 16, thread = dialect::thread_idx();
  const WaveColumn column = column_of(l, s, item, lane % 16);
  Vec16 q[kHeadDim / 32] = {};
  if (column.is_live) {
    const bf16* const at = p.q + (static_cast<int64_t>(column.row) * l.geometry.num_q_heads + column.head) * kHeadDim + group * (kHeadDim / 4);
SGL_UNROLL
    for (int32_t j = 0; j < kHeadDim / 32; ++j) q[j] = dialect::load_plain(reinterpret_cast<const Vec16*>(at) + j);
  }
  WaveSoftmax<kHeadDim> state;
  const int32_t* const slots = p.req_to_token + static_cast<int64_t>(s.rows()->row[item.request].request) * l.geometry.req_to_token_stride;
SGL_NO_UNROLL
  for (int32_t first = item.begin + wave * abi::kBatchTokens; first < item.end; first += abi::kMonoWaves * abi::kBatchTokens) {
    state.attend(p, slots, first, item.end, item.first_row, column, item.kv_head, q);
  }
SGL_UNROLL
  for (int32_t mask = 16; mask < 64; mask *= 2) state.sum += dialect::shuffle_xor(state.sum, mask);
  auto& max_sum = s.rows()->max_sum;
  if (group == 0) {
    max_sum[wave][lane][0] = state.max_score;
    max_sum[wave][lane][1] = state.sum;
  }
  dialect::sync_shared();  // max_sum
  const auto merged_max = [&](int32_t c) {
    float most = kLeastScore;
SGL_UNROLL
    for (int32_t w = 0; w < abi::kMonoWaves; ++w) most = max_sum[w][c][0] > most ? max_sum[w][c][0] : most;
    return most;
  };
  const auto merged_sum = [&](int32_t c, float most) {
    float sum = 0.0f;
SGL_UNROLL
    for (int32_t w = 0; w < abi::kMonoWaves; ++w) sum += max_sum[w][c][1] * dialect::exp2(max_sum[w][c][0] - most);
    return sum;
  };
  const float factor = dialect::exp2(state.max_score - merged_max(lane % 16));
SGL_UNROLL
  for (int32_t round = 0; round < kRun / kAtOnce; ++round) {
SGL_UNROLL
    for (int32_t e = 0; e < kAtOnce; ++e) {
      float* const at = s.merge() + ((wave * kAtOnce + e) * 64 + lane) * 4;
SGL_UNROLL
      for (int32_t j = 0; j < 4; ++j) at[j] = state.out[round * kAtOnce + e][j] * factor;
    }
    dialect::sync_shared();  // the waves' tiles
    // A thread has tiles e and e + 1 of one lane and one j: elements d and d + 1 of a column.
    const int32_t e = thread / 256 * 2, owner = thread % 256 / 4, j = thread % 4, c = owner % 16;
    const WaveColumn of = column_of(l, s, item, c);
    float value[2] = {};
SGL_UNROLL
    for (int32_t w = 0; w < abi::kMonoWaves; ++w) {
SGL_UNROLL
      for (int32_t h = 0; h < 2; ++h) value[h] += s.merge()[((w * kAtOnce + e + h) * 64 + owner) * 4 + j];
    }
    const int32_t d = (owner / 16 * 4 + j) * kRun + round * kAtOnce + e;
    if (of.is_live) {
      const float most = merged_max(c), sum = merged_sum(c, most);
      if (item.num_splits == 1) {
        const float inverse = sum > 0.0f ? dialect::divide(1.0f, sum) : 0.0f;
        publish_output<kHeadDim>(l, of.row, of.head, d, value[0] * inverse, value[1] * inverse);
      } else {
        uint32_t words[2] = {dialect::float_to_bits(value[0]), dialect::float_to_bits(value[1])};
        sync::publish(handover_words(l, l.at.partial_out) + static_cast<int64_t>(idx * abi::kItemColumns + c) * kHeadDim + d, words);
        if (d == 0) {
          uint32_t pair[2] = {dialect::float_to_bits(most), dialect::float_to_bits(sum)};
          sync::publish(handover_words(l, l.at.partial_max_sum) + (idx * abi::kItemColumns + c) * 2, pair);
        }
      }
    }
    dialect::sync_shared();  // the tiles' space is free again
  }
}

// The splits of the rows and heads of an item that is their split 0, in order. Entry: all threads; the block has handed over all of its items.
template <int32_t kHeadDim, abi::Isa kIsa>
SGL_DEVICE void combine_splits(const abi::K2Params& p, const MonoShared<kIsa>& s, const WaveItem& item, int32_t idx) {
  const MonoLaunch& l = p.launch;
  const sync::Awaited max_sums = awaited(l, l.at.partial_max_sum, abi::kEdgePartial), outs = awaited(l, l.at.partial_out, abi::kEdgePartial);
SGL_NO_UNROLL
  for (int32_t i = dialect::thread_idx(); i < abi::kItemColumns * kHeadDim / 2; i += abi::kMonoThreads) {
    const int32_t c = i / (kHeadDim / 2), d = i % (kHeadDim / 2) * 2;
    const WaveColumn of = column_of(l, s, item, c);
    if (!of.is_live) continue;
    float most = kLeastScore, sum = 0.0f, out[2] = {};
SGL_NO_UNROLL
    for (int32_t split = 0; split < item.num_splits; ++split) {
      const int64_t at = static_cast<int64_t>(idx + split * item.slot_stride) * abi::kItemColumns + c;
      uint32_t pair[2], words[2];
      sync::await_words(edge_sink(l), max_sums, at * 2, pair);
      sync::await_words(edge_sink(l), outs, at * kHeadDim + d, words);
      const float split_max = dialect::bits_to_float(pair[0]), larger = split_max > most ? split_max : most;
      const float keep = dialect::exp2(most - larger), factor = dialect::exp2(split_max - larger);
      most = larger;
      sum = sum * keep + dialect::bits_to_float(pair[1]) * factor;
      out[0] = out[0] * keep + dialect::bits_to_float(words[0]) * factor;
      out[1] = out[1] * keep + dialect::bits_to_float(words[1]) * factor;
    }
    const float inverse = sum > 0.0f ? dialect::divide(1.0f, sum) : 0.0f;
    publish_output<kHeadDim>(l, of.row, of.head, d, out[0] * inverse, out[1] * inverse);
  }
}

// The block's items, then the combination of those that are the first split of several. Entry: all threads; MonoRows are there.
template <int32_t kHeadDim, abi::Isa kIsa>
SGL_DEVICE void run_wave_attention(const abi::K2Params& p, const MonoShared<kIsa>& s) {
  const WaveSplit a = split_items(p.launch, s);
SGL_NO_UNROLL
  for (int32_t idx = dialect::block_idx(); idx < a.num_items; idx += p.launch.grid) run_item<kHeadDim>(p, s, item_of(p.launch, s, a, idx), idx);
SGL_NO_UNROLL
  for (int32_t idx = dialect::block_idx(); idx < a.num_items; idx += p.launch.grid) {
    const WaveItem item = item_of(p.launch, s, a, idx);
    if (item.num_splits > 1 && item.split == 0) combine_splits<kHeadDim>(p, s, item, idx);
  }
}

}  // namespace sgl_lowlatency::stages
