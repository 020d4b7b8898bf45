// CUDA side of launch/weight_map.hpp.
#include "launch/weight_map.hpp"

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstring>
#include <stdexcept>
#include <string>

namespace sgl_lowlatency::launch {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, without linking libcuda: an installation must load on machines that have none.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess || function == nullptr) {
    throw std::runtime_error(std::string("decode_step: the driver has no cuTensorMapEncodeTiled (") + cudaGetErrorName(error) +
                             "): it needs the driver of CUDA 12.0 or newer");
  }
  return reinterpret_cast<Encode>(function);
}

}  // namespace

// The matrix as [K / chunk_k][parts][rows of a part][chunk_k], innermost last, and the box as abi::weight_box says, which the 128-byte swizzle lays out
// as abi::stage_offset says, FP4 as it comes. Of a tall box, or of a pair, the next copy wants what lies beside each row: L2 fetches 256 bytes at a
// time.
abi::WeightMap encode_weight_map_cuda(const abi::WeightMatrix& m) {
  check_weight_matrix(m);
  static const Encode encode = find_encode();
  const abi::WeightBoxShape shape = abi::weight_box(m);
  const auto parts = static_cast<cuuint32_t>(m.num_parts), chunk_k = static_cast<cuuint32_t>(shape.chunk_bytes / m.element_bytes);
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(m.k_extent) * static_cast<cuuint64_t>(m.element_bytes);
  const cuuint64_t part_rows = static_cast<cuuint64_t>(m.num_rows) / parts;
  const cuuint64_t dims[4] = {chunk_k, part_rows, parts, static_cast<cuuint64_t>(m.k_extent) / chunk_k};
  const cuuint64_t strides[3] = {row_bytes, row_bytes * part_rows, static_cast<cuuint64_t>(shape.chunk_bytes)};
  const cuuint32_t box[4] = {chunk_k, static_cast<cuuint32_t>(shape.rows), static_cast<cuuint32_t>(shape.parts),
                             static_cast<cuuint32_t>(shape.chunks)};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUtensorMapDataType type = m.element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  CUtensorMap tensor_map;
  static_assert(sizeof(tensor_map) == sizeof(abi::WeightMap), "a WeightMap holds a CUtensorMap");
  const CUresult result = encode(&tensor_map, type, 4, const_cast<void*>(m.weight), dims, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 m.box == abi::kBoxFp4Pair ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B,
                                 m.box != abi::kBoxStage ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("decode_step: cuTensorMapEncodeTiled refused [" + std::to_string(m.num_rows) + ", " + std::to_string(m.k_extent) +
                             "] in " + std::to_string(m.num_parts) + " parts: CUresult " + std::to_string(static_cast<int>(result)));
  }
  abi::WeightMap map;
  std::memcpy(&map, &tensor_map, sizeof(map));
  return map;
}

}  // namespace sgl_lowlatency::launch
