// Makes the maps through which the weight ring reads its matrices.
#pragma once
#include "sgl_lowlatency/abi/weight_map.hpp"

namespace sgl_lowlatency::launch {

// For load_stage of the host dialect, and of CUDA: a CUtensorMap. The matrix stays where it is; a map is valid as long as its
// memory. Throws std::invalid_argument for a matrix that the ring cannot read, std::runtime_error when the driver refuses.
abi::WeightMap encode_weight_map_host(const abi::WeightMatrix& matrix);
abi::WeightMap encode_weight_map_cuda(const abi::WeightMatrix& matrix);

// What both refuse.
void check_weight_matrix(const abi::WeightMatrix& matrix);

}  // namespace sgl_lowlatency::launch
