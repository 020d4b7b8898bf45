// The end of a step: hidden_out, and in a launch with logits the LM head.
//
//   hidden_out = x / rms(x) * final_norm   [rows, hidden] bf16
//   logits = x / rms(x) * final_norm @ head.T   [rows, vocab] fp32, rounded to bf16
//
// x: the stream that the last layer leaves. The head reads it scaled, as qkv reads any other layer's, so 1 / rms(x) is a factor of
// the finished tile. Nobody in the launch reads either result.
#pragma once
#include "sgl_lowlatency/stages/gemm.hpp"
#include "sgl_lowlatency/stages/stream.hpp"

namespace sgl_lowlatency::stages {

// Two columns, number i, of a row of hidden_out. Entry: Row::inverse_rms is the last stream's.
SGL_DEVICE void store_hidden(const DecodeStepParams& p, const Shared& s, int32_t row, int32_t i) {
  const int64_t word_idx = static_cast<int64_t>(row) * (p.geometry.hidden / 2) + i;
  const float inverse_rms = s.rows()->row[row].inverse_rms;
  uint32_t word[1];
  sync::await_words(fault_sink(p), stream_words(p, s, end_stream(p, p.geometry.num_layers - 1), p.stream.x), word_idx, word);
  const uint32_t norm = dialect::load_constant(reinterpret_cast<const uint32_t*>(p.final_norm) + i);
  dialect::store_plain(reinterpret_cast<uint32_t*>(p.hidden_out) + word_idx,
                       pack_bf16(low_float(word[0]) * inverse_rms * low_float(norm), high_float(word[0]) * inverse_rms * high_float(norm)));
}

// Without a head: row r by block r % grid. Nothing waits for it but the end of the launch. Entry: all consumer threads.
SGL_DEVICE void final_norm(const DecodeStepParams& p, const Shared& s) {
  if (dialect::block_idx() >= p.rows) return;
  load_inverse_rms(p, s, end_stream(p, p.geometry.num_layers - 1));
  sync_consumers();
  for (int32_t row = dialect::block_idx(); row < p.rows; row += dialect::grid_dim()) {
    for (int32_t i = dialect::thread_idx(); i < p.geometry.hidden / 2; i += kConsumerThreads) store_hidden(p, s, row, i);
  }
}

// With a head: every block has 1 / rms(x) of all rows, and takes its share of all words, a thread one or two of them.
// Entry: all consumer threads; a barrier has published Row::inverse_rms.
SGL_DEVICE void final_norm_share(const DecodeStepParams& p, const Shared& s) {
  const int32_t row_words = p.geometry.hidden / 2, first = dialect::block_idx() * kConsumerThreads + dialect::thread_idx();
  for (int32_t i = first; i < p.rows * row_words; i += dialect::grid_dim() * kConsumerThreads) {
    store_hidden(p, s, i / row_words, i % row_words);
  }
}

// See run_tiles. is_first: of the block's tiles, which it may have to walk in several goes.
struct HeadOps {
  const DecodeStepParams& p;
  const Shared& s;
  bool is_first;

  // Later goes find the words where the first one waited for them, and 1 / rms(x) as it left it.
  template <class Op>
  SGL_DEVICE void load(Op op, int32_t k0, int32_t k1) const {
    const Stream end = end_stream(p, p.geometry.num_layers - 1);
    load_panel<2>(p, s, stream_words(p, s, end, p.stream.scaled), p.geometry.hidden / 2, p.ops[op].k_panel, k0, k1);
    sync_consumers();
    if (is_first && k1 == p.ops[op].k_extent) load_inverse_rms(p, s, end);
  }
  template <class Op>
  SGL_DEVICE Early before(Op, int32_t, int32_t, int32_t) const { return {}; }

  // The last tile may reach beyond the vocabulary.
  template <class Op>
  SGL_DEVICE void finish(Op, const TilePair& pair, bool is_finisher, const Early&) const {
    if (!is_finisher) return;
    const float inverse_rms = dialect::planted(dialect::Planted::kUnscaledHead) ? 1.0f : s.rows()->row[pair.n].inverse_rms;
    const int32_t token = pair.tile * abi::kTileRows + pair.m;
    float* const at = p.logits + static_cast<int64_t>(pair.n) * p.geometry.vocab + token;
SGL_UNROLL
    for (int32_t i = 0; i < 2; ++i) {
      if (token + i < p.geometry.vocab) dialect::store_plain(at + i, dialect::to_float(dialect::to_bf16(pair.y[i] * inverse_rms)));
    }
  }
  template <class Op>
  SGL_DEVICE void behind(Op, int32_t) const {}
};

// The final norm comes last, where it delays no tile. (Behind the first tile it cost verify instances registers, which spilled.)
// Entry: all consumer threads, behind the last layer, in a launch with logits.
template <int32_t kNTiles>
SGL_DEVICE void run_head(const DecodeStepParams& p, const Shared& s, RingCursor& cursor, PartialCursor& partial) {
  const abi::TileRange own = s.rows()->tiles[abi::kOpHead];
  if (own.count == 0) {
    load_inverse_rms(p, s, end_stream(p, p.geometry.num_layers - 1));
    sync_consumers();
  }
  const int32_t at_once = abi::tiles_at_once(abi::kOpHead, p.ops[abi::kOpHead], own.count, p.max_tiles_multi_panel);
  for (int32_t begin = 0; begin < own.count; begin += at_once) {
    const abi::TileRange go{own.begin + begin, min_int(at_once, own.count - begin)};
    run_tiles<kNTiles, 2>(p, s, p.geometry.num_layers, StaticOp<abi::kOpHead>{}, true, go, cursor, partial, HeadOps{p, s, begin == 0});
  }
  final_norm_share(p, s);
}

}  // namespace sgl_lowlatency::stages
