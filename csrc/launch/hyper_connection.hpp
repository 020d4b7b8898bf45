// Checks of a hyper-connection's parameters, by the launchers of kernels that close one.
#pragma once
#include <stdexcept>
#include <string>

#include "sgl_lowlatency/abi/hyper_connection.hpp"

namespace sgl_lowlatency::launch {

// What is not met throws std::invalid_argument that names the kernel and the parameter.
inline void check_hyper_connection(const char* kernel, const abi::HyperConnection& hyper) {
  const auto require = [kernel](bool is_met, const std::string& what) {
    if (!is_met) throw std::invalid_argument(std::string(kernel) + ": " + what);
  };
  require(hyper.sinkhorn_iterations >= 1, "sinkhorn_iterations " + std::to_string(hyper.sinkhorn_iterations) + " is below 1");
  require(hyper.mix_eps >= 0.0f, "mix_eps " + std::to_string(hyper.mix_eps) + " is negative");
  require(hyper.mix_rms_eps >= 0.0f, "mix_rms_eps " + std::to_string(hyper.mix_rms_eps) + " is negative");
  for (const void* pointer : {static_cast<const void*>(hyper.streams), static_cast<const void*>(hyper.mix), static_cast<const void*>(hyper.mix_scale),
                              static_cast<const void*>(hyper.mix_base), static_cast<const void*>(hyper.streams_out)}) {
    require(pointer != nullptr, "a pointer of the hyper-connection is null");
  }
  require(hyper.streams != hyper.streams_out, "streams_out is streams");
}

}  // namespace sgl_lowlatency::launch
