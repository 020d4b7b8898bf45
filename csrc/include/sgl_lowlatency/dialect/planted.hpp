// Bugs that tests plant on purpose: each must turn a gate red. No effect unless a build or an emulation run asks for one.
#pragma once
#include <cstdint>

namespace sgl_lowlatency::dialect {

enum class Planted : int32_t {
  kNone = 0,
  kMissingFence = 1,     // the layer's fence, a release and an acquire, is left out: nothing orders the clears of generations
  kMissingAwait = 2,     // hand-over words are taken as they are found, written or not
  kWithheldSignal = 3,   // the owner of tile 0 of layer 0's out_proj never hands it over: a hang, ended by the deadline
  kOffByOnePage = 4,     // attention reads the slot of the next token, attention_in writes it
  kWrongKvHead = 5,      // attention reads kv head (h + 1) % num_kv_heads
  kSkippedNorm = 6,      // q is not normalised
  kWrongRope = 7,        // q is rotated by the angle of the position before (position 0: of position 1)
  kMaskOffByOne = 8,     // the oldest token is left out
  kRingNoWait = 9,       // a consumer does not wait for the weight stage to fill
  kSeesSibling = 10,     // a row also attends to the new token behind its own, another row's of its request
  kSiblingInPool = 11,   // the new tokens of other rows are read from the pool, where this launch may not have written them yet
  kSiblingPosition = 12, // the keys of a request's new tokens are all rotated by the position of its first row
  kWrongScaleBlock = 13, // FP8: a block of weights gets the scale of the next block of K
  kGateScaleForUp = 14,  // FP8: the up rows of a gate_up tile get the scale of the gate rows
  kTieToHigherId = 15,     // of experts with equal logits the higher id is chosen
  kNanOutranks = 16,       // a NaN logit ranks above all others
  kShiftedRowBits = 17,    // the row bits of every seventh expert are those of the rows before
  kPlaceCountsItself = 18, // an expert's place counts the expert itself
  kUnsyncedChoices = 19,   // experts are placed with no barrier behind the choices of rows
  kCapturesOutput = 20,    // the auxiliary hidden states of a layer are the stream that leaves it, not the one that enters it
  kUnscaledHead = 21,      // logits without the factor 1 / rms
  kPartialNoWait = 22,     // finishers of a tile do not wait for the other warps' parts
  kStaleRouting = 23,      // MoE: the producer does not wait for the block's routing of the layer
  kUnweightedExpert = 24,  // MoE: an expert's output is added without the row's weight
  kUnroundedLogits = 25,   // MoE: router logits are cut to bf16 instead of rounded: other experts tie
  kNextExpert = 26,        // MoE: down reads the matrix of the expert behind the one that is chosen
  kStaleNoise = 27,        // draft: noise of the block before
  kNoiseOfNextRow = 28,    // draft: a request gets the noise of the request behind it
  kDroppedUnit = 29,       // draft: the last columns of a block's share take no part in the choice
  kLatePeer = 30,          // draft: the last block of the last rank answers late, within the deadline: no bug, all must go well
  kUnroundedBias = 31,     // draft: the bias keeps fp32
  kKeptLatents = 32,       // draft: every step has the latents of the anchor
  kEarlyLatents = 33,      // draft: no barrier between a step's tokens and the next step
  kMissingPeerRelease = 34,  // tiles are pushed to other ranks without the fence before a launch's first ones
  kMissingPeerAcquire = 35,  // pushed words are read without the fence behind a launch's last ones
  kPeerGpuScope = 36,        // both of these fences have gpu scope
  kFirstWordIsFlag = 37,     // the first word of a vector that is there stands for the other three: a flag before its data
  kTwoParities = 38,         // a parity is used again one launch early; decode_step: two layers early
  kLostTile = 39,            // rank 0's tile 0 never reaches the last rank
  kNoAwaitOfPrevious = 40,   // what the launch in front has written is read without waiting for its end: by push_tiles, fused_moe, the slices
  kMissingStoreWait = 41,    // waves: a barrier in front of a release does not wait for the other waves' accesses
  kTransposedMix = 42,     // mHC: the mix of the streams is applied transposed
  kShortSinkhorn = 43,     // mHC: the mix is normalised once
  kWithheldMix = 44,       // mHC: row 0's sums of unit 0 are never handed over: a hang, ended by the deadline
  kWithheldCoefficients = 45,  // mHC: row 0's coefficients are never handed over
};

}  // namespace sgl_lowlatency::dialect
