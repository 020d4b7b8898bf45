// The consumers of a fused_moe block: its units of every op, run after run of those that have the same rows, and its share of the rows' sums.
#pragma once
#include "sgl_lowlatency/stages/fused_moe_finish.hpp"
#include "sgl_lowlatency/stages/fused_moe_panel.hpp"

namespace sgl_lowlatency::stages {

// What a consumer keeps from unit to unit.
struct MoeConsumer {
  MoeCursor at;              // the chunk that is read next
  int32_t panel = kNoPanel;  // what the panel holds (moe_panel_key)
};

// Units of an op that have the same columns: numbers [begin, end), the first one `behind` the block's first. Tile 0 of the job is unit job_begin.
struct MoeRun {
  int32_t begin;
  int32_t end;
  int32_t behind;
  int32_t job_begin;
  MoeSpan span;
  int32_t vector;   // of activation and output, of the first column
  const char* row;  // the lane's panel row
};

// A unit's products in `tiles`: of each chunk multiply(its number, where it is). Entry: all lanes of a consumer warp.
template <class Multiply>
SGL_DEVICE void for_moe_chunks(const FusedMoeParams& p, const MoeShared& s, MoeOp op, int32_t tile, MoeConsumer& state, const Multiply& multiply) {
  const int32_t warp = dialect::thread_idx() / 32;
  const MoeChunks chunks = moe_chunks(p, op, tile, warp);
SGL_NO_UNROLL
  for (int32_t chunk = chunks.begin; chunk < chunks.end; ++chunk) {
    if (!dialect::planted(dialect::Planted::kRingNoWait)) {
      sync::wait_mbarrier(fault_sink(p), abi::kFaultRingFull, op, warp * s.at.depth + state.at.slot, s.full(warp, state.at.slot), state.at.parity);
    }
    multiply(chunk, s.chunk(warp, state.at.slot));
    dialect::sync_warp();
    // Pairs with the producer's wait for `empty`: all lanes have read the chunk.
    if (dialect::thread_idx() % 32 == 0) dialect::mbarrier_arrive(s.empty(warp, state.at.slot));
    state.at.advance(s.at.depth);
  }
}

// The block's units of an op, run after run of those that have the same rows: panel and the lane's row of it, then
// units(run). Entry: all consumer threads.
template <class Units>
SGL_DEVICE void for_moe_runs(const FusedMoeParams& p, const MoeShared& s, const MoeWords& words, MoeOp op, MoeConsumer& state, const Units& units) {
  const bool reads_x = op != abi::kMoeSharedDown && op != abi::kMoeDown;
  const int32_t lane = dialect::thread_idx() % 32, tiles_of_job = abi::moe_tiles(p.geometry, op);
  const abi::TileRange share = moe_share(p, s, op);
  const int32_t end = share.begin + share.count;
SGL_NO_UNROLL
  for (int32_t begin = share.begin, run_end = 0; begin < end; begin = run_end) {
    const int32_t job = begin / tiles_of_job;
    run_end = (job + 1) * tiles_of_job < end ? (job + 1) * tiles_of_job : end;
    const MoeSpan span = moe_span(p, s, op, job);
    const int32_t vector = (is_routed(op) ? p.rows : 0) + span.first;  // of activation and output
    const int32_t key = moe_panel_key(p, op, job);
    if (key != state.panel) {
      sync_consumers();  // everybody has read what the panel holds
      if (reads_x) {
        load_x_panel(p, s, op, span);
      } else {
        load_activation_panel(p, s, words, vector, span.count);
      }
      state.panel = key;
    }
    // Columns beyond the span repeat its last one; nobody takes their sums.
    const int32_t column = lane / 4 < span.count ? lane / 4 : span.count - 1;
    const int32_t panel_row = op == abi::kMoeGateUp && keeps_x(p) ? s.pair_rows()[span.first + column] : column;
    const char* const row = s.panel() + panel_row * abi::moe_panel_pitch(reads_x ? p.geometry.hidden : p.geometry.intermediate) + lane % 4 * 16;
    units(MoeRun{begin, run_end, begin - share.begin, job * tiles_of_job, span, vector, row});
  }
}

// An op whose units are split over the warps along K. Entry: all consumer threads.
SGL_DEVICE void run_static_op(const FusedMoeParams& p, const MoeShared& s, const MoeWords& words, MoeOp op, MoeConsumer& state) {
  const int32_t warp = dialect::thread_idx() / 32;
  for_moe_runs(p, s, words, op, state, [&](const MoeRun& run) {
SGL_NO_UNROLL
    for (int32_t i = run.begin; i < run.end; ++i) {
      const int32_t tile = i - run.job_begin;
      MoeTile tiles[2];
      for_moe_chunks(p, s, op, tile, state, [&](int32_t chunk, const char* at) { multiply_static_chunk(tiles, at, run.row + chunk * 256, op); });
      float* const scratch = s.scratch();
      keep_moe_tile(scratch, warp, 0, tiles[0]);
      keep_moe_tile(scratch, warp, 1, tiles[1]);
      if (!dialect::planted(dialect::Planted::kPartialNoWait)) sync_consumers();
      if (op == abi::kMoeRouter) finish_router(p, scratch, tile, run.span.first, run.span.count, words);
      if (op == abi::kMoeSharedGateUp) finish_shared_gate_up(p, scratch, tile, run.vector, run.span.count, words);
      if (op == abi::kMoeSharedDown) finish_shared_down(p, scratch, tile, run.vector, run.span.count, words);
      sync_consumers();  // the sums are read
    }
  });
}

// An op whose units are a warp's own: of the block's share every eighth. Entry: all consumer threads.
SGL_DEVICE void run_routed_op(const FusedMoeParams& p, const MoeShared& s, const MoeWords& words, MoeOp op, MoeConsumer& state) {
  constexpr int32_t kWarps = abi::kNumConsumerWarps;
  const int32_t warp = dialect::thread_idx() / 32, steps = moe_steps(p, op);
  const bool is_gate_up = op == abi::kMoeGateUp;
  for_moe_runs(p, s, words, op, state, [&](const MoeRun& run) {
SGL_NO_UNROLL
    for (int32_t i = run.begin + (warp - run.behind % kWarps + kWarps) % kWarps; i < run.end; i += kWarps) {
      const int32_t tile = i - run.job_begin;
      MoeTile tiles[2];
      for_moe_chunks(p, s, op, tile, state, [&](int32_t chunk, const char* at) {
        const int32_t step = chunk * abi::kMoeChunkSteps, left = steps - step;
        multiply_fp4_chunk(tiles, at, left < abi::kMoeChunkSteps ? left : abi::kMoeChunkSteps, run.row + step * 256, is_gate_up,
                           is_gate_up ? tile % 4 : tile % 2 * 2);
      });
      finish_routed(p, op, tiles, tile, run.vector, run.span.count, words);
    }
  });
}

// The shared expert's row + sum over k of weight * its pair's row, in the order of k: finish(row, column, sum) gets four columns from `column` on,
// fp32, and begin(row, column) is called in front of the wait for them. A warp takes 128 columns of a row; whose they are does not depend on the
// number of rows. Entry: all consumer threads.
template <class Begin, class Finish>
SGL_DEVICE void combine_moe(const FusedMoeParams& p, const MoeShared& s, const MoeWords& words, Begin begin, Finish finish) {
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32, hidden = p.geometry.hidden, top_k = p.geometry.top_k;
  const int32_t chunks = hidden / 128;
SGL_NO_UNROLL
  for (int32_t i = dialect::block_idx() + warp * dialect::grid_dim(); i < p.rows * chunks; i += dialect::grid_dim() * abi::kNumConsumerWarps) {
    const int32_t row = i / chunks, column = i % chunks * 128 + lane * 4;
    begin(row, column);
    uint32_t part[1 + abi::kMoeMaxTopK][4];
    const auto vector = [&](int32_t k) {  // of output; -1: none
      if (k == 0) return row;
      const int32_t pair = k <= top_k ? s.pairs()[row * top_k + k - 1] : -1;
      return pair < 0 ? -1 : p.rows + pair;
    };
SGL_UNROLL
    for (int32_t k = 0; k <= abi::kMoeMaxTopK; ++k) part[k][0] = part[k][1] = part[k][2] = part[k][3] = vector(k) < 0 ? 0u : abi::kUnwritten;
    sync::wait_until(
        fault_sink(p), abi::kFaultEdgeDeadline, 0, abi::kMoeEdgeOutput, static_cast<uint32_t>(row * hidden + column),
        [&] {
          bool is_complete = true;
SGL_UNROLL
          for (int32_t k = 0; k <= abi::kMoeMaxTopK; ++k) {
            if (!sync::is_written(part[k])) dialect::load_words(part[k], words.output() + static_cast<int64_t>(vector(k)) * hidden + column);
          }
SGL_UNROLL
          for (int32_t k = 0; k <= abi::kMoeMaxTopK; ++k) is_complete = is_complete && sync::is_written(part[k]);
          return is_complete || dialect::planted(dialect::Planted::kMissingAwait);
        },
        [] { return abi::kUnwritten; });
    float sum[4];
SGL_UNROLL
    for (int32_t j = 0; j < 4; ++j) sum[j] = 0.0f;
SGL_UNROLL
    for (int32_t k = 1; k <= abi::kMoeMaxTopK; ++k) {
      if (vector(k) < 0) continue;
      const float weight = dialect::planted(dialect::Planted::kUnweightedExpert) ? 1.0f : s.weights()[row * top_k + k - 1];
SGL_UNROLL
      for (int32_t j = 0; j < 4; ++j) sum[j] += weight * dialect::bits_to_float(part[k][j]);
    }
SGL_UNROLL
    for (int32_t j = 0; j < 4; ++j) sum[j] += dialect::bits_to_float(part[0][j]);
    finish(row, column, sum);
  }
}

}  // namespace sgl_lowlatency::stages
