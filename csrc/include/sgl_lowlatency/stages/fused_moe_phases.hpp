// The consumers of a fused_moe block: its units of every op, from panel to hand-over words, and its share of the rows' sums.
#pragma once
#include "sgl_lowlatency/stages/fused_moe_tile.hpp"

namespace sgl_lowlatency::stages {

constexpr int32_t kMoePanelBatch = 4;  // 16 columns each of x, that a thread asks for at a time
constexpr int32_t kMoeAwaitBatch = 3;  // the same of activations
constexpr int32_t kNoPanel = -1;

// What a consumer keeps from unit to unit.
struct MoeConsumer {
  MoeCursor at;              // the chunk that is read next
  int32_t panel = kNoPanel;  // what the panel holds (moe_panel_key)
};

// The rows or pairs that a unit's columns are: `count` from `first` on.
struct MoeSpan {
  int32_t first;
  int32_t count;
};
SGL_DEVICE MoeSpan moe_span(const FusedMoeParams& p, const MoeShared& s, MoeOp op, int32_t job) {
  if (op == abi::kMoeGateUp || op == abi::kMoeDown) return {s.job_first()[job], s.job_count()[job]};
  const int32_t first = job * abi::kMoeColumns;
  return {first, p.rows - first < abi::kMoeColumns ? p.rows - first : abi::kMoeColumns};
}

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

// Up to kMoeColumns rows all of x stays in the panel, a row in its place.
SGL_DEVICE bool keeps_x(const FusedMoeParams& p) { return p.rows <= abi::kMoeColumns; }
SGL_DEVICE int32_t moe_panel_key(const FusedMoeParams& p, MoeOp op, int32_t job) {
  if (op == abi::kMoeRouter || op == abi::kMoeSharedGateUp) return keeps_x(p) ? 0 : job;
  return op == abi::kMoeGateUp && keeps_x(p) ? 0 : op << 16 | job;
}

// Stores columns 16u .. 16u + 15 of a panel row (abi::moe_panel_pitch): of each word its first eight columns beside the one eight further on.
SGL_DEVICE void store_moe_columns(char* row, int32_t u, const uint32_t (&low)[4], const uint32_t (&high)[4]) {
  char* const at = row + u / 8 * 256 + u % 2 * 128 + u % 8 / 2 * 16;
  *reinterpret_cast<Vec16*>(at) = Vec16{{low[0], high[0], low[1], high[1]}};
  *reinterpret_cast<Vec16*>(at + 64) = Vec16{{low[2], high[2], low[3], high[3]}};
}

// Entry: all consumer threads. Ends with a consumer barrier.
SGL_DEVICE void load_x_panel(const FusedMoeParams& p, const MoeShared& s, MoeOp op, const MoeSpan& span) {
  const int32_t units = p.geometry.hidden / 16, pitch = abi::moe_panel_pitch(p.geometry.hidden);
  const bool is_all = keeps_x(p);
  const int32_t total = (is_all ? p.rows : span.count) * units;
SGL_NO_UNROLL
  for (int32_t first = dialect::thread_idx(); first < total; first += kMoePanelBatch * kConsumerThreads) {
    Vec16 low[kMoePanelBatch], high[kMoePanelBatch];
SGL_UNROLL
    for (int32_t i = 0; i < kMoePanelBatch; ++i) {
      const int32_t unit = first + i * kConsumerThreads, j = unit / units;
      if (unit >= total) continue;
      const int32_t row = is_all ? j : op == abi::kMoeGateUp ? s.pair_rows()[span.first + j] : span.first + j;
      const bf16* const from = p.x + static_cast<int64_t>(row) * p.geometry.hidden + unit % units * 16;
      low[i] = dialect::load_plain(reinterpret_cast<const Vec16*>(from));
      high[i] = dialect::load_plain(reinterpret_cast<const Vec16*>(from + 8));
    }
SGL_UNROLL
    for (int32_t i = 0; i < kMoePanelBatch; ++i) {
      const int32_t unit = first + i * kConsumerThreads;
      if (unit < total) store_moe_columns(s.panel() + unit / units * pitch, unit % units, low[i].w, high[i].w);
    }
  }
  sync_consumers();
}

// Activations of the span's vectors, as soon as they are there. Entry: all consumer threads. Ends with a consumer barrier.
SGL_DEVICE void load_activation_panel(const FusedMoeParams& p, const MoeShared& s, const MoeWords& words, int32_t first_vector, int32_t count) {
  const int32_t units = p.geometry.intermediate / 16, pitch = abi::moe_panel_pitch(p.geometry.intermediate), total = count * units;
  const int32_t begin = first_vector * units * 8;
SGL_NO_UNROLL
  for (int32_t first = dialect::thread_idx(); first < total; first += kMoeAwaitBatch * kConsumerThreads) {
    uint32_t half[2 * kMoeAwaitBatch][4];  // of unit i, its first eight columns at 2i, the others behind
    const auto unit = [&](int32_t i) { return first + i / 2 * kConsumerThreads; };
SGL_UNROLL
    for (int32_t i = 0; i < 2 * kMoeAwaitBatch; ++i) half[i][0] = half[i][1] = half[i][2] = half[i][3] = unit(i) < total ? abi::kUnwritten : 0u;
    sync::wait_until(
        fault_sink(p), abi::kFaultEdgeDeadline, 0, abi::kMoeEdgeActivation, static_cast<uint32_t>(begin + first * 8),
        [&] {
          bool is_complete = true;
SGL_UNROLL
          for (int32_t i = 0; i < 2 * kMoeAwaitBatch; ++i) {
            if (!sync::is_written(half[i])) dialect::load_words(half[i], words.activation() + begin + unit(i) * 8 + i % 2 * 4);
          }
SGL_UNROLL
          for (int32_t i = 0; i < 2 * kMoeAwaitBatch; ++i) is_complete = is_complete && sync::is_written(half[i]);
          return is_complete || dialect::planted(dialect::Planted::kMissingAwait);
        },
        [] { return abi::kUnwritten; });
SGL_UNROLL
    for (int32_t i = 0; i < kMoeAwaitBatch; ++i) {
      if (unit(2 * i) < total) store_moe_columns(s.panel() + unit(2 * i) / units * pitch, unit(2 * i) % units, half[2 * i], half[2 * i + 1]);
    }
  }
  sync_consumers();
}

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
SGL_DEVICE void finish_shared_down(const FusedMoeParams& p, const float* scratch, int32_t tile, int32_t vector, int32_t count, const MoeWords& words) {
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
