// Checks of accesses to global memory: bounds (of the launch's tensors), alignment, and order with the stores of other
// threads. Counts sectors of 32 bytes.
#include <algorithm>

#include "state.h"

int Launch::find_range(u64 at, u32 size, int hint) const {
  const Range* ranges = request.ranges;
  if (hint >= 0 && at >= ranges[hint].begin && at + size <= ranges[hint].end) return hint;
  for (u32 k = 0; k < request.range_count; k++) {
    if (at >= ranges[k].begin && at + size <= ranges[k].end) return static_cast<int>(k);
  }
  return -1;
}

namespace {

const char* const kVerbs[] = {"reads", "writes", "updates"};

// Whether the last write of `word` happened before an access of this lane: the lane itself wrote, or something orders
// the two. Lanes of a warp are ordered by bar.warp.sync and by what raises the warp's clock, as shared.cpp says: a
// barrier, an arrival at an mbarrier, fence.proxy.async. Warps of a block are ordered by a barrier or mbarrier, blocks
// by atomics with .release, .acquire or .acq_rel.
bool ordered(const Block& b, const Warp& w, u32 lane, const GlobalWord& word) {
  if (word.block != b.index + 1) {
    const auto known = b.known.find(word.block - 1);
    return known != b.known.end() && known->second.includes(word.warp, word.clock, word.lane);
  }
  if (word.warp != w.id) return word.clock <= w.clocks[word.warp];
  const bool met = w.met_at[lane] > word.step && w.met[lane] >> word.lane & 1;
  return met || word.lanes >> lane & 1 || word.clock < w.clocks[w.id];
}

}  // namespace

bool Launch::may_access_global(Block& b, Warp& w, const Record& r, u32 mask, const u64* at, u32 size, Access access) {
  u64 sectors[2 * kLanes];
  u32 count = 0;
  int range = -1;
  for_lanes(mask, [&](u32 l) {
    if (at[l] & (size - 1))
      report(b, w, &r, l, "address %llx is not a multiple of %u", (unsigned long long)at[l], size);
    range = find_range(at[l], size, range);
    if (range < 0) {
      report(b, w, &r, l, "%s %u bytes at %llx, outside of every tensor", kVerbs[access], size,
             (unsigned long long)at[l]);
      failed = true;
      return;
    }
    const Range& here = request.ranges[range];
    const u64 sector = at[l] >> 5;
    if (access != kWrite && here.read_sectors) here.read_sectors[sector - (here.begin >> 5)] = 1;
    if (access != kRead && here.written_sectors) here.written_sectors[sector - (here.begin >> 5)] = 1;
    if (!count || sectors[count - 1] != sector) sectors[count++] = sector;
  });
  if (failed) return false;
  std::sort(sectors, sectors + count);
  count = static_cast<u32>(std::unique(sectors, sectors + count) - sectors);
  if (mask) {
    Counters& c = counters(r);
    c.requests++;
    c.sectors += count;
    c.ideal += (static_cast<u64>(__builtin_popcount(mask)) * size + 31) / 32;
  }
  return true;
}

// The lanes that read what another thread stored (not by an atomic) in this launch with no synchronization between:
// their values depend on the order of execution.
u32 Launch::unordered_reads(const Block& b, const Warp& w, u32 mask, const u64* at, u32 size) const {
  u32 found = 0;
  int range = -1;
  const u32 grain = program.global_grain;
  for_lanes(mask, [&](u32 l) {
    range = find_range(at[l], size, range);
    if (range < 0 || written[range].empty()) return;
    const u64 offset = at[l] - request.ranges[range].begin;
    for (u64 k = offset / grain; k <= (offset + size - 1) / grain; k++) {
      const GlobalWord& word = written[range][k];
      if (word.block && !word.atomic && !ordered(b, w, l, word)) found |= 1u << l;
    }
  });
  return found;
}

// Records a lane's store or atomic before it happens. Reports it if another lane of the same instruction, or another
// thread with no synchronization between, stored a different value at the same place; two atomics are no error. value:
// null for an atomic, which counts as different.
void Launch::note_written(Block& b, Warp& w, const Record& r, u32 lane, u64 at, u32 size, const u8* value,
                          bool atomic) {
  const int range = find_range(at, size, -1);
  const Range& here = request.ranges[range];
  const u32 grain = program.global_grain;
  if (!here.written_sectors) return;  // the tensor is too large to record a writer for each word
  auto& words = written[range];
  if (words.empty()) words.resize((here.end - here.begin + grain - 1) / grain);
  const u64 offset = at - here.begin;
  for (u64 k = offset / grain; k <= (offset + size - 1) / grain; k++) {
    GlobalWord& word = words[k];
    const u64 first = here.begin + k * grain;
    const u32 bytes = static_cast<u32>(std::min<u64>(grain, here.end - first));
    if (word.block && !(atomic && word.atomic)) {
      const bool inside = first >= at && first + bytes <= at + size;
      const bool equal = value && inside && !std::memcmp(reinterpret_cast<void*>(first), value + (first - at), bytes);
      const bool same_instruction = word.step == steps && word.lane != lane;
      if (!equal && (same_instruction || !ordered(b, w, lane, word))) {
        report(b, w, &r, lane,
               "writes another value at byte %llu of a tensor than block %u warp %u lane %u, with no synchronization "
               "between",
               (unsigned long long)(k * grain), word.block - 1, word.warp, word.lane);
      }
    }
    word.block = b.index + 1;
    word.warp = static_cast<u16>(w.id);
    word.lanes = (word.step == steps ? word.lanes : 0) | 1u << lane;
    word.lane = static_cast<u8>(lane);
    word.atomic = atomic;
    word.clock = w.clocks[w.id];
    word.step = steps;
  }
}
