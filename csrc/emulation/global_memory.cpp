// Global memory accesses against the shadow: what a load returns, and which pairs of accesses nothing orders.
#include "global_memory.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "machine.hpp"

namespace sgl_lowlatency::emulation {

uint32_t cell_mask(uintptr_t address, uint32_t bytes) {
  const uint32_t first = (address % kLineBytes) / 2, count = (bytes + 1) / 2;
  return ((1u << count) - 1u) << first;
}

namespace {

bool is_atomic(Access access) { return access == Access::kAtomic || access == Access::kSystem; }

bool races(Access a, Access b, bool is_one_rank) {
  return !is_atomic(a) || !is_atomic(b) || (!is_one_rank && (a != Access::kSystem || b != Access::kSystem));
}

Access access_of(const Stamp& write) { return (write.flags & kStampSystem) != 0 ? Access::kSystem : Access::kAtomic; }  // of an atomic one

uint32_t flags_of(Access access) {
  if (access == Access::kPlain) return kStampWritten;
  return kStampWritten | kStampAtomic | (access == Access::kSystem ? kStampSystem : 0u);
}

}  // namespace

void GlobalMemory::record_atomic_read(const ShadowRegion& region, uintptr_t address, uint32_t bytes, const Stamp& write) {
  const RaceKind kind = (write.flags & kStampAtomic) != 0 ? RaceKind::kNarrowScope : read_race_kind(*machine->current, write);
  record_race(kind, region.name, address - region.begin, bytes, write, false);
}

GlobalMemory::GlobalMemory(const std::vector<Region>& regions) {
  for (const Region& region : regions) {
    if (region.bytes == 0) continue;
    const uintptr_t begin = reinterpret_cast<uintptr_t>(region.base), end = begin + region.bytes;
    const uintptr_t first_page = begin / kPageBytes;
    const uint32_t idx = static_cast<uint32_t>(&region - regions.data());
    ShadowRegion shadow{region.name, idx, begin, end, first_page, region.track_reads, {}};
    shadow.pages.resize((end + kPageBytes - 1) / kPageBytes - first_page);
    regions_.push_back(std::move(shadow));
  }
  std::sort(regions_.begin(), regions_.end(), [](const ShadowRegion& a, const ShadowRegion& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < regions_.size(); ++i) {
    if (regions_[i].begin < regions_[i - 1].end) {
      throw std::invalid_argument(std::string("emulation: regions overlap: ") + regions_[i - 1].name + ", " + regions_[i].name);
    }
  }
  if (regions_.empty()) return;
  begin_ = regions_.front().begin;
  end_ = regions_.back().end;
  last_ = &regions_.front();
}

ShadowRegion* GlobalMemory::find(uintptr_t address) {
  if (address < begin_ || address >= end_) return nullptr;
  if (address >= last_->begin && address < last_->end) return last_;
  auto after = std::upper_bound(regions_.begin(), regions_.end(), address,
                                [](uintptr_t value, const ShadowRegion& region) { return value < region.begin; });
  if (after == regions_.begin()) return nullptr;
  ShadowRegion* const region = &*(after - 1);
  if (address >= region->end) return nullptr;
  last_ = region;
  return region;
}

Line* GlobalMemory::line(ShadowRegion& region, uintptr_t address, bool create) {
  std::unique_ptr<ShadowPage>& page = region.pages[address / kPageBytes - region.first_page];
  if (!page) {
    if (!create) return nullptr;
    page = std::make_unique<ShadowPage>();
  }
  return &page->lines[address % kPageBytes / kLineBytes];
}

// A read by a lane replaces its earlier reads of the same cells: whatever is ordered after the later is after both.
void GlobalMemory::add_reader(Line& line, uint32_t cells, uint32_t fresh, Access access) {
  const Lane& lane = *machine->current;
  const Warp& warp = *lane.warp;
  const uint32_t interval = interval_of(lane);
  bool added = false;
  for (uint32_t* link = &line.readers; *link != kNoReader;) {
    ReaderNode& node = readers_[*link];
    if (node.warp == warp.idx && node.access == access) {
      if (!added && node.interval == interval && node.cells == cells && node.fresh == fresh) {
        node.lanes |= lane.bit;
        added = true;
      } else if (!added && node.interval == interval && node.lanes == lane.bit) {
        node.cells |= static_cast<uint8_t>(cells);
        node.fresh |= static_cast<uint8_t>(fresh);
        added = true;
      } else if ((node.cells & ~cells) == 0) {
        node.lanes &= ~lane.bit;
        if (node.lanes == 0) {
          const uint32_t freed = *link;
          *link = node.next;
          readers_[freed].next = free_readers_;
          free_readers_ = freed;
          continue;
        }
      }
    }
    link = &node.next;
  }
  if (added) return;
  uint32_t idx = free_readers_;
  if (idx != kNoReader) {
    free_readers_ = readers_[idx].next;
  } else {
    idx = static_cast<uint32_t>(readers_.size());
    readers_.emplace_back();
  }
  readers_[idx] = {interval, lane.bit, static_cast<uint16_t>(warp.idx), static_cast<uint8_t>(cells), static_cast<uint8_t>(fresh),
                   access, line.readers};
  line.readers = idx;
}

// The current lane writes `cells`: their readers must be ordered before. Forgets those readers.
void GlobalMemory::check_readers(ShadowRegion& region, Line& line, uintptr_t address, uint32_t bytes, uint32_t cells,
                                 Access access) {
  const Lane& lane = *machine->current;
  for (uint32_t* link = &line.readers; *link != kNoReader;) {
    ReaderNode& node = readers_[*link];
    node.fresh &= static_cast<uint8_t>(~cells);
    if ((node.cells & cells) != 0 && races(access, node.access, is_of_rank(lane, node.warp))) {
      const LaneMask unordered = node.lanes & ~known_lanes(lane, node.warp, node.interval);
      if (unordered != 0) {
        const RaceKind race = access == Access::kClear                         ? RaceKind::kClearedWhileRead
                              : is_atomic(access) && is_atomic(node.access) ? RaceKind::kNarrowScope
                                                                            : RaceKind::kWriteAfterRead;
        const Stamp read{node.interval, node.warp, static_cast<uint8_t>(__builtin_ctzll(unordered)), 0};
        record_race(race, region.name, address - region.begin, bytes, read, false);
      }
      node.cells &= static_cast<uint8_t>(~cells);
      if (node.cells == 0) {
        const uint32_t freed = *link;
        *link = node.next;
        readers_[freed].next = free_readers_;
        free_readers_ = freed;
        continue;
      }
    }
    link = &node.next;
  }
}

uint32_t GlobalMemory::unordered_cells(const Line& line, uint32_t cells, Access access) const {
  const Lane& lane = *machine->current;
  const Stamp* last = nullptr;
  bool last_ordered = true;
  uint32_t unordered = 0;
  for (uint32_t left = cells; left != 0; left &= left - 1) {
    const uint32_t i = static_cast<uint32_t>(__builtin_ctz(left));
    const Stamp& write = line.cells[i].write;
    if ((write.flags & kStampWritten) == 0) continue;
    if ((write.flags & kStampAtomic) != 0 && is_atomic(access) && !races(access, access_of(write), is_of_rank(lane, write.warp))) continue;
    if (last == nullptr || last->interval != write.interval || last->warp != write.warp || last->lane != write.lane) {
      last_ordered = (known_lanes(lane, write.warp, write.interval) >> write.lane & 1u) != 0;
    }
    last = &write;
    if (!last_ordered) unordered |= 1u << i;
  }
  return unordered;
}

void GlobalMemory::check_write(ShadowRegion& region, Line& line, uintptr_t address, uint32_t bytes, Access access) {
  const Lane& lane = *machine->current;
  const uint32_t cells = cell_mask(address, bytes);
  uint32_t unordered = unordered_cells(line, cells, access);
  if (unordered != 0 && access == Access::kClear) unordered &= ~seen_cells(line);  // PTX's observation order
  if (unordered != 0) {
    const Stamp& write = line.cells[__builtin_ctz(unordered)].write;
    const bool is_narrow = is_atomic(access) && (write.flags & kStampAtomic) != 0;
    record_race(is_narrow ? RaceKind::kNarrowScope : RaceKind::kWriteAfterWrite, region.name, address - region.begin, bytes, write, false);
  }
  check_readers(region, line, address, bytes, cells, access);
  const Stamp stamp = stamp_of(lane, flags_of(access));
  for (uint32_t left = cells; left != 0; left &= left - 1) {
    const uint32_t i = static_cast<uint32_t>(__builtin_ctz(left));
    line.cells[i].write = stamp;
    std::memcpy(&line.cells[i].previous, reinterpret_cast<const char*>(address / kLineBytes * kLineBytes + i * 2), 2);
  }
}

void GlobalMemory::load(void* value, const void* pointer, uint32_t bytes) {
  std::memcpy(value, pointer, bytes);
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  ShadowRegion* const region = find(address);
  if (region == nullptr) return;
  Line* const shadow = line(*region, address, region->track_reads);
  if (shadow == nullptr) return;
  const uint32_t cells = cell_mask(address, bytes);
  if (region->track_reads) add_reader(*shadow, cells, 0, Access::kPlain);
  const uint32_t unordered = unordered_cells(*shadow, cells, Access::kPlain);
  if (unordered == 0) return;
  const bool stale = machine->random.below(16) < machine->stale_sixteenths;
  const Stamp& write = shadow->cells[__builtin_ctz(unordered)].write;
  record_race(read_race_kind(*machine->current, write), region->name, address - region->begin, bytes, write, stale);
  if (!stale) return;
  for (uint32_t left = unordered; left != 0; left &= left - 1) {
    const uint32_t i = static_cast<uint32_t>(__builtin_ctz(left));
    std::memcpy(static_cast<char*>(value) + (i * 2 - address % kLineBytes), &shadow->cells[i].previous, 2);
  }
}

void GlobalMemory::load_constant(void* value, const void* pointer, uint32_t bytes) {
  std::memcpy(value, pointer, bytes);
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  ShadowRegion* const region = find(address);
  if (region == nullptr) return;
  Line* const shadow = line(*region, address, region->track_reads);
  if (shadow == nullptr) return;
  const uint32_t cells = cell_mask(address, bytes);
  if (region->track_reads) add_reader(*shadow, cells, 0, Access::kPlain);
  for (uint32_t left = cells; left != 0; left &= left - 1) {
    const uint32_t i = static_cast<uint32_t>(__builtin_ctz(left));
    const Cell& cell = shadow->cells[i];
    if ((cell.write.flags & kStampWritten) == 0) continue;
    const bool stale = machine->random.below(16) < machine->stale_sixteenths;
    record_race(RaceKind::kConstantWritten, region->name, address - region->begin, bytes, cell.write, stale);
    if (stale) std::memcpy(static_cast<char*>(value) + (i * 2 - address % kLineBytes), &cell.previous, 2);
    return;
  }
}

void GlobalMemory::store(void* pointer, const void* value, uint32_t bytes) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  ShadowRegion* const region = find(address);
  if (region != nullptr) {
    check_write(*region, *line(*region, address, true), address, bytes, Access::kPlain);
    forget_words(*region, address, bytes);
  }
  std::memcpy(pointer, value, bytes);
}

void GlobalMemory::check_atomic(const void* pointer, uint32_t bytes, bool reads, bool writes, Scope scope) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  ShadowRegion* const region = find(address);
  if (region == nullptr) return;
  Line* const shadow = line(*region, address, writes || region->track_reads);
  if (shadow == nullptr) return;
  const uint32_t cells = cell_mask(address, bytes);
  if (reads) {
    const uint32_t unordered = unordered_cells(*shadow, cells, atomic_access(scope));
    if (unordered != 0) record_atomic_read(*region, address, bytes, shadow->cells[__builtin_ctz(unordered)].write);
  }
  if (writes) {
    check_write(*region, *shadow, address, bytes, atomic_access(scope));
    forget_words(*region, address, bytes);
  }
  if (reads && region->track_reads) add_reader(*shadow, cells, 0, atomic_access(scope));
}

void GlobalMemory::check_constant_range(const void* pointer, size_t bytes) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(pointer);
  if (begin + bytes <= begin_ || begin >= end_) return;
  for (uintptr_t address = begin; address < begin + bytes; address += kLineBytes) {
    unsigned char ignored[kLineBytes];
    load_constant(ignored, reinterpret_cast<const void*>(address), kLineBytes);
  }
}

}  // namespace sgl_lowlatency::emulation
