// Base logits of a draft block: base_logits[n, m] = bf16(sum_k head[m, k] * x[n, k]), x = hidden_states, normed where the draft asks for it.
//
// A pair of consumer warps has a tile, 16 rows of the LM head, to itself: of every stage each warp takes half of K, and at the tile's end they add
// up, the second one's sum on top of the first one's. No other warp takes part, and results repeat bit by bit.
#pragma once
#include "sgl_lowlatency/stages/draft_ring.hpp"
#include "sgl_lowlatency/stages/draft_tile.hpp"

namespace sgl_lowlatency::stages {

constexpr int32_t kPairBarrier = 2;  // named barrier of pair 0; those of the others follow

constexpr int32_t kNormBatch = 10;  // vectors that a lane asks for at a time

// DraftBlockState::inverse_rms of every row, each by one warp. row_vec(row, v): vector v of the row. Entry: all consumer threads; a consumer barrier
// must follow.
template <class RowVec>
SGL_DEVICE void draft_inverse_rms(const DraftSamplerParams& p, const DraftShared& s, int32_t rows, const RowVec& row_vec) {
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32, num_vecs = p.hidden / 8;
SGL_NO_UNROLL
  for (int32_t row = warp; row < rows; row += abi::kNumConsumerWarps) {
    float sum = 0.0f;
SGL_NO_UNROLL
    for (int32_t first = lane; first < num_vecs; first += kNormBatch * 32) {
      Vec16 vecs[kNormBatch];
SGL_UNROLL
      for (int32_t u = 0; u < kNormBatch; ++u) vecs[u] = first + u * 32 < num_vecs ? row_vec(row, first + u * 32) : Vec16{};
SGL_UNROLL
      for (int32_t u = 0; u < kNormBatch; ++u) {
SGL_UNROLL
        for (int32_t i = 0; i < 4; ++i) {
          const float a = low_float(vecs[u].w[i]), b = high_float(vecs[u].w[i]);
          sum += a * a + b * b;
        }
      }
    }
SGL_UNROLL
    for (int32_t mask = 16; mask > 0; mask /= 2) sum += dialect::shuffle_xor(sum, mask);
    if (lane == 0) s.block()->inverse_rms[row] = dialect::rsqrt(sum / static_cast<float>(p.hidden) + p.rms_eps);
  }
}

// Fills the panel with columns [k0, k1) of x, normed. Entry: all consumer threads; the panel is free. Ends with a consumer barrier.
SGL_DEVICE void load_draft_panel(const DraftSamplerParams& p, const DraftShared& s, int32_t rows, int32_t k0, int32_t k1) {
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32;
  const int32_t num_vecs = (k1 - k0) / 8, pitch = abi::panel_row_bytes(p.k_panel);
  const bool has_norm = p.has_norm != 0 && !dialect::planted(dialect::Planted::kSkippedNorm);
  const auto panel_vec = [&](int32_t row, int32_t v) { return reinterpret_cast<Vec16*>(s.panel() + row * pitch) + v; };
SGL_NO_UNROLL
  for (int32_t row = warp; row < rows + has_norm; row += abi::kNumConsumerWarps) {  // behind x, the norm
    const bf16* const from = row < rows ? p.hidden_states + static_cast<int64_t>(row) * p.hidden + k0 : p.norm + k0;
    for (int32_t v = lane; v < num_vecs; v += 32) dialect::copy_async_16(panel_vec(row, v), from + v * 8);
  }
  dialect::copy_async_commit();
  dialect::copy_async_wait<0>();
  sync_consumers();
  if (!has_norm) return;
  if (p.k_panel >= p.hidden) {
    draft_inverse_rms(p, s, rows, [&](int32_t row, int32_t v) { return *panel_vec(row, v); });
    sync_consumers();
  }
SGL_NO_UNROLL
  for (int32_t v = dialect::thread_idx(); v < num_vecs; v += kConsumerThreads) {
    const Vec16 norm = *panel_vec(rows, v);
SGL_NO_UNROLL
    for (int32_t row = 0; row < rows; ++row) {
      const float scale = s.block()->inverse_rms[row];
      Vec16 vec = *panel_vec(row, v);
SGL_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        vec.w[i] = pack_bf16(low_float(vec.w[i]) * scale * low_float(norm.w[i]), high_float(vec.w[i]) * scale * high_float(norm.w[i]));
      }
      *panel_vec(row, v) = vec;
    }
  }
  sync_consumers();
}

