// mbarriers with PTX's phase, arrival count and tx-count rules, bulk copies that complete on them, and the check of
// shared memory that bulk copies write and ldmatrix reads. Other shared memory accesses are ordinary C++ and unchecked.
#include <algorithm>
#include <cstring>

#include "machine.hpp"

namespace sgl_lowlatency::emulation {
namespace {

constexpr uint64_t kMagic = 0x6d62617272ull << 24;  // "mbarr"; the low 24 bits are an index into Block::mbarriers
constexpr uint64_t kIndexMask = 0xffffff;
constexpr uint32_t kMaxCount = (1u << 20) - 1;      // PTX's range of arrival counts and of |tx-count|
constexpr uint32_t kFailAtOnceOneIn = 8;
constexpr uint32_t kPreemptOneIn = 32;
constexpr int32_t kChunkLines = abi::kChunkBytes / static_cast<int32_t>(kLineBytes);

Mbarrier& find_mbarrier(const uint64_t* address) {
  const Lane& lane = *machine->current;
  const Block& block = *lane.warp->block;
  shared_offset(block, address, sizeof(uint64_t), "mbarrier");
  uint64_t word;
  std::memcpy(&word, address, sizeof(word));
  const uint64_t idx = word & kIndexMask;
  if ((word & ~kIndexMask) != kMagic || idx >= block.mbarriers.size() || block.mbarriers[idx]->address != address) {
    misuse("mbarrier used without mbarrier_init, or overwritten");
  }
  Mbarrier& mbarrier = *block.mbarriers[idx];
  if (!knows(lane, mbarrier.init_stamp)) misuse("mbarrier used with no barrier since its mbarrier_init");
  return mbarrier;
}

void complete_phase_if_due(Block& block, Mbarrier& mbarrier) {
  if (mbarrier.pending_arrivals != 0 || mbarrier.pending_bytes != 0) return;
  ++mbarrier.phase;
  mbarrier.pending_arrivals = mbarrier.expected_arrivals;
  mbarrier.arriving.mbarrier_phases[mbarrier.idx] = mbarrier.phase;
  mbarrier.completed = std::make_shared<Clock>(mbarrier.arriving);
  machine->progress = true;
  for (size_t i = 0; i < mbarrier.waiting_lanes.size(); ++i) {
    if (mbarrier.waiting_lanes[i] == 0) continue;
    wake_lanes(*machine->warps[block.range.own_begin + i], mbarrier.waiting_lanes[i]);
    mbarrier.waiting_lanes[i] = 0;
  }
}

void arrive(uint64_t* address, uint32_t bytes) {
  maybe_preempt(kPreemptOneIn);
  Lane& lane = *machine->current;
  Mbarrier& mbarrier = find_mbarrier(address);
  if (mbarrier.pending_arrivals == 0) {
    misuse("mbarrier_arrive: more than " + std::to_string(mbarrier.expected_arrivals) + " arrivals in a phase");
  }
  mbarrier.pending_bytes += bytes;
  if (mbarrier.pending_bytes > kMaxCount) misuse("mbarrier_arrive_expect_bytes: more than 2^20 - 1 bytes in a phase");
  --mbarrier.pending_arrivals;
  publish_in_block(lane, mbarrier.arriving);
  complete_phase_if_due(*lane.warp->block, mbarrier);
}

void suspend_at(Lane& lane, Mbarrier& mbarrier) {
  Warp& warp = *lane.warp;
  warp.runnable &= ~lane.bit;
  warp.at_mbarrier |= lane.bit;
  mbarrier.waiting_lanes[warp.idx_in_block] |= lane.bit;
  leave_lane();
  mbarrier.waiting_lanes[warp.idx_in_block] &= ~lane.bit;
}

}  // namespace

size_t shared_offset(const Block& block, const void* pointer, uint32_t bytes, const char* what) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(block.shared), at = reinterpret_cast<uintptr_t>(pointer);
  if (at < begin || at + bytes > begin + block.shared_bytes) misuse(std::string(what) + ": not in the block's shared memory");
  return at - begin;
}

bool wait_for_failed_mbarrier(Lane& lane) {
  if (lane.failed_mbarrier < 0) return false;
  Mbarrier& mbarrier = *lane.warp->block->mbarriers[lane.failed_mbarrier];
  lane.failed_mbarrier = -1;
  if (mbarrier.phase == lane.failed_phase) suspend_at(lane, mbarrier);
  return true;
}

void check_shared_read(Lane& lane, const void* row) {
  Block& block = *lane.warp->block;
  const size_t offset = shared_offset(block, row, kLineBytes, "ldmatrix_x4");
  if (offset % kLineBytes != 0) misuse("ldmatrix_x4: row of lane " + std::to_string(lane.idx) + " is not 16-byte aligned");
  SharedGranule& granule = block.granules[offset / kLineBytes];
  Warp& warp = *lane.warp;
  granule.read_interval = warp.interval = std::max(warp.interval, warp.fenced_interval);  // one for all lanes
  granule.read_warp = warp.idx;
  if (granule.copies_pending != 0 || granule.copy_waited.flags != 0) check_copy_seen(lane, granule, offset);
  if (granule.mbarrier == 0) return;
  if (granule.in_flight == 0 && phase_seen(lane, granule.mbarrier - 1u, granule.needs_phase)) return;
  record_race(RaceKind::kBulkUnfinished, "shared", offset, kLineBytes, granule.issuer_warp, -1, granule.in_flight != 0);
}

