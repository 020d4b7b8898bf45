// Weight tiles on the MFMA: y[16 rows of weights, 16 rows of the step] = W x^T, K cut among the waves of a workgroup.
//
// A wave works alone: it copies its columns of a tile into its own slots of the ring (kFragmentBytes each, 16 rows by 32 columns, in the order
// in which the MFMA's lanes want them), has its columns of the activations in its own part of the panel, and meets the others when their
// partial tiles are added, in wave order. So copies need no barrier: a wave waits for its own, and they stay in flight across everything else.
#pragma once
#include "sgl_lowlatency/stages/wave_rows.hpp"

namespace sgl_lowlatency::stages {

// A matrix in tiles of 16 rows: number t begins at at(t); of its rows, r lies r rows behind, and from r = 8 on another `upper` elements.
struct PlainMatrix {
  static constexpr int64_t upper = 0;
  const bf16* weight;  // [rows, k_extent]
  int32_t k_extent;    // a multiple of kMfmaK
  SGL_DEVICE const bf16* at(int32_t tile) const { return weight + static_cast<int64_t>(tile) * abi::kTileRows * k_extent; }
};
// Tiles of 8 gate rows and the 8 up rows of the same channels. weight: [2 * channels, k_extent].
struct GateUpMatrix {
  int64_t upper;
  const bf16* weight;
  int32_t k_extent;
  SGL_DEVICE GateUpMatrix(const bf16* gate_up, int32_t channels, int32_t k)
      : upper(static_cast<int64_t>(channels - abi::kTileRows / 2) * k), weight(gate_up), k_extent(k) {}
  SGL_DEVICE const bf16* at(int32_t tile) const { return weight + static_cast<int64_t>(tile) * (abi::kTileRows / 2) * k_extent; }
};

// A wave's columns of a matrix, in units of kMfmaK.
struct WaveColumns {
  int32_t begin, end;
  int32_t most;  // of any wave
};
SGL_DEVICE WaveColumns wave_columns(int32_t k_extent) {
  const int32_t chunks = k_extent / abi::kMfmaK, most = (chunks + abi::kMonoWaves - 1) / abi::kMonoWaves;
  const int32_t begin = min_int(wave_idx() * most, chunks);
  return {begin, min_int(begin + most, chunks), most};
}

// The copies of a wave: tile after tile, in each its columns. Copies take the slots in turn.
template <abi::Isa kIsa, class Matrix>
struct WaveRing {
  const MonoShared<kIsa>& s;
  const Matrix& matrix;
  int64_t offset;        // from a tile's begin to what the lane copies of it first
  const bf16* own;       // what the lane copies next
  int32_t tile;          // of the next copy
  int32_t in_tile;       // copies that a tile takes
  int32_t left_in_tile;  // of them, how many are to come
  int32_t left;          // copies to come of all tiles
  int32_t put = 0, take = 0;  // slots of the next copy and of the oldest
  int32_t pending = 0;

