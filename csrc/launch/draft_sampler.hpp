// Host entry of draft_sampler on CUDA: checks, shared-memory attribute, cooperative launch. No device code here.
#pragma once
#include <cstdint>
#include <type_traits>

#include "sgl_lowlatency/abi/draft_sampler.hpp"

namespace sgl_lowlatency::launch {

// Launches on `stream` (a cudaStream_t as an integer). grid: blocks of all local ranks. Capturable in a CUDA graph. Throws std::invalid_argument
// naming the parameter, or std::runtime_error with the CUDA error's name and text.
void draft_sampler_cuda(const abi::DraftSamplerParams& params, int32_t grid, uintptr_t stream);

// Blocks of draft_sampler that the current device holds at once, for the params' rows and shared memory.
int32_t draft_sampler_max_blocks(const abi::DraftSamplerParams& params);

// What both the CUDA launcher and the emulation refuse: throws std::invalid_argument.
void check_draft_sampler(const abi::DraftSamplerParams& params, int32_t grid);

// Calls run with the N tiles of the LM head's product and of the Markov product, and the tiles of a walk through K, as types, of the instance for
// the params' rows and requests.
template <class Run>
auto with_draft_instance(const abi::DraftSamplerParams& p, const Run& run) {
  constexpr std::integral_constant<int32_t, 1> one{};
  constexpr std::integral_constant<int32_t, 2> two{};
  constexpr std::integral_constant<int32_t, 3> three{};
  constexpr std::integral_constant<int32_t, 5> five{};
  constexpr std::integral_constant<int32_t, abi::kMaxDraftRows / 8> most{};
  const auto with = [&](auto num_tiles, auto batch_tiles) {
    if (p.tiles_at_once == 1) return run(num_tiles, batch_tiles, one);
    return run(num_tiles, batch_tiles, std::integral_constant<int32_t, abi::most_tiles_at_once(decltype(num_tiles)::value)>{});
  };
  switch (abi::draft_row_tiles(p.batch * p.gamma)) {
    case 1: return p.batch > 8 ? with(five, two) : with(one, one);
    case 2: return p.batch > 8 ? with(five, two) : with(two, one);
    case 3: return p.batch > 8 ? with(five, two) : with(three, one);
    case 5: return p.batch > 8 ? with(five, two) : with(five, one);
    default: return p.batch > 8 ? with(most, two) : with(most, one);
  }
}

}  // namespace sgl_lowlatency::launch