// Adds up a pair's halves of a tile and stores the base logits. tile: of the block. Entry: both warps of the pair, all lanes. half: of the exchange
// buffer, the one that takes the next sums; two uses of the same half have a barrier of the other between them.
template <int32_t kNTiles, int32_t kAtOnce>
SGL_DEVICE void finish_draft_tile(const DraftSamplerParams& p, const DraftShared& s, const DraftBlock& b, int32_t rows, int32_t tile, int32_t& half,
                                  const DraftTile<kNTiles, kAtOnce>& product) {
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32, pair = warp / 2;
  const abi::DraftRank& own = p.ranks[b.local_rank];
  const int32_t pitch = own.num_units * abi::kUnitColumns, column = (b.units.begin * 2 + tile) * abi::kTileRows + lane / 4;
SGL_UNROLL
  for (int32_t first = 0; first < kNTiles; first += abi::kExchangeTiles) {
    float* const at = s.exchange() + (half * abi::kDraftPairs + pair) * (abi::kExchangeTiles * 4 * 32) + lane;
    half ^= 1;
    if (warp % 2 != 0) {
SGL_UNROLL
      for (int32_t t = first; t < kNTiles && t < first + abi::kExchangeTiles; ++t) {
SGL_UNROLL
        for (int32_t i = 0; i < 4; ++i) at[((t - first) * 4 + i) * 32] = product.sum(t, i);
      }
    }
    dialect::sync_named(kPairBarrier + pair, 64);
    if (warp % 2 != 0) continue;
SGL_UNROLL
    for (int32_t t = first; t < kNTiles && t < first + abi::kExchangeTiles; ++t) {
SGL_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        const int32_t row = t * 8 + lane % 4 * 2 + i % 2;
        const float sum = product.sum(t, i) + at[((t - first) * 4 + i) * 32];
        if (row < rows) dialect::store_plain(own.base_logits + static_cast<int64_t>(row) * pitch + column + i / 2 * 8, dialect::to_bf16(sum));
      }
    }
  }
}

// Entry: all consumer threads. kNTiles: of 8 rows, enough for all. kAtOnce: p.tiles_at_once. Ends with a consumer barrier, which publishes the
// block's base logits to its own threads; nobody else reads them in this launch.
template <int32_t kNTiles, int32_t kAtOnce>
SGL_DEVICE void run_draft_head(const DraftSamplerParams& p, const DraftShared& s) {
  const DraftBlock b = draft_block(p);
  const sync::FaultSink sink = fault_sink(p, b.rank);
  const int32_t rows = p.batch * p.gamma, stage_k = abi::stage_k(2), chunk_k = abi::chunk_k(2), pitch = abi::panel_row_bytes(p.k_panel);
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32, pair = warp / 2;
  constexpr int32_t kHalfChunks = abi::kStageChunks / 2;
  int32_t count = 0, half = 0;
  bool is_loaded = false;
  if (p.has_norm != 0 && p.k_panel < p.hidden) {
    draft_inverse_rms(p, s, rows, [&](int32_t row, int32_t v) {
      return dialect::load_constant(reinterpret_cast<const Vec16*>(p.hidden_states + static_cast<int64_t>(row) * p.hidden) + v);
    });
  }
SGL_NO_UNROLL
  for (int32_t first = 0; first < b.num_tiles; first += abi::kDraftPairs * kAtOnce) {
    DraftTile<kNTiles, kAtOnce> products[kAtOnce];
    for (int32_t k0 = 0; k0 < p.hidden; k0 += p.k_panel) {
      const int32_t k1 = min_int(k0 + p.k_panel, p.hidden);
      if (!is_loaded) {
        sync_consumers();  // the panel before is read, the norm's factors are there
        load_draft_panel(p, s, rows, k0, k1);
        is_loaded = p.k_panel >= p.hidden;
      }
SGL_UNROLL
      for (int32_t turn = 0; turn < kAtOnce; ++turn) {
        if (first + turn * abi::kDraftPairs + pair >= b.num_tiles) continue;
        for (int32_t k = k0; k < k1; k += stage_k) {
          const DraftPlace at = draft_place(pair, count++);
          if (!dialect::planted(dialect::Planted::kRingNoWait)) {
            sync::wait_mbarrier(sink, abi::kFaultRingFull, 0, at.stage, s.full(at.stage), at.parity());
          }
          const int32_t begin = warp % 2 * kHalfChunks, end = min_int(begin + kHalfChunks, (k1 - k) / chunk_k);
SGL_NO_UNROLL
          for (int32_t chunk = begin; chunk < end; ++chunk) {
            products[turn].multiply(s.stage(at.stage), chunk, lane, [&](int32_t row) {
              const bool is_row = row < rows;
              return PanelRow{is_row ? s.panel() + row * pitch + (k - k0 + chunk * chunk_k + lane / 8 * 8) * 2 : s.zero_row(), is_row ? 64 : 0};
            });
          }
          dialect::sync_warp();
          // Pairs with the producer's wait on `empty`: this warp's reads of the stage are done.
          if (lane == 0) dialect::mbarrier_arrive(s.empty(at.stage));
        }
      }
    }
SGL_UNROLL
    for (int32_t turn = 0; turn < kAtOnce; ++turn) {
      const int32_t tile = first + turn * abi::kDraftPairs + pair;
      if (tile < b.num_tiles) finish_draft_tile(p, s, b, rows, tile, half, products[turn]);
    }
  }
  sync_consumers();
}

}  // namespace sgl_lowlatency::stages
