// epilogue_multicast: a row-parallel matrix product whose tiles go to every rank as they are finished, and the sum, residual and norm behind it.
//
//   sum    = residual + sum over ranks, in rank order, of input of the rank [rows, K] * its weight [hidden, K] ^ T      fp32, rounded to bf16 once
//   normed = sum / rms(sum) * norm_weight                                                                              from the fp32 sum
//
// Tensors   (abi/epilogue_multicast.hpp) K is the rank's share. Between the two kernels lie the ranks' workspaces (abi/symmetric_workspace.hpp).
// Grid      push_tiles: blocks_per_rank blocks of abi::kNumThreads a rank. reduce_tiles: a block a row and rank, of abi::reduce_threads. A launch
//           is of one rank, or of several virtual ones, whose blocks follow one another. Started one behind the other, each may begin early.
// Roles     push_tiles: warps 0..7 consume; warp 8 streams the block's weights through the ring. reduce_tiles: a thread four columns.
// Phases    push_tiles: the input into the panel | its tiles, each pushed from registers. reduce_tiles: the clears of the parity before | the
//           words of all ranks, tile by tile as they come | sum, norm, output.
// Hand-over pushed words are data and flag at once, at system scope (stages/pushed_tiles.hpp).
// Residency no block of push_tiles waits for another. Those of reduce_tiles wait for push_tiles of all ranks, of their own rank's first for all
//           of it (await_previous_launch): whoever they wait for runs or has run.
#pragma once
#include "sgl_lowlatency/abi/epilogue_multicast.hpp"
#include "sgl_lowlatency/stages/gemm.hpp"
#include "sgl_lowlatency/stages/pushed_tiles.hpp"

namespace sgl_lowlatency::kernels {

using namespace stages;

// Number `index` of the launch's ranks.
SGL_DEVICE sync::Peers peers_of(const abi::EpilogueMulticastParams& p, int32_t index) { return {p.at, p.workspaces, p.product.rank + index}; }

// Entry: one lane of the producer warp. The order is run_tiles'. It reads weights alone, which nobody writes: it does not wait for the launch in front.
// The wait on `empty` pairs with the consumer warps' arrivals; the announced bytes and the copy complete `full`.
SGL_DEVICE void produce_own_tiles(const DecodeStepParams& p, const Shared& s, const abi::WeightMap* map, const abi::TileRange& own, int32_t layer) {
  const abi::OpPlan& op = p.ops[abi::kOpOutProj];
  RingCursor cursor;
  for (int32_t k0 = 0; k0 < op.k_extent; k0 += op.k_panel) {
    const int32_t k1 = min_int(k0 + op.k_panel, op.k_extent);
    for (int32_t tile = own.begin; tile < own.begin + own.count; ++tile) {
      for (int32_t k = k0; k < k1; k += abi::stage_k(2)) {
        sync::wait_mbarrier(fault_sink(p), abi::kFaultRingEmpty, layer, cursor.stage, s.empty(cursor.stage), cursor.parity ^ 1u);
        dialect::mbarrier_arrive_expect_bytes(s.full(cursor.stage), abi::kStageBytes);
        dialect::load_stage(s.stage(cursor.stage), map, tile * abi::kTileRows, 0, k / abi::chunk_k(2), s.full(cursor.stage));
        cursor.advance(p.num_stages);
      }
    }
  }
}

// What run_tiles asks for.
struct PushOps {
  const abi::EpilogueMulticastParams& p;
  const Shared& s;
  const sync::Peers& peers;
  const bf16* input;
  int32_t parity;

