// Runs a self-test by its name.
#include "emulation/selftest.hpp"

#include <stdexcept>

namespace sgl_lowlatency::emulation {
namespace {

const Selftests& selftests() {
  static const Selftests all = [] {
    Selftests tests;
    add_ordering_selftests(tests);
    add_words_selftests(tests);
    add_clears_selftests(tests);
    add_machine_selftests(tests);
    add_copy_async_selftests(tests);
    add_load_stage_selftests(tests);
    add_fp8_selftests(tests);
    add_routing_selftests(tests);
    add_ranks_selftests(tests);
    add_misuse_selftests(tests);
    add_waves_selftests(tests);
    return tests;
  }();
  return all;
}

RaceRecord record(const Race& race) {
  return {{"kind", std::string(name(race.kind))},
          {"region", race.region},
          {"offset", static_cast<int64_t>(race.offset)},
          {"bytes", static_cast<int64_t>(race.bytes)},
          {"first_block", static_cast<int64_t>(race.first_block)},
          {"first_warp", static_cast<int64_t>(race.first_warp)},
          {"first_lane", static_cast<int64_t>(race.first_lane)},
          {"second_block", static_cast<int64_t>(race.second_block)},
          {"second_warp", static_cast<int64_t>(race.second_warp)},
          {"second_lane", static_cast<int64_t>(race.second_lane)},
          {"first_rank", static_cast<int64_t>(race.first_rank)},
          {"second_rank", static_cast<int64_t>(race.second_rank)},
          {"missing", std::string(name(race.missing))},
          {"stale", race.stale}};
}

}  // namespace

SelftestResult selftest(const std::string& name_of_test, uint64_t seed) {
  const auto found = selftests().find(name_of_test);
  if (found == selftests().end()) throw std::invalid_argument("emulation: no self-test named " + name_of_test);
  const SelftestRun run = found->second(seed);
  std::vector<RaceRecord> races;
  for (const Race& race : run.report.races) races.push_back(record(race));
  return {{"status", std::string(name(run.report.status))},
          {"message", run.report.message},
          {"switches", static_cast<int64_t>(run.report.switches)},
          {"slices", static_cast<int64_t>(run.report.slices)},
          {"virtual_ns", static_cast<int64_t>(run.report.virtual_ns)},
          {"num_races", static_cast<int64_t>(run.report.num_races)},
          {"races", std::move(races)},
          {"values", run.values}};
}

std::vector<std::string> selftest_names() {
  std::vector<std::string> names;
  for (const auto& entry : selftests()) names.push_back(entry.first);
  return names;
}

}  // namespace sgl_lowlatency::emulation