// The bytes of a stage, as the copy engine lays them out.
void copy_stage(const BulkCopy& copy) {
  abi::WeightMatrix matrix;
  std::memcpy(&matrix, copy.map, sizeof(matrix));
  const abi::WeightBoxShape box = abi::weight_box(matrix);
  const int64_t row_bytes = static_cast<int64_t>(matrix.k_extent) * matrix.element_bytes;
  const int32_t part_rows = matrix.num_rows / matrix.num_parts, lines = box.chunk_bytes / static_cast<int32_t>(kLineBytes);
  for (int32_t n = 0; n < box.chunks * box.parts * box.rows; ++n) {  // rows of the box, one behind the other
    const int32_t row = copy.row + n % box.rows, part = copy.part + n / box.rows % box.parts;
    const int64_t at = static_cast<int64_t>(copy.chunk + n / box.rows / box.parts) * box.chunk_bytes;
    const char* const from = static_cast<const char*>(matrix.weight) + (static_cast<int64_t>(part) * part_rows + row) * row_bytes + at;
    for (int32_t j = 0; j < lines; ++j) {
      char* const to = copy.shared + n * box.chunk_bytes + (matrix.box == abi::kBoxFp4Pair ? j : j ^ n % 8) * static_cast<int32_t>(kLineBytes);
      if (at >= row_bytes || row >= part_rows) {
        std::memset(to, 0, kLineBytes);
      } else {
        std::memcpy(to, from + j * static_cast<int64_t>(kLineBytes), kLineBytes);
      }
    }
  }
}

void finish_bulk_copy(size_t idx) {
  const BulkCopy copy = machine->bulk_copies[idx];
  machine->bulk_copies[idx] = machine->bulk_copies.back();
  machine->bulk_copies.pop_back();
  Block& block = *copy.block;
  Mbarrier& mbarrier = *block.mbarriers[copy.mbarrier];
  copy.map == nullptr ? static_cast<void>(std::memcpy(copy.shared, copy.global, copy.bytes)) : copy_stage(copy);
  const size_t first = static_cast<size_t>(copy.shared - block.shared) / kLineBytes;
  for (size_t i = 0; i < copy.bytes / kLineBytes; ++i) block.granules[first + i].in_flight = 0;
  --block.bulk_in_flight;
  mbarrier.pending_bytes -= copy.bytes;
  if (mbarrier.phase != copy.phase || mbarrier.pending_bytes < -static_cast<int64_t>(kMaxCount)) {
    machine->report.status = Status::kMisuse;
    machine->report.message = "block " + std::to_string(block.idx) +
                              ": a bulk copy completes in a later mbarrier phase than it was issued in: its bytes were not expected";
    return;
  }
  complete_phase_if_due(block, mbarrier);
}

// Entry: `copy` without its block, mbarrier index and phase.
void issue_copy(BulkCopy copy, uint64_t* address, const char* what) {
  maybe_preempt(kPreemptOneIn);
  Lane& lane = *machine->current;
  Block& block = *lane.warp->block;
  const size_t offset = shared_offset(block, copy.shared, copy.bytes, what);
  Mbarrier& mbarrier = find_mbarrier(address);
  if (!mbarrier.init_fenced) misuse(std::string(what) + ": no mbarrier_init_fence after the mbarrier's init");
  for (size_t i = offset / kLineBytes; i < (offset + copy.bytes) / kLineBytes; ++i) {
    SharedGranule& granule = block.granules[i];
    const bool read_unordered = granule.read_interval != 0 && known_lanes(lane, granule.read_warp, granule.read_interval) == 0;
    const bool in_use = granule.in_flight != 0 || granule.copies_pending != 0;
    if (in_use || read_unordered) {
      record_race(RaceKind::kBulkOverwrite, "shared", i * kLineBytes, kLineBytes,
                  in_use ? granule.issuer_warp : granule.read_warp, -1, false);
    }
    granule.mbarrier = static_cast<uint16_t>(mbarrier.idx + 1);
    granule.in_flight = 1;
    granule.needs_phase = mbarrier.phase + 1;
    granule.read_interval = 0;
    granule.issuer_warp = lane.warp->idx;
    granule.copy_waited = {};
  }
  if (machine->random.one_in(2)) std::memset(copy.shared, kPoisonByte, copy.bytes);
  ++block.bulk_in_flight;
  copy.block = &block;
  copy.mbarrier = mbarrier.idx;
  copy.phase = mbarrier.phase;
  machine->bulk_copies.push_back(copy);
}

}  // namespace sgl_lowlatency::emulation

