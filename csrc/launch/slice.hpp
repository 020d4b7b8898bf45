// What the launchers of slices have alike: which instance of a kernel takes a launch's rows, and the checks of parameters.
#pragma once
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "sgl_lowlatency/abi/slice.hpp"

namespace sgl_lowlatency::launch {

// Calls call(std::integral_constant<int32_t, kNTiles>) with the instance that takes so many rows.
template <class Call>
auto with_slice_instance(int32_t rows, const Call& call) {
  switch (abi::slice_n_tiles(rows)) {
    case 1: return call(std::integral_constant<int32_t, 1>{});
    case 2: return call(std::integral_constant<int32_t, 2>{});
    case 4: return call(std::integral_constant<int32_t, 4>{});
    default: return call(std::integral_constant<int32_t, 6>{});
  }
}

// Checks of a slice's parameters: what is not met throws std::invalid_argument that names the kernel and the parameter.
struct SliceCheck {
  const char* kernel;

  void require(bool is_met, const std::string& what) const {
    if (!is_met) throw std::invalid_argument(std::string(kernel) + ": " + what);
  }
  void require_within(int64_t value, int64_t least, int64_t most, const std::string& name) const {
    const bool is_within = value >= least && value <= most;
    require(is_within, name + " " + std::to_string(value) + " is outside " + std::to_string(least) + ".." + std::to_string(most));
  }
  void require_multiple(int64_t value, int64_t of, const std::string& name) const {
    require(value > 0 && value % of == 0, name + " " + std::to_string(value) + " is not a positive multiple of " + std::to_string(of));
  }

  // What every slice asks of a launch. smem: of the geometry and rows; handover_words: one generation's; pointers: those that must not be null.
  template <class Params>
  void require_launch(const Params& p, int32_t grid, const abi::SliceSmem& smem, int32_t handover_words,
                      std::initializer_list<const void*> pointers) const {
    require_within(grid, 1, 4096, "grid");
    require(p.max_position >= 1, "max_position " + std::to_string(p.max_position) + " is below 1");
    require(std::memcmp(&smem, &p.shared, sizeof(smem)) == 0, "shared is not the shared memory of geometry and rows");
    require(smem.num_stages >= 2, "rows " + std::to_string(p.rows) + " leave the ring fewer than 2 stages");
    require(p.generation_words % 4 == 0 && p.generation_words >= handover_words, "generation_words are too few for the rows");
    require(p.deadline_ns > 0, "deadline_ns is 0");
    for (const void* pointer : pointers) require(pointer != nullptr, "a pointer of the parameters is null");
  }
};

}  // namespace sgl_lowlatency::launch
