// Self-test of fp8_to_bf16x2: what every code becomes in every byte of a word.
#include "emulation/selftest.hpp"
#include "sgl_lowlatency/stages/fp8.hpp"

namespace sgl_lowlatency::emulation {

// values: of byte 0, then 1, 2 and 3, what each of the 256 codes becomes; the other bytes hold other codes.
void add_fp8_selftests(Selftests& tests) {
  tests["fp8_codes"] = [](uint64_t seed) {
    std::vector<double> values(4 * 256);
    Options options;
    options.seed = seed;
    const Report report = emulation::launch(1, 32, 128, [&] {
      if (dialect::thread_idx() != 0) return;
      for (uint32_t byte = 0; byte < 4; ++byte) {
        for (uint32_t code = 0; code < 256; ++code) {
          uint32_t word = 0;
          for (uint32_t i = 0; i < 4; ++i) word |= (i == byte ? code : (code * 37 + i * 91) & 0xffu) << 8 * i;
          uint32_t y[2];
          stages::fp8_to_bf16x2(word, y);
          values[byte * 256 + code] = dialect::bits_to_float(y[byte % 2] >> byte / 2 * 16 << 16);
        }
      }
    }, options);
    return SelftestRun{report, values};
  };
}

}  // namespace sgl_lowlatency::emulation
