// Host side of launch/weight_map.hpp.
#include "launch/weight_map.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

namespace sgl_lowlatency::launch {

void check_weight_matrix(const abi::WeightMatrix& m) {
  const auto require = [](bool is_met, const std::string& what) {
    if (!is_met) throw std::invalid_argument("weight matrix: " + what);
  };
  require(m.weight != nullptr && reinterpret_cast<uintptr_t>(m.weight) % 16 == 0, "its address is null or not a multiple of 16");
  require(m.num_parts == 1 || (m.num_parts > 0 && m.num_parts % 2 == 0),
          "num_parts " + std::to_string(m.num_parts) + " is neither 1 nor a positive even number");
  require(m.num_rows > 0 && (m.num_parts == 1 || m.num_rows % abi::kTileRows == 0),
          "num_rows " + std::to_string(m.num_rows) + " is not " +
              (m.num_parts == 1 ? "positive" : "a positive multiple of " + std::to_string(abi::kTileRows)));
  const int32_t tile_rows = abi::kTileRows / abi::tile_parts(m.num_parts);
  require(m.num_parts == 1 || m.num_rows % (m.num_parts * tile_rows) == 0,
          std::to_string(m.num_parts) + " equal parts of num_rows " + std::to_string(m.num_rows) + " are no multiples of " +
              std::to_string(tile_rows) + " rows");
  require(m.element_bytes == 1 || m.element_bytes == 2, "element_bytes " + std::to_string(m.element_bytes) + " is not 1 or 2");
  require(m.box != abi::kBoxTall || (m.num_parts == 1 && m.num_rows % abi::kTallRows == 0),
          "tall stages need one part of a multiple of " + std::to_string(abi::kTallRows) + " rows, not " + std::to_string(m.num_parts) + " of " +
              std::to_string(m.num_rows));
  const abi::WeightBoxShape box = abi::weight_box(m);
  require(m.box == abi::kBoxStage || m.num_rows % (m.num_parts * box.rows) == 0,
          std::to_string(m.num_parts) + " equal parts of num_rows " + std::to_string(m.num_rows) + " are no multiples of the box's " +
              std::to_string(box.rows) + " rows");
  require(m.box != abi::kBoxFp4Pair || m.element_bytes == 1,
          "FP4 is bytes of two columns, not elements of " + std::to_string(m.element_bytes) + " bytes");
  const int32_t chunk_k = box.chunk_bytes / m.element_bytes;
  require(m.k_extent > 0 && m.k_extent % chunk_k == 0, "k_extent " + std::to_string(m.k_extent) + " is not a positive multiple of " + std::to_string(chunk_k));
}

abi::WeightMap encode_weight_map_host(const abi::WeightMatrix& matrix) {
  check_weight_matrix(matrix);
  abi::WeightMap map{};
  std::memcpy(&map, &matrix, sizeof(matrix));
  return map;
}

}  // namespace sgl_lowlatency::launch
