// A slice block's view of its shared memory and of a unit of its work (abi/slice.hpp).
#pragma once
#include "sgl_lowlatency/abi/slice.hpp"
#include "sgl_lowlatency/stages/weight_ring.hpp"

namespace sgl_lowlatency::stages {

// The sections of the block's shared memory (abi::SliceSmem), addressed anew at each use: nothing to keep in registers.
struct SliceShared {
  const abi::SliceSmem& at;
  template <class T>
  SGL_DEVICE T* section(int32_t offset) const { return reinterpret_cast<T*>(dialect::shared_base() + offset); }
  // Phase complete: the weights of the stage have landed.
  SGL_DEVICE uint64_t* full(int32_t stage) const { return section<uint64_t>(at.barriers) + stage; }
  // Phase complete: every consumer warp has read the stage.
  SGL_DEVICE uint64_t* empty(int32_t stage) const { return full(abi::kSliceMaxStages + stage); }
  // Phase complete: every consumer warp has delivered its part of the tile in half `half` of scratch (run_slice_op).
  SGL_DEVICE uint64_t* partials(int32_t half) const { return full(2 * abi::kSliceMaxStages) + half; }
  SGL_DEVICE abi::SliceBlockState* state() const { return section<abi::SliceBlockState>(at.state); }
  SGL_DEVICE int32_t* positions() const { return section<int32_t>(at.positions); }
  SGL_DEVICE char* zero_row() const { return section<char>(at.zero_row); }
  SGL_DEVICE float* scratch() const { return section<float>(at.scratch); }
  SGL_DEVICE char* panel() const { return section<char>(at.panel); }
  SGL_DEVICE char* stage(int32_t stage) const { return section<char>(at.ring) + stage * abi::kStageBytes; }
};

// A unit: 16 rows of a matrix by the columns that a panel has, or kTallRows rows by a split of K.
struct SliceUnit {
  int32_t panel;  // units of one have the same columns and lie side by side
  int32_t group;  // of rows, where columns mean something else in each
  int32_t split;  // of K
  int32_t row;    // first one, of the matrix
  int32_t k0;     // columns [k0, k1) of the matrix
  int32_t k1;
};

constexpr int32_t kNoSlicePanel = -1;

// What a consumer keeps from unit to unit.
struct SliceConsumer {
  RingCursor at;
  int32_t half = 0;       // of scratch, that the next unit writes
  uint32_t parities = 0;  // bit h: of the phase of SliceShared::partials(h) that is awaited next
};

}  // namespace sgl_lowlatency::stages