namespace sgl_lowlatency::dialect {

using namespace emulation;

void mbarrier_init(uint64_t* mbarrier, uint32_t count) {
  const Lane& lane = *machine->current;
  Block& block = *lane.warp->block;
  const size_t offset = shared_offset(block, mbarrier, sizeof(uint64_t), "mbarrier_init");
  if (offset % sizeof(uint64_t) != 0) misuse("mbarrier_init: not 8-byte aligned");
  if (count == 0 || count > kMaxCount) misuse("mbarrier_init: count must be 1 to 2^20 - 1");
  if (block.mbarriers.size() == kMaxMbarriers) misuse("mbarrier_init: more than " + std::to_string(kMaxMbarriers) + " mbarriers in a block");
  for (const auto& other : block.mbarriers) {
    if (other->address == mbarrier) misuse("mbarrier_init: initialised before");
  }
  auto created = std::make_unique<Mbarrier>(machine->warps.size());
  created->address = mbarrier;
  created->idx = static_cast<uint32_t>(block.mbarriers.size());
  created->expected_arrivals = created->pending_arrivals = count;
  created->init_stamp = stamp_of(lane, kStampWritten);
  created->waiting_lanes.resize(block.range.own_end - block.range.own_begin);
  const uint64_t word = kMagic | created->idx;
  std::memcpy(mbarrier, &word, sizeof(word));
  block.mbarriers.push_back(std::move(created));
  block.range.num_mbarriers = static_cast<uint32_t>(block.mbarriers.size());
}

void mbarrier_init_fence() {
  const Lane& lane = *machine->current;
  for (const auto& mbarrier : lane.warp->block->mbarriers) {
    if (mbarrier->init_stamp.warp == lane.warp->idx && mbarrier->init_stamp.lane == lane.idx) mbarrier->init_fenced = true;
  }
}

void mbarrier_arrive(uint64_t* mbarrier) { arrive(mbarrier, 0); }

void mbarrier_arrive_expect_bytes(uint64_t* mbarrier, uint32_t bytes) { arrive(mbarrier, bytes); }

bool mbarrier_test(uint64_t* address, uint32_t parity) {
  if (parity > 1) misuse("mbarrier_test: parity must be 0 or 1");
  Lane& lane = *machine->current;
  Mbarrier& mbarrier = find_mbarrier(address);
  if ((mbarrier.phase & 1u) == parity && !machine->random.one_in(kFailAtOnceOneIn)) suspend_at(lane, mbarrier);
  if ((mbarrier.phase & 1u) != parity) {
    lane.failed_mbarrier = -1;
    learn(lane, mbarrier.completed);
    return true;
  }
  lane.failed_mbarrier = static_cast<int32_t>(mbarrier.idx);
  lane.failed_phase = mbarrier.phase;
  return false;
}

void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* address) {
  if (bytes == 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(shared) % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0) {
    misuse("bulk_load: addresses and size must be non-zero multiples of 16 bytes");
  }
  issue_copy({nullptr, static_cast<char*>(shared), static_cast<const char*>(global), nullptr, 0, 0, 0, bytes, 0, 0}, address, "bulk_load");
  machine->global.check_constant_range(global, bytes);
}

void load_stage(void* shared, const abi::WeightMap* map, int32_t row, int32_t part, int32_t chunk, uint64_t* address) {
  const Block& block = *machine->current->warp->block;
  abi::WeightMatrix matrix;
  std::memcpy(&matrix, map, sizeof(matrix));
  const abi::WeightBoxShape box = abi::weight_box(matrix);
  const int32_t num_rows = matrix.num_rows / matrix.num_parts, chunk_k = box.chunk_bytes / matrix.element_bytes;
  if (matrix.box == abi::kBoxTall && row % abi::kTallRows != 0) misuse("load_stage: row " + std::to_string(row) + " begins no tall stage");
  if ((static_cast<char*>(shared) - block.shared) % abi::kStageAlignment != 0) misuse("load_stage: the stage is not at a multiple of 1024 bytes");
  const bool is_part = part >= 0 && part % box.parts == 0 && part < matrix.num_parts;
  const bool is_row = row >= 0 && (matrix.box == abi::kBoxStage && matrix.num_parts == 1 ? row < num_rows : row + box.rows <= num_rows);
  if (!is_row || !is_part || chunk < 0 || chunk * chunk_k >= matrix.k_extent) {
    misuse("load_stage: row " + std::to_string(row) + ", part " + std::to_string(part) +
           ", chunk " + std::to_string(chunk) + " is outside the matrix");
  }
  const auto bytes = static_cast<uint32_t>(abi::weight_box_bytes(box));
  issue_copy({nullptr, static_cast<char*>(shared), nullptr, map, row, part, chunk, bytes, 0, 0}, address, "load_stage");
  machine->global.check_constant_range(matrix.weight, static_cast<size_t>(matrix.element_bytes) * matrix.num_rows * matrix.k_extent);
}

}  // namespace sgl_lowlatency::dialect
