// Where a step's routing lies: what `bitmap_routing` leaves, and what a MoE layer of decode_step makes of it.
#pragma once
#include <cstdint>

#include "sgl_lowlatency/abi/abi_function.hpp"

namespace sgl_lowlatency::abi {

constexpr int32_t kMaxExperts = 384;
constexpr int32_t kMaxTopK = 32;                        // choices of a row: a lane holds one
constexpr int32_t kExpertWords = kMaxExperts / 32;      // a set of experts: expert e is bit e % 32 of word e / 32
constexpr int32_t kServedExpertWords = 4;               // of most instances of decode_step on CUDA: 128 experts; some have kExpertWords
constexpr int32_t kChosenPitch = kExpertWords + 1;      // words from one row's set to the next: one word of 32 rows meets no bank twice

// The set of experts that at least one row has chosen.
struct ActiveExperts {
  uint32_t words[kExpertWords];
  int32_t count;
  int32_t reserved[3];  // 0
};
static_assert(sizeof(ActiveExperts) % 16 == 0, "what follows is aligned to 16");

// A step's routing: byte offsets from its begin, in shared memory and, but for `chosen`, in global memory. Every word is written by every
// launch. An expert's place is its index among the active ones, in ascending order: the active experts' weight tiles follow one another by
// place. The number of an expert's rows is the population count of its row_bits, the index of a row among them that of the bits below it.
struct RoutingLayout {
  int32_t active;     // ActiveExperts
  int32_t row_bits;   // [num_experts] uint32: bit r: row r has chosen the expert
  int32_t experts;    // [num_experts] int32: by place, the expert's id; -1 behind the last active one
  int32_t ids;        // [rows, top_k] int32: the row's experts, by rank; -1 for none
  int32_t places;     // [rows, top_k] int32: their places; -1 for none
  int32_t weights;    // [rows, top_k] float: their weights; 0 for none
  int32_t out_bytes;  // a multiple of 16
  int32_t chosen;     // [rows][kChosenPitch] uint32: each row's set of experts; shared memory only
  int32_t total_bytes;
};

SGL_ABI_FUNCTION RoutingLayout routing_layout(int32_t rows, int32_t num_experts, int32_t top_k) {
  RoutingLayout at{};
  const auto after = [](int32_t begin, int32_t words) { return begin + (words + 3) / 4 * 16; };
  at.active = 0;
  at.row_bits = after(at.active, sizeof(ActiveExperts) / 4);
  at.experts = after(at.row_bits, num_experts);
  at.ids = after(at.experts, num_experts);
  at.places = after(at.ids, rows * top_k);
  at.weights = after(at.places, rows * top_k);
  at.out_bytes = after(at.weights, rows * top_k);
  at.chosen = at.out_bytes;
  at.total_bytes = after(at.chosen, rows * kChosenPitch);
  return at;
}

// The routing of a MoE layer as every block of decode_step keeps it in shared memory: byte offsets. A pair is a row and one of its experts;
// pairs are numbered by place, those of one expert by row: pair = first_pairs[place] + population count of the expert's row_bits below the row.
// There are top_k of every row that is no padding in every layer, whatever the choices.
struct MoeLayout {
  RoutingLayout routing;
  int32_t first_pairs;   // [num_experts + 1] int32, by place: the pairs of the experts before; entries up to the number of active experts count
  int32_t pair_weights;  // [rows * top_k] float, by pair: the row's weight of the expert
  int32_t total_bytes;   // a multiple of 16
};

SGL_ABI_FUNCTION MoeLayout moe_layout(int32_t rows, int32_t num_experts, int32_t top_k) {
  MoeLayout at{};
  at.routing = routing_layout(rows, num_experts, top_k);
  at.first_pairs = at.routing.total_bytes;
  at.pair_weights = at.first_pairs + (num_experts + 1 + 3) / 4 * 16;
  at.total_bytes = at.pair_weights + (rows * top_k + 3) / 4 * 16;
  return at;
}

}  // namespace sgl_lowlatency::abi