  SGL_DEVICE WaveRing(const MonoShared<kIsa>& shared, const Matrix& of, const WaveColumns& columns, const abi::TileRange& tiles)
      : s(shared), matrix(of), tile(tiles.begin), in_tile(columns.end - columns.begin) {
    const int32_t row = dialect::copied_row();
    offset = static_cast<int64_t>(row) * of.k_extent + (row < 8 ? 0 : of.upper) + columns.begin * abi::kMfmaK + dialect::copied_column();
    left = in_tile * tiles.count;
    left_in_tile = in_tile;
    if (left > 0) own = matrix.at(tile) + offset;
  }
  SGL_DEVICE static int32_t after(int32_t slot) { return slot + 1 == MonoShared<kIsa>::kSlots ? 0 : slot + 1; }
  SGL_DEVICE void copy_next() {
    if (left == 0) return;
    dialect::copy_tile(s.slot(wave_idx(), put), own);
    put = after(put);
    ++pending;
    own += abi::kMfmaK;
    --left;
    if (--left_in_tile > 0 || left == 0) return;
    left_in_tile = in_tile;
    own = matrix.at(++tile) + offset;
  }
  SGL_DEVICE void fill() {
    for (int32_t i = 0; i < MonoShared<kIsa>::kSlots; ++i) copy_next();
  }
  // The oldest tile as the A operand; its slot is filled again.
  SGL_DEVICE Vec16 next() {
    pending == MonoShared<kIsa>::kSlots ? dialect::await_copies<MonoShared<kIsa>::kSlots - 1>() : dialect::await_copies<0>();
    const Vec16 a = dialect::load_copied(s.slot(wave_idx(), take));
    take = after(take);
    --pending;
    copy_next();
    return a;
  }
};

// Sums of the waves' partial tiles, in wave order. Entry of at(): behind the barrier that follows them.
template <abi::Isa kIsa>
struct TileSums {
  const MonoShared<kIsa>& s;
  int32_t column;
  SGL_DEVICE float at(int32_t m) const {
    float sum = 0.0f;
SGL_UNROLL
    for (int32_t w = 0; w < abi::kMonoWaves; ++w) sum += s.partial(w, column)[m];
    return sum;
  }
};

// 1 / rms of row `row` of the operand that the waves have loaded. Entry: behind a barrier that follows load_columns.
template <abi::Isa kIsa>
SGL_DEVICE float inverse_rms(const MonoShared<kIsa>& s, const abi::Geometry& g, int32_t row) {
  float sum = 0.0f;
SGL_UNROLL
  for (int32_t w = 0; w < abi::kMonoWaves; ++w) sum += s.rows()->squares[w][row];
  return dialect::rsqrt(dialect::divide(sum, static_cast<float>(g.hidden)) + g.rms_eps);
}

// Operand vectors that a lane asks for at a time: one trip through L2 for all of them.
constexpr int32_t kOperandBatch = 4;

// Lanes that load one row of the operand.
SGL_DEVICE int32_t lanes_of_row(int32_t rows) { return rows == 1 ? 64 : rows == 2 ? 32 : rows <= 4 ? 16 : rows <= 8 ? 8 : 4; }

// Columns [begin, end) of the operand's first num_rows rows into the wave's panel, as the MFMA's lanes read them: vector g of chunk c of row n at
// ((c - begin) * 4 + g) * num_rows + n. Lanes share out the rows evenly, consecutive lanes have consecutive vectors. Returns the squares that the
// lane has met; they are one row's, of no more than kMaxMonoRows. operand.load(row, column, stride, count, vectors, squares): kOperandBatch vectors
// of eight columns, `stride` columns apart, the first `count` of them. Entry: all lanes; the panel is free. Ends with a warp barrier.
template <class Operand>
SGL_DEVICE float load_columns(char* panel, int32_t num_rows, int32_t begin, int32_t end, const Operand& operand) {
  const int32_t rows = dialect::varying(num_rows), lanes = lanes_of_row(rows), num_vecs = (end - begin) * 4;
  float squares = 0.0f;
SGL_NO_UNROLL
  for (int32_t row = lane_idx() / lanes; row < rows; row += abi::kWaveSize / lanes) {
SGL_NO_UNROLL
    for (int32_t v = lane_idx() % lanes; v < num_vecs; v += lanes * kOperandBatch) {
      Vec16 vectors[kOperandBatch];
      const int32_t count = min_int((num_vecs - v + lanes - 1) / lanes, kOperandBatch);
      operand.load(row, begin * abi::kMfmaK + v * 8, lanes * 8, count, vectors, squares);
SGL_UNROLL
      for (int32_t u = 0; u < kOperandBatch; ++u) {
        if (u < count) reinterpret_cast<Vec16*>(panel)[(v + u * lanes) * rows + row] = vectors[u];
      }
    }
  }
  dialect::sync_warp();
  return squares;
}

// Of a row's lanes, added in one order, and kept for inverse_rms. Entry: all lanes.
template <abi::Isa kIsa>
SGL_DEVICE void keep_squares(const MonoShared<kIsa>& s, int32_t num_rows, float squares) {
  const int32_t rows = dialect::varying(num_rows), lanes = lanes_of_row(rows);
SGL_NO_UNROLL
  for (int32_t mask = 1; mask < lanes; mask *= 2) squares += dialect::shuffle_xor(squares, mask);
  if (lane_idx() % lanes == 0 && lane_idx() / lanes < rows) s.rows()->squares[wave_idx()][lane_idx() / lanes] = squares;
}

// The block's tiles of a matrix. finish(tile, n, m, sums): called by the threads of a tile for every pair of its rows m, m + 1 and every row n of the
// step that there is, behind a barrier that also follows the squares. kPairs: pairs of a tile, 8, or 4 where rows m and m + 8 go together.
// An operand that does not fit the panel is loaded anew for every tile. Entry: all threads; ring, panel and partials are free. They are again at the
// end.
template <int32_t kPairs, abi::Isa kIsa, class Matrix, class Operand, class Finish>
SGL_DEVICE void run_wave_tiles(const MonoShared<kIsa>& s, int32_t rows, const Matrix& matrix, const abi::TileRange& own, const Operand& operand,
                               const Finish& finish) {
  if (own.count == 0) return;
  const int32_t lane = lane_idx(), group = lane / 16, column = lane % 16, thread = dialect::thread_idx();
  const WaveColumns columns = wave_columns(matrix.k_extent);
  const int32_t capacity = MonoShared<kIsa>::kAt.panel_wave_bytes / (rows * 64);
  const bool is_kept = columns.most <= capacity;
  char* const panel = s.panel(wave_idx());
  WaveRing<kIsa, Matrix> ring(s, matrix, columns, own);
  ring.fill();
SGL_NO_UNROLL
  for (int32_t tile = own.begin; tile < own.begin + own.count; ++tile) {
    float sum[4] = {}, squares = 0.0f;
    const bool is_first = tile == own.begin;
SGL_NO_UNROLL
    for (int32_t begin = columns.begin; begin < columns.end; begin += capacity) {
      const int32_t end = min_int(begin + capacity, columns.end);
      if (is_first || !is_kept) squares += load_columns(panel, rows, begin, end, operand);
SGL_NO_UNROLL
      for (int32_t chunk = begin; chunk < end; ++chunk) {
        const Vec16 a = ring.next();
        Vec16 b = {};
        if (column < rows) b = reinterpret_cast<const Vec16*>(panel)[((chunk - begin) * 4 + group) * rows + column];
        dialect::mfma_16x16x32(sum, a, b);
      }
      dialect::sync_warp();  // the panel is free again
    }
    if (is_first) keep_squares(s, rows, squares);
SGL_UNROLL
    for (int32_t j = 0; j < 4; ++j) s.partial(wave_idx(), column)[group * 4 + j] = sum[j];
    dialect::sync_shared();  // partials and squares
    const int32_t n = thread / kPairs;
    if (n < rows) finish(tile, n, thread % kPairs * 2, TileSums<kIsa>{s, n});
    dialect::sync_shared();  // partials are free again
  }
}

// Operand of words that other blocks hand over: [rows, k_extent] bf16, each row times the weights of a norm, or as they are (norm null).
struct WordOperand {
  const MonoLaunch& launch;
  int32_t at;  // byte offset in the hand-over
  abi::EdgeIdx edge;
  int32_t k_extent;
  const bf16* norm;

