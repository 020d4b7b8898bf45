// Which instance of a slice's kernel takes a launch's rows.
#pragma once
#include <cstdint>
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

}  // namespace sgl_lowlatency::launch
