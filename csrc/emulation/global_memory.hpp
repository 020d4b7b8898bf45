// Shadow of registered global memory: who wrote and read each 2-byte cell in this launch, and the value before.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "emulation.hpp"

namespace sgl_lowlatency::emulation {

struct Lane;

struct Stamp {
  uint32_t interval = 0;
  uint16_t warp = 0;
  uint8_t lane = 0;
  uint8_t flags = 0;
};
constexpr uint8_t kStampWritten = 1;
constexpr uint8_t kStampAtomic = 2;

struct Cell {
  Stamp write;
  uint16_t previous = 0;
};

constexpr uint32_t kLineBytes = 16;  // an access never crosses a line
constexpr uint32_t kCellsPerLine = kLineBytes / 2;
constexpr uint32_t kPageBytes = 4096;
constexpr uint32_t kNoReader = 0xffffffffu;

// Reads of some cells of a line, by some lanes of a warp, in one interval.
struct ReaderNode {
  uint32_t interval;
  uint32_t lanes;
  uint16_t warp;
  uint8_t cells;
  bool atomic;
  uint32_t next;
};

struct Line {
  Cell cells[kCellsPerLine];
  uint32_t readers = kNoReader;
};

struct ShadowPage {
  Line lines[kPageBytes / kLineBytes];
};

struct ShadowRegion {
  const char* name;
  uintptr_t begin;
  uintptr_t end;
  uintptr_t first_page;
  bool track_reads;
  std::vector<std::unique_ptr<ShadowPage>> pages;
};

class GlobalMemory {
 public:
  explicit GlobalMemory(const std::vector<Region>& regions);

  // The caller is the current lane. Accesses are naturally aligned, bytes is 2, 4, 8 or 16.
  void load(void* value, const void* address, uint32_t bytes);
  void load_constant(void* value, const void* address, uint32_t bytes);
  void store(void* address, const void* value, uint32_t bytes);
  // Checks an atomic access against plain ones; the caller performs it.
  void check_atomic(const void* address, uint32_t bytes, bool reads, bool writes);
  // A bulk copy's source must not have been written in this launch.
  void check_constant_range(const void* address, size_t bytes);

 private:
  ShadowRegion* find(uintptr_t address);
  Line* line(ShadowRegion& region, uintptr_t address, bool create);
  void add_reader(Line& line, uint32_t cells, bool atomic);
  void check_readers(ShadowRegion& region, Line& line, uintptr_t address, uint32_t bytes, uint32_t cells, bool atomic);
  // Those of `cells` whose last write is in no order with the current lane. Atomic accesses do not race with atomic writes.
  uint32_t unordered_cells(const Line& line, uint32_t cells, bool atomic) const;
  void check_write(ShadowRegion& region, Line& line, uintptr_t address, uint32_t bytes, bool atomic);

  std::vector<ShadowRegion> regions_;  // by address
  uintptr_t begin_ = 0, end_ = 0;
  ShadowRegion* last_ = nullptr;
  std::vector<ReaderNode> readers_;
  uint32_t free_readers_ = kNoReader;
};

}  // namespace sgl_lowlatency::emulation
