// Small kernels that prove the emulation itself: each shows one rule kept, or one mistake found.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "emulation/emulation.hpp"

namespace sgl_lowlatency::emulation {

using RaceRecord = std::map<std::string, std::variant<bool, int64_t, std::string>>;
using SelftestField = std::variant<int64_t, std::string, std::vector<double>, std::vector<RaceRecord>>;

// The report's fields by name (status and kinds as text), and "values": what the kernel computed, see the kernel.
using SelftestResult = std::map<std::string, SelftestField>;

// Runs the named kernel with the seed. Throws std::invalid_argument for an unknown name.
SelftestResult selftest(const std::string& name, uint64_t seed);
std::vector<std::string> selftest_names();

// Of selftest_*.cpp: what a kernel's run leaves.
struct SelftestRun {
  Report report;
  std::vector<double> values;
};
using Selftests = std::map<std::string, SelftestRun (*)(uint64_t seed)>;
void add_ordering_selftests(Selftests& tests);
void add_words_selftests(Selftests& tests);
void add_clears_selftests(Selftests& tests);
void add_machine_selftests(Selftests& tests);
void add_copy_async_selftests(Selftests& tests);
void add_load_stage_selftests(Selftests& tests);
void add_fp8_selftests(Selftests& tests);
void add_routing_selftests(Selftests& tests);
void add_ranks_selftests(Selftests& tests);
void add_misuse_selftests(Selftests& tests);
void add_waves_selftests(Selftests& tests);

}  // namespace sgl_lowlatency::emulation
