// What MoE layers could do in more ways than one, until a GPU has said which is faster (DESIGN-moe.md, "To be measured"): -D compiles a kernel with
// another one. None of them changes a result, in emulation, by hand: CI has the first ones.
#pragma once
#include <cstdint>

// Tiles of gate_up that are summed behind one barrier, at most; 1: every tile behind its own.
#ifndef SGL_MOE_TILES_PER_SUM
#define SGL_MOE_TILES_PER_SUM 8
#endif
// 1: a layer's clears are asked for before its routing is awaited, not behind it.
#ifndef SGL_MOE_CLEARS_FIRST
#define SGL_MOE_CLEARS_FIRST 0
#endif
// 1: a layer's fence lies behind gate_up, where activations are on their way to others, not in front of it.
#ifndef SGL_MOE_FENCE_BEHIND_GATE_UP
#define SGL_MOE_FENCE_BEHIND_GATE_UP 0
#endif
// 1: the first experts' stages are asked for kMaxStagesInFlight at a time, as all that follow, and not kMaxStagesInFlightAhead.
#ifndef SGL_MOE_EXPERTS_AT_FULL_DEPTH
#define SGL_MOE_EXPERTS_AT_FULL_DEPTH 0
#endif

namespace sgl_lowlatency::stages {

constexpr int32_t kMaxTilesPerSum = SGL_MOE_TILES_PER_SUM;
constexpr bool kClearsFirst = SGL_MOE_CLEARS_FIRST != 0;
constexpr bool kFenceBehindGateUp = SGL_MOE_FENCE_BEHIND_GATE_UP != 0;
constexpr bool kExpertsAtFullDepth = SGL_MOE_EXPERTS_AT_FULL_DEPTH != 0;

}  // namespace sgl_lowlatency::stages
