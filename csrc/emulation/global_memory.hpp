// Shadow of registered global memory: who wrote and read each 2-byte cell in this launch, and the value before.
#pragma once
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "clock.hpp"
#include "emulation.hpp"
#include "sgl_lowlatency/dialect/host.hpp"

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
constexpr uint8_t kStampSystem = 4;  // atomic at system scope

struct Cell {
  Stamp write;
  uint16_t previous = 0;
};

constexpr uint32_t kLineBytes = 16;  // an access never crosses a line
constexpr uint32_t kCellsPerLine = kLineBytes / 2;
constexpr uint32_t kPageBytes = 4096;
constexpr uint32_t kNoReader = 0xffffffffu;

// The kinds of access that differ in what they race with: atomic ones with plain ones, and with atomic ones of another rank unless both are
// of system scope; a clear with everything.
enum class Access : uint8_t { kPlain, kAtomic, kSystem, kClear };
constexpr Access atomic_access(Scope scope) { return scope == Scope::kSystem ? Access::kSystem : Access::kAtomic; }

// Reads of some cells of a line, by some lanes of a warp, in one interval.
struct ReaderNode {
  uint32_t interval;
  LaneMask lanes;
  uint16_t warp;
  uint8_t cells;
  uint8_t fresh;  // of these, cells that gave the value of their last write
  Access access;
  uint32_t next;
};

struct Line {
  Cell cells[kCellsPerLine];
  uint32_t readers = kNoReader;
};

// What the last store_words of a word carries: to readers of its own rank, and to those of others.
struct Carried {
  PublicationPtr in_rank;
  PublicationPtr to_peers;
};

// A word of load_words, store_words and clear_words.
struct Word {
  Stamp clear;                // of the last clear
  uint32_t before_clear = 0;  // what that clear replaced
  bool holds_data = false;    // stored, and not cleared since
  Carried carried;            // by the last store_words
};

struct WordPage {
  Word words[kPageBytes / 4];
};

struct ShadowPage {
  Line lines[kPageBytes / kLineBytes];
  std::unique_ptr<WordPage> words;  // null: no word of the page was stored or cleared
};

struct ShadowRegion {
  const char* name;
  uint32_t idx;  // in Options::regions
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
  void check_atomic(const void* address, uint32_t bytes, bool reads, bool writes, Scope scope);
  // words.cpp. load_words returns false when it gave an old value of some word.
  bool load_words(uint32_t* words, const uint32_t* address, uint32_t num_words, Scope scope);
  void store_words(uint32_t* address, const uint32_t* words, uint32_t num_words, Scope scope);
  void clear_words(uint32_t* address);
  // A number for the 16-byte line that does not depend on where regions lie: a seed must replay.
  uint64_t line_number(const void* address);
  // A bulk copy's source must not have been written in this launch.
  void check_constant_range(const void* address, size_t bytes);

 private:
  ShadowRegion* find(uintptr_t address);
  Line* line(ShadowRegion& region, uintptr_t address, bool create);
  Word* words(ShadowRegion& region, uintptr_t address, bool create);
  void forget_words(ShadowRegion& region, uintptr_t address, uint32_t bytes);
  void add_reader(Line& line, uint32_t cells, uint32_t fresh, Access access);
  void check_readers(ShadowRegion& region, Line& line, uintptr_t address, uint32_t bytes, uint32_t cells, Access access);
  // Those of `cells` whose last write is in no order with the current lane, but for writes that `access` does not race with.
  uint32_t unordered_cells(const Line& line, uint32_t cells, Access access) const;
  // An atomic read that races with `write`.
  void record_atomic_read(const ShadowRegion& region, uintptr_t address, uint32_t bytes, const Stamp& write);
  // Cells whose last write some lane has seen that the current lane is ordered after: it cannot get an older value.
  uint32_t seen_cells(const Line& line) const;
  void check_write(ShadowRegion& region, Line& line, uintptr_t address, uint32_t bytes, Access access);

  std::vector<ShadowRegion> regions_;  // by address
  uintptr_t begin_ = 0, end_ = 0;
  ShadowRegion* last_ = nullptr;
  uintptr_t first_outside_ = 0;  // line outside all regions
  std::unordered_map<const uint32_t*, Carried> carried_outside_;  // by words outside all regions, when there are any
  std::vector<ReaderNode> readers_;
  uint32_t free_readers_ = kNoReader;
};

}  // namespace sgl_lowlatency::emulation
