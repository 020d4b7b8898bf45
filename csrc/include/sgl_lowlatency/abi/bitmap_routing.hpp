// Structs of the `bitmap_routing` kernel and stage, shared by host C++, CUDA, the host dialect and (through the bindings) Python.
#pragma once
#include <cstdint>

#include "sgl_lowlatency/abi/decode_step.hpp"

namespace sgl_lowlatency::abi {

constexpr int32_t kMaxExperts = 384;
constexpr int32_t kMaxTopK = 32;                        // choices of a row: a lane holds one
constexpr int32_t kExpertWords = kMaxExperts / 32;      // a set of experts: expert e is bit e % 32 of word e / 32
constexpr int32_t kChosenPitch = kExpertWords + 1;      // words from one row's set to the next: one word of 32 rows meets no bank twice

enum LogitsType : int32_t { kLogitsFloat32 = 0, kLogitsBf16 = 1, kNumLogitsTypes = 2 };

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

// Warps of the kernel's block: one a row, at least so many that every word of kExpertWords finds one soon.
SGL_ABI_FUNCTION int32_t routing_warps(int32_t rows) { return rows <= 8 ? 8 : rows <= 16 ? 16 : 32; }

struct BitmapRoutingParams {
  int32_t rows;          // 0..kMaxRows
  int32_t num_experts;   // 1..kMaxExperts
  int32_t top_k;         // 1..min(num_experts, kMaxTopK)
  int32_t renormalizes;  // 1: the weights of a row are divided by their sum; of given weights, nothing is
  RoutingLayout at;      // routing_layout of rows, num_experts and top_k

  // Either logits, or ids and weights; the others are null.
  const void* logits;       // [rows, num_experts] of logits_type, rows logits_stride elements apart
  LogitsType logits_type;
  int32_t logits_stride;
  const int32_t* ids;            // [rows, top_k], -1 for none; an id may come twice in a row
  const float* weights;          // [rows, top_k]
  const int32_t* num_live_rows;  // [1], or null: all; rows from there on choose nothing

  char* out;           // out_bytes, aligned to 16
  FaultRecord* fault;  // host-visible; an id outside -1..num_experts - 1 ends the launch
  int32_t rank;        // for the fault record
};

}  // namespace sgl_lowlatency::abi