  // Plain loads: the launch in front may have written the input.
  template <class Op>
  SGL_DEVICE void load(Op op, int32_t k0, int32_t k1) const {
    const abi::OpPlan& plan = p.product.ops[op];
    const int32_t num_vecs = (k1 - k0) / 8, pitch = abi::panel_row_bytes(plan.k_panel);
    for (int32_t i = dialect::thread_idx(); i < p.product.rows * num_vecs; i += kConsumerThreads) {
      const int32_t row = i / num_vecs, vec = i % num_vecs;
      const Vec16 v = dialect::load_plain(reinterpret_cast<const Vec16*>(input + static_cast<int64_t>(row) * plan.k_extent + k0) + vec);
      store_panel_vector<2>(s.panel() + row * pitch, vec, v.w);
    }
    sync_consumers();
  }
  template <class Op>
  SGL_DEVICE Early before(Op, int32_t, int32_t, int32_t) const { return {}; }
  template <class Op>
  SGL_DEVICE void finish(Op, const TilePair& pair, bool is_finisher, const Early&) const {
    if (is_finisher) push_pair(peers, p.multicast, parity, pair.tile, pair.n, pair.m, pair.y);
  }
  template <class Op>
  SGL_DEVICE void behind(Op, int32_t) const {}
};

// kNTiles: N tiles of the MMA, 1 for 1..8 rows, 2 for 9..16. Entry: every thread of every block.
template <int32_t kNTiles>
SGL_DEVICE void push_tiles_body(const abi::EpilogueMulticastParams& p) {
  const Shared s{p.product.shared};
  const int32_t thread = dialect::thread_idx(), index = dialect::block_idx() / p.blocks_per_rank;
  const abi::TileRange own = abi::even_share(p.at.hidden / abi::kTileRows, dialect::block_idx() % p.blocks_per_rank, p.blocks_per_rank);
  if (thread == kConsumerThreads) {
    for (int32_t i = 0; i < p.product.num_stages; ++i) {
      dialect::mbarrier_init(s.full(i), abi::kNumProducerWarps);
      dialect::mbarrier_init(s.empty(i), abi::kNumConsumerWarps);
    }
    dialect::mbarrier_init_fence();
  }
  if (thread < 4) reinterpret_cast<uint32_t*>(s.zero_row())[thread] = 0u;
  dialect::sync_block();
  if (thread >= kConsumerThreads) {
    if (thread == kConsumerThreads) produce_own_tiles(p.product, s, p.product.maps + index, own, p.layer);
    return;
  }
  if (!dialect::planted(dialect::Planted::kNoAwaitOfPrevious)) dialect::await_previous_launch();
  dialect::allow_next_launch();
  order_pushes();
  if (own.count == 0) return;
  const sync::Peers peers = peers_of(p, index);
  const uint64_t launch = dialect::load_plain(peers.state()->launches);
  RingCursor cursor;
  PartialCursor partial;
  run_tiles<kNTiles, 2>(p.product, s, p.layer, StaticOp<abi::kOpOutProj>{}, true, own, cursor, partial,
                        PushOps{p, s, peers, p.tensors[index].input, parity_of(launch)});
}

// Of all threads of the block, in one order. scratch: a float a warp. Entry: every thread; scratch is free.
SGL_DEVICE float block_sum(float value, float* scratch, int32_t num_threads) {
  const int32_t thread = dialect::thread_idx();
SGL_UNROLL
  for (int32_t mask = 16; mask > 0; mask /= 2) value += dialect::shuffle_xor(value, mask);
  if (thread % 32 == 0) scratch[thread / 32] = value;
  dialect::sync_block();
  float sum = 0.0f;
SGL_NO_UNROLL
  for (int32_t w = 0; w < num_threads / 32; ++w) sum += scratch[w];
  return sum;
}

// Four bf16 as they lie in memory.
SGL_DEVICE uint64_t pack_bf16x4(const float (&x)[4]) {
  return static_cast<uint64_t>(pack_bf16(x[0], x[1])) | static_cast<uint64_t>(pack_bf16(x[2], x[3])) << 32;
}
SGL_DEVICE void unpack_bf16x4(uint64_t packed, float (&x)[4]) {
  const uint32_t low = static_cast<uint32_t>(packed), high = static_cast<uint32_t>(packed >> 32);
  x[0] = low_float(low);
  x[1] = high_float(low);
  x[2] = low_float(high);
  x[3] = high_float(high);
}

// kRanks: at least the group's, 2, 4 or 8. Entry: every thread of every block.
template <int32_t kRanks>
SGL_DEVICE void reduce_tiles_body(const abi::EpilogueMulticastParams& p) {
  dialect::allow_next_launch();
  dialect::await_previous_launch();
  const int32_t rows = p.product.rows, index = dialect::block_idx() / rows, row = dialect::block_idx() % rows;
  const int32_t thread = dialect::thread_idx(), num_threads = abi::reduce_threads(p.at.hidden);
  const sync::Peers peers = peers_of(p, index);
  const sync::FaultSink sink{p.product.fault + index, peers.rank, p.product.deadline_ns};
  const abi::RankTensors& tensors = p.tensors[index];
  int32_t parity;
  {
    const uint64_t launch = dialect::load_plain(peers.state()->launches);
    parity = parity_of(launch);
    if (thread == 0) {
      const uint64_t word = sync::load_abort(peers);
      if (word != 0) sync::raise_aborted(sink, peers, word, {peers.rank, -1, p.layer, 0, abi::kPeerTiles});
    }
    clear_pushed(peers, parity_before(launch), row, rows, thread, num_threads);
  }

  float x[abi::kReduceVectors][4] = {};
  float squares = 0.0f;
  const auto column_of = [&](int32_t v) { return (thread + v * num_threads) * abi::kReduceColumns; };
SGL_UNROLL
  for (int32_t v = 0; v < abi::kReduceVectors; ++v) {
    const int32_t column = column_of(v);
    if (column >= p.at.hidden) continue;
    float residual[4];
    unpack_bf16x4(dialect::load_plain(reinterpret_cast<const uint64_t*>(tensors.residual + static_cast<int64_t>(row) * p.at.hidden + column)), residual);
    await_pushed<kRanks>(sink, peers, abi::kPeerTiles, p.layer, parity, column / abi::kTileRows, row, column % abi::kTileRows, x[v]);
SGL_UNROLL
    for (int32_t i = 0; i < 4; ++i) {
      x[v][i] += residual[i];
      squares += x[v][i] * x[v][i];
    }
  }
  const float sum = block_sum(squares, reinterpret_cast<float*>(dialect::shared_base()), num_threads);
  const float inverse_rms = dialect::rsqrt(sum / static_cast<float>(p.at.hidden) + p.rms_eps);
SGL_UNROLL
  for (int32_t v = 0; v < abi::kReduceVectors; ++v) {
    const int32_t column = column_of(v);
    if (column >= p.at.hidden) continue;
    const int64_t at = static_cast<int64_t>(row) * p.at.hidden + column;
    float weight[4];
    unpack_bf16x4(dialect::load_plain(reinterpret_cast<const uint64_t*>(p.norm_weight + column)), weight);
    dialect::store_plain(reinterpret_cast<uint64_t*>(tensors.sum + at), pack_bf16x4(x[v]));
SGL_UNROLL
    for (int32_t i = 0; i < 4; ++i) x[v][i] *= inverse_rms * weight[i];
    dialect::store_plain(reinterpret_cast<uint64_t*>(tensors.normed + at), pack_bf16x4(x[v]));
  }
  order_reads();
  // Every thread has passed block_sum's barrier: its reads of the state and its clears are done.
  if (thread != 0) return;
  // Acquire and release, gpu scope: pairs with the other blocks' arrivals; the last one is ordered behind their reads of the state.
  if (dialect::fetch_add_acq_rel_gpu(peers.state()->exit_ticket, 1u) != static_cast<uint32_t>(rows - 1)) return;
  dialect::store_plain(peers.state()->exit_ticket, 0u);
  close_parity(peers, rows);
}

}  // namespace sgl_lowlatency::kernels
