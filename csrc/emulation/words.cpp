// Words that are data and flag at once: relaxed loads and stores, and clears that must be ordered against both.
#include <algorithm>
#include <cstring>

#include "machine.hpp"

namespace sgl_lowlatency::emulation {
namespace {

constexpr uint32_t kPreemptWordsOneIn = 32;
constexpr uint32_t kMaxOldSixteenths = 8;  // loads that give old words: pollers need not look often
constexpr uint32_t kWordBytes = 4;
constexpr uint32_t kCellsPerWord = kWordBytes / 2;

bool written(const Stamp& stamp) { return (stamp.flags & kStampWritten) != 0; }

// knows(lane, stamp) of several words: most have one writer, and one who cleared them.
class Knowledge {
 public:
  explicit Knowledge(const Lane& lane) : lane_(lane) {}
  bool knows(const Stamp& stamp) {
    if (last_.interval != stamp.interval || last_.warp != stamp.warp || last_.lane != stamp.lane || last_.flags == 0) {
      last_ = stamp;
      known_ = emulation::knows(lane_, stamp);
    }
    return known_;
  }

 private:
  const Lane& lane_;
  Stamp last_;
  bool known_ = false;
};

uint32_t previous_word(const Cell* cells) { return cells[0].previous | static_cast<uint32_t>(cells[1].previous) << 16; }

// What a load of scope `scope` learns of a word, once its lane fences; null: nothing.
const PublicationPtr& carried_to(const Lane& lane, const Carried& carried, Scope scope) {
  static const PublicationPtr none;
  if (carried.in_rank && is_of_rank(lane, carried.in_rank->warp)) return carried.in_rank;
  return scope == Scope::kSystem ? carried.to_peers : none;
}

Carried carried_by(const Lane& lane, Scope scope) {
  return {lane.publication, scope == Scope::kSystem ? lane.system_publication : nullptr};
}

}  // namespace

Word* GlobalMemory::words(ShadowRegion& region, uintptr_t address, bool create) {
  ShadowPage& page = *region.pages[address / kPageBytes - region.first_page];
  if (!page.words) {
    if (!create) return nullptr;
    page.words = std::make_unique<WordPage>();
  }
  return &page.words->words[address % kPageBytes / kWordBytes];
}

// Another kind of write replaces what the words held: what races with that, its stamps say.
void GlobalMemory::forget_words(ShadowRegion& region, uintptr_t address, uint32_t bytes) {
  Word* const first = words(region, address, false);
  if (first == nullptr) return;
  for (uint32_t i = 0; i < (bytes + kWordBytes - 1) / kWordBytes; ++i) first[i] = Word{};
}

uint64_t GlobalMemory::line_number(const void* pointer) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer), line = address / kLineBytes;
  const ShadowRegion* const region = find(address);
  if (region != nullptr) return (static_cast<uint64_t>(region->idx + 1) << 40) + line - region->begin / kLineBytes;
  if (first_outside_ == 0) first_outside_ = line;
  return line - first_outside_;
}

uint32_t GlobalMemory::seen_cells(const Line& line) const {
  const Lane& lane = *machine->current;
  uint32_t seen = 0;
  for (uint32_t idx = line.readers; idx != kNoReader; idx = readers_[idx].next) {
    const ReaderNode& node = readers_[idx];
    if ((node.fresh & ~seen) != 0 && (node.lanes & known_lanes(lane, node.warp, node.interval)) != 0) seen |= node.fresh;
  }
  return seen;
}

bool GlobalMemory::load_words(uint32_t* values, const uint32_t* pointer, uint32_t num_words, Scope scope) {
  const uint32_t bytes = num_words * kWordBytes;
  std::memcpy(values, pointer, bytes);
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  ShadowRegion* const region = find(address);
  Lane& lane = *machine->current;
  if (region == nullptr) {
    for (uint32_t i = 0; !carried_outside_.empty() && i < num_words; ++i) {
      const auto found = carried_outside_.find(pointer + i);
      if (found == carried_outside_.end()) continue;
      if (const PublicationPtr& publication = carried_to(lane, found->second, scope)) add_pending(lane, publication);
    }
    return true;
  }
  Line& shadow = *line(*region, address, true);
  const Word* const word = words(*region, address, false);
  const uint32_t cells = cell_mask(address, bytes), plain = unordered_cells(shadow, cells, atomic_access(scope));
  if (plain != 0) record_atomic_read(*region, address, bytes, shadow.cells[__builtin_ctz(plain)].write);
  const bool gives_old = machine->random.below(16) < std::min(machine->stale_sixteenths, kMaxOldSixteenths);
  Knowledge clears(lane), writes(lane);
  const PublicationPtr* carried = nullptr;
  uint32_t fresh = cells;
  for (uint32_t i = 0; word != nullptr && i < num_words; ++i) {
    const uint32_t first = address % kLineBytes / 2 + i * kCellsPerWord, word_cells = 3u << first;
    const Cell* const cell = &shadow.cells[first];
    if (!written(cell->write)) continue;
    const bool unordered_clear = written(word[i].clear) && !clears.knows(word[i].clear);
    const bool stale = gives_old && (plain & word_cells) == 0 && (unordered_clear || !writes.knows(cell->write)) &&
                       machine->random.one_in(2) && (seen_cells(shadow) & word_cells) == 0;
    const bool before_clear = stale && unordered_clear && (!word[i].holds_data || machine->random.one_in(2));
    if (unordered_clear) {
      record_race(RaceKind::kUnorderedClear, region->name, address + i * kWordBytes - region->begin, kWordBytes, word[i].clear,
                  before_clear);
    }
    if (stale) {
      values[i] = before_clear ? word[i].before_clear : previous_word(cell);
      fresh &= ~word_cells;
    } else if (const PublicationPtr& publication = carried_to(lane, word[i].carried, scope)) {
      if (carried != nullptr && *carried == publication) continue;
      carried = &publication;
      add_pending(lane, publication);
    }
  }
  add_reader(shadow, cells, fresh, atomic_access(scope));
  return fresh == cells;
}

