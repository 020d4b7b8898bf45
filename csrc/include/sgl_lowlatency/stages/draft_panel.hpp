// Activations of a draft's LM head in shared memory: all of K in one panel that is loaded once, or panels that come in turn, again in every walk
// through K. Of several, two lie there at a time where they fit: while one is multiplied the next one loads.
//
// x = hidden_states, or normed: 1/rms of a row comes from the panel itself where that has all of K. Else each row's is made by one warp of one of the
// rank's blocks and handed to the others, a word that is its own flag in the rank's mailbox (sync/handover.hpp).
#pragma once
#include "sgl_lowlatency/stages/draft_state.hpp"
#include "sgl_lowlatency/sync/handover.hpp"

namespace sgl_lowlatency::stages {

constexpr int32_t kNormBatch = 10;  // vectors that a lane asks for at a time
constexpr int32_t kNormRows = 5;    // rows that a thread norms at a time

// 1/rms of a row, to every lane. vec_at(v): vector v of the row. Entry: all lanes of one warp.
template <class VecAt>
SGL_DEVICE float draft_inverse_rms(const DraftSamplerParams& p, const VecAt& vec_at) {
  const int32_t lane = dialect::thread_idx() % 32, num_vecs = p.hidden / 8;
  float sum = 0.0f;
SGL_NO_UNROLL
  for (int32_t first = lane; first < num_vecs; first += kNormBatch * 32) {
    Vec16 vecs[kNormBatch];
SGL_UNROLL
    for (int32_t u = 0; u < kNormBatch; ++u) vecs[u] = first + u * 32 < num_vecs ? vec_at(first + u * 32) : Vec16{};
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
  return dialect::rsqrt(sum / static_cast<float>(p.hidden) + p.rms_eps);
}

// The panels of a launch, of one block. words: the rank's 1/rms of every row, of this launch.
struct DraftPanels {
  const DraftSamplerParams& p;
  const DraftShared& s;
  const DraftBlock& b;
  uint32_t* words;

  SGL_DEVICE int32_t rows() const { return p.batch * p.gamma; }
  SGL_DEVICE bool has_norm() const { return p.has_norm != 0 && !dialect::planted(dialect::Planted::kSkippedNorm); }
  SGL_DEVICE bool is_whole() const { return p.k_panel >= p.hidden; }
  // Panel `number` of a launch lies in its buffer.
  SGL_DEVICE char* at(int32_t number) const {
    return s.panel() + number % p.panel_buffers * ((rows() + 1) * abi::panel_row_bytes(p.k_panel));
  }
  SGL_DEVICE Vec16* vec(int32_t number, int32_t row, int32_t v) const {
    return reinterpret_cast<Vec16*>(at(number) + row * abi::panel_row_bytes(p.k_panel)) + v;
  }

  // Asks for columns [k0, k1) as panel `number`, whose buffer is free; behind x, the norm. All blocks want the same lines: each begins elsewhere in
  // a row. Entry: all consumer threads.
  SGL_DEVICE void ask(int32_t number, int32_t k0, int32_t k1) const {
    const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32, num_vecs = (k1 - k0) / 8;
    const int32_t lines = (num_vecs + 31) / 32, begin = b.block % lines;
SGL_NO_UNROLL
    for (int32_t row = warp; row < rows() + has_norm(); row += abi::kNumConsumerWarps) {
      const bf16* const from = row < rows() ? p.hidden_states + static_cast<int64_t>(row) * p.hidden + k0 : p.norm + k0;
      for (int32_t i = 0, line = begin; i < lines; ++i, line = line + 1 < lines ? line + 1 : 0) {
        const int32_t v = line * 32 + lane;
        if (v < num_vecs) dialect::copy_async_16(vec(number, row, v), from + v * 8);
      }
    }
    dialect::copy_async_commit();
  }

  // Asks for the first panel. Entry: all consumer threads.
  SGL_DEVICE void begin() const {
    if (b.num_tiles > 0) ask(0, 0, min_int(p.k_panel, p.hidden));
    if (has_norm() && !is_whole()) share_inverse_rms();
  }

  // Panel `number` of the launch, columns [k0, k1), is there to be read; where two have room the next one is asked for. is_last: there is none.
  // Entry: all consumer threads. Ends with a consumer barrier.
  SGL_DEVICE void take(int32_t number, int32_t k0, int32_t k1, bool is_last) const {
    if (p.panel_buffers == 1 && number > 0) {
      sync_consumers();  // the panel before is read
      ask(number, k0, k1);
    }
    dialect::copy_async_wait<0>();
    sync_consumers();  // all threads' copies are there; the panel before is read
    if (p.panel_buffers > 1 && !is_last) {
      const int32_t next = k1 < p.hidden ? k1 : 0;
      ask(number + 1, next, min_int(next + p.k_panel, p.hidden));
    }
    if (!has_norm()) return;
    if (is_whole()) {
      const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32;
SGL_NO_UNROLL
      for (int32_t row = warp; row < rows(); row += abi::kNumConsumerWarps) {
        const float inverse_rms = draft_inverse_rms(p, [&](int32_t v) { return *vec(number, row, v); });
        if (lane == 0) s.block()->inverse_rms[row] = inverse_rms;
      }
      sync_consumers();
    }
    norm(number, (k1 - k0) / 8);
    sync_consumers();
  }

 private:
  // DraftBlockState::inverse_rms of every row: row r by the rank's block r % blocks. A consumer barrier must follow.
  SGL_DEVICE void share_inverse_rms() const {
    const int32_t thread = dialect::thread_idx(), stride = b.num_blocks * abi::kNumConsumerWarps;
SGL_NO_UNROLL
    for (int32_t row = thread / 32 * b.num_blocks + b.block; row < rows(); row += stride) {
      const Vec16* const from = reinterpret_cast<const Vec16*>(p.hidden_states + static_cast<int64_t>(row) * p.hidden);
      const float inverse_rms = draft_inverse_rms(p, [&](int32_t v) { return dialect::load_constant(from + v); });
      uint32_t word[1] = {dialect::float_to_bits(inverse_rms)};
      if (thread % 32 == 0) sync::publish(words + row, word);
    }
    if (thread >= rows()) return;
    uint32_t word[1];
    const int32_t sender = b.rank * b.num_blocks + thread % b.num_blocks;
    sync::wait_until(
        fault_sink(p, b.rank), abi::kFaultCandidate, 0, thread / p.gamma, static_cast<uint32_t>(b.num_blocks),
        [&] {
          dialect::load_words(word, words + thread);
          return sync::is_written(word) || dialect::planted(dialect::Planted::kMissingAwait);
        },
        [&] { return static_cast<uint32_t>(sender); });
    s.block()->inverse_rms[thread] = dialect::bits_to_float(word[0]);
  }

  // x times 1/rms times the norm, rounded to bf16 as SGLang's. Few vectors a row: threads share its rows. Entry: all consumer threads.
  SGL_DEVICE void norm(int32_t number, int32_t num_vecs) const {
    const int32_t groups = num_vecs < kConsumerThreads ? kConsumerThreads / num_vecs : 1;
    const int32_t group = groups > 1 ? dialect::thread_idx() / num_vecs : 0;
    if (group >= groups) return;
SGL_NO_UNROLL
    for (int32_t v = dialect::thread_idx() - group * num_vecs; v < num_vecs; v += kConsumerThreads) {
      const Vec16 norm = *vec(number, rows(), v);
SGL_NO_UNROLL
      for (int32_t first = group; first < rows(); first += groups * kNormRows) {
        Vec16 x[kNormRows];
        float scale[kNormRows];
SGL_UNROLL
        for (int32_t u = 0; u < kNormRows; ++u) {
          const int32_t row = min_int(first + u * groups, rows() - 1);
          x[u] = *vec(number, row, v);
          scale[u] = s.block()->inverse_rms[row];
        }
SGL_UNROLL
        for (int32_t u = 0; u < kNormRows; ++u) {
SGL_UNROLL
          for (int32_t i = 0; i < 4; ++i) {
            const float low = low_float(x[u].w[i]) * scale[u] * low_float(norm.w[i]), high = high_float(x[u].w[i]) * scale[u] * high_float(norm.w[i]);
            x[u].w[i] = pack_bf16(low, high);
          }
          if (first + u * groups < rows()) *vec(number, first + u * groups, v) = x[u];
        }
      }
    }
  }
};

}  // namespace sgl_lowlatency::stages
