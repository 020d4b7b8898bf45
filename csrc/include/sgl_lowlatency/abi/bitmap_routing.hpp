// Structs of the `bitmap_routing` kernel and stage, shared by host C++, CUDA, the host dialect and (through the bindings) Python.
#pragma once
#include <cstdint>

#include "sgl_lowlatency/abi/decode_step.hpp"

namespace sgl_lowlatency::abi {

enum LogitsType : int32_t { kLogitsFloat32 = 0, kLogitsBf16 = 1, kNumLogitsTypes = 2 };

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