void GlobalMemory::store_words(uint32_t* pointer, const uint32_t* values, uint32_t num_words, Scope scope) {
  const uint32_t bytes = num_words * kWordBytes;
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  ShadowRegion* const region = find(address);
  const Lane& lane = *machine->current;
  if (region == nullptr) {
    for (uint32_t i = 0; !regions_.empty() && i < num_words; ++i) {
      if (lane.publication) carried_outside_[pointer + i] = carried_by(lane, scope); else carried_outside_.erase(pointer + i);
    }
  } else {
    Line& shadow = *line(*region, address, true);
    Word* const word = words(*region, address, true);
    for (uint32_t i = 0; i < num_words; ++i) {
      const size_t offset = address + i * kWordBytes - region->begin;
      if (word[i].holds_data) {
        const Stamp& write = shadow.cells[address % kLineBytes / 2 + i * kCellsPerWord].write;
        record_race(RaceKind::kWrittenTwice, region->name, offset, kWordBytes, write, false);
      } else if (written(word[i].clear) && !knows(lane, word[i].clear)) {
        record_race(RaceKind::kUnorderedClear, region->name, offset, kWordBytes, word[i].clear, false);
      }
      word[i].holds_data = true;
      word[i].carried = carried_by(lane, scope);
    }
    check_write(*region, shadow, address, bytes, atomic_access(scope));
  }
  std::memcpy(pointer, values, bytes);
}

void GlobalMemory::clear_words(uint32_t* pointer) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  ShadowRegion* const region = find(address);
  if (region != nullptr) {
    check_write(*region, *line(*region, address, true), address, kLineBytes, Access::kClear);
    Word* const word = words(*region, address, true);
    for (uint32_t i = 0; i < kLineBytes / kWordBytes; ++i) {
      word[i] = {stamp_of(*machine->current, kStampWritten), pointer[i], false, {}};
    }
  } else {
    for (uint32_t i = 0; !carried_outside_.empty() && i < kLineBytes / kWordBytes; ++i) carried_outside_.erase(pointer + i);
  }
  std::fill_n(pointer, kLineBytes / kWordBytes, abi::kUnwritten);
}

void load_word_vector(uint32_t* words, const uint32_t* address, uint32_t num_words, Scope scope) {
  check_access(address, num_words * kWordBytes, "load_words");
  maybe_preempt(kPreemptWordsOneIn);
  Lane& lane = *machine->current;
  lane.looked_at |= line_bucket(address);
  if (!machine->global.load_words(words, address, num_words, scope)) lane.warp->got_old |= lane.bit;
}

void store_word_vector(uint32_t* address, const uint32_t* words, uint32_t num_words, Scope scope) {
  check_access(address, num_words * kWordBytes, "store_words");
  maybe_preempt(kPreemptWordsOneIn);
  machine->global.store_words(address, words, num_words, scope);
  words_changed(address);
}

void store_word_vector_multicast(uint32_t* address, const uint32_t* words, uint32_t num_words) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(address);
  for (const Multicast& multicast : machine->options.multicasts) {
    const uintptr_t base = reinterpret_cast<uintptr_t>(multicast.base);
    if (at < base || at + num_words * kWordBytes > base + multicast.bytes) continue;
    for (void* target : multicast.targets) {
      store_word_vector(reinterpret_cast<uint32_t*>(static_cast<char*>(target) + (at - base)), words, num_words, Scope::kSystem);
    }
    return;
  }
  misuse("store_words_multicast: not a multicast address");
}

}  // namespace sgl_lowlatency::emulation

namespace sgl_lowlatency::dialect {

using namespace emulation;

void clear_words(uint32_t* address) {
  check_access(address, kLineBytes, "clear_words");
  maybe_preempt(kPreemptWordsOneIn);
  machine->global.clear_words(address);
  machine->progress = true;
}

}  // namespace sgl_lowlatency::dialect