  SGL_DEVICE void load(int32_t row, int32_t column, int32_t stride, int32_t count, Vec16 (&vectors)[kOperandBatch], float& squares) const {
    const MonoLaunch& l = dialect::read_again(launch);
    const sync::Awaited source = awaited(l, at, edge);
    const uint32_t* const begin = source.buffer + (static_cast<int64_t>(row) * k_extent + column) / 2;
    Vec16 weights[kOperandBatch];
    if (norm != nullptr) {
SGL_UNROLL
      for (int32_t u = 0; u < kOperandBatch; ++u) {
        if (u < count) weights[u] = dialect::load_constant(reinterpret_cast<const Vec16*>(norm + column + u * stride));
      }
    }
SGL_UNROLL
    for (int32_t u = 0; u < kOperandBatch; ++u) {
SGL_UNROLL
      for (int32_t i = 0; i < 4; ++i) vectors[u].w[i] = u < count ? abi::kUnwritten : 0u;
    }
    sync::wait_until(
        edge_sink(l), abi::kFaultEdgeDeadline, l.layer, edge, static_cast<uint32_t>(begin - source.buffer),
        [&] {
          bool are_there = true;
SGL_UNROLL
          for (int32_t u = 0; u < kOperandBatch; ++u) {
            if (!sync::is_written(vectors[u].w)) dialect::load_words(vectors[u].w, begin + u * stride / 2);
          }
SGL_UNROLL
          for (int32_t u = 0; u < kOperandBatch; ++u) are_there = are_there && sync::is_written(vectors[u].w);
          return are_there || dialect::planted(dialect::Planted::kMissingAwait);
        },
        [&] { return abi::kUnwritten; });
    if (norm == nullptr) return;
SGL_UNROLL
    for (int32_t u = 0; u < kOperandBatch; ++u) {
      if (u >= count) continue;
SGL_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        const float low = low_float(vectors[u].w[i]), high = high_float(vectors[u].w[i]);
        squares += low * low + high * high;
        vectors[u].w[i] = pack_bf16(low * low_float(weights[u].w[i]), high * high_float(weights[u].w[i]));
      }
    }
  }
};

}  // namespace sgl_lowlatency::stages
