// Shared memory: bounds, alignment, unwritten bytes, happens-before between warps and lanes, bank conflicts.
//
// Each warp has a vector clock, with an entry for each warp and each mbarrier of its block; the warp's own entry is
// called its clock. A barrier gives its warps the maximum of their vectors. For each word (of shared_grain bytes) the
// last writer and the clock of each warp's last read are stored. Accesses of two lanes of a warp are ordered if the
// warp's clock rose between them. A bar.warp.sync of all live lanes, a barrier, an arrival at an mbarrier and a
// fence.proxy.async raise the clock; a shuffle or a vote does not.
#include <algorithm>

#include "state.h"

// Whether the bytes are in one variable; if not, reports their place relative to the nearest one.
bool Launch::within_variable(const Block& b, const Warp& w, const Record& r, u32 lane, u64 at, u32 size,
                             const char* what) {
  for (u32 k = 0; k < program.variable_count; k++) {
    const Variable& each = request.variables[k];
    if (at >= each.begin && at + size <= each.end) return true;
  }
  const s64 place = static_cast<s32>(at);  // below the first variable an address is negative
  const Variable* nearest = request.variables;
  s64 least = INT64_MAX;
  for (u32 k = 0; k < program.variable_count; k++) {
    const Variable& each = request.variables[k];
    const s64 distance = place < each.begin ? each.begin - place : std::max<s64>(place - each.end, 0);
    if (distance < least) nearest = &each, least = distance;
  }
  report(b, w, &r, lane, "%s %u bytes of shared memory at byte %lld of %s, which has %u", what, size,
         static_cast<long long>(place - nearest->begin), nearest->name, nearest->end - nearest->begin);
  failed = true;
  return false;
}

// Checks a read. Unwritten bytes are no error: they set `defined` to false. lane: kLanes for reads that a warp makes as
// a whole (ldmatrix, wgmma); races between lanes of the warp are then not checked.
bool Launch::may_read_shared(Block& b, Warp& w, const Record& r, u32 lane, u64 at, u32 size, bool& defined) {
  defined = true;
  if (!within_variable(b, w, r, lane, at, size, "reads")) return false;
  if (at & (size - 1))
    report(b, w, &r, lane, "shared address %llu is not a multiple of %u", (unsigned long long)at, size);
  for (u32 k = 0; k < size; k++) defined &= b.shared_defined[at + k] != 0;
  const u32 grain = program.shared_grain, warps = static_cast<u32>(b.warps.size());
  for (u64 k = at / grain; k <= (at + size - 1) / grain; k++) {
    SharedWord& word = b.words[k];
    b.read_clocks[k * warps + w.id] = w.clocks[w.id];
    if (lane < kLanes) {
      if (word.reader != w.id || word.reader_clock != w.clocks[w.id]) word.reading_lanes = 0;
      word.reader = static_cast<u8>(w.id), word.reader_clock = w.clocks[w.id], word.reading_lanes |= 1u << lane;
    }
    if (word.in_flight) {
      report(b, w, &r, lane, "reads shared byte %llu, which a cp.async may still be writing",
             (unsigned long long)(k * grain));
      continue;
    }
    if (word.writer >= warps) {
      if (word.write_clock > w.clocks[word.writer]) {
        report(b, w, &r, lane, "reads shared byte %llu that a bulk copy wrote, without a wait at its mbarrier",
               (unsigned long long)(k * grain));
      }
    } else if (word.writer != w.id) {
      if (word.write_clock > w.clocks[word.writer] && !(word.same >> w.id & 1)) {
        report(b, w, &r, lane, "reads shared byte %llu that warp %u lane %u wrote, with no barrier between",
               (unsigned long long)(k * grain), word.writer, word.lane);
      }
    } else if (word.write_clock == w.clocks[w.id] && lane < kLanes && !(word.writing_lanes >> lane & 1)) {
      report(b, w, &r, lane, "reads shared byte %llu that lane %u of its warp wrote, with no bar.warp.sync between",
             (unsigned long long)(k * grain), word.lane);
    }
  }
  return true;
}

// Checks one lane's write of `value`; if `copy`, the start of a copy. Several warps, or lanes of one instruction, may
// write equal values. A null `value` counts as different from every value.
bool Launch::may_write_shared(Block& b, Warp& w, const Record& r, u32 lane, u64 at, u32 size, const u8* value,
                              bool copy) {
  if (!within_variable(b, w, r, lane, at, size, "writes")) return false;
  if (at & (size - 1))
    report(b, w, &r, lane, "shared address %llu is not a multiple of %u", (unsigned long long)at, size);
  const u32 grain = program.shared_grain, warps = static_cast<u32>(b.warps.size());
  for (u64 k = at / grain; k <= (at + size - 1) / grain; k++) {
    SharedWord& word = b.words[k];
    const bool equal = value && !std::memcmp(&b.shared[k * grain], value + (k * grain - at), grain);
    if (word.in_flight) {
      report(b, w, &r, lane, "writes shared byte %llu, which a cp.async may still be writing",
             (unsigned long long)(k * grain));
    }
    if (word.reading) {
      report(b, w, &r, lane, "writes shared byte %llu, which a wgmma may still be reading",
             (unsigned long long)(k * grain));
    }
    if (word.mbarrier)
      report(b, w, &r, lane, "writes shared byte %llu of an mbarrier in use", (unsigned long long)(k * grain));
    const bool other_warp = word.writer != w.id && word.write_clock > w.clocks[word.writer];
    const bool same_instruction = word.writer == w.id && word.step == steps && word.lane != lane;
    if (other_warp && equal) {
      word.same |= 1u << w.id;
      continue;
    }
    if (other_warp && word.writer >= warps) {
      report(b, w, &r, lane, "writes shared byte %llu that a bulk copy wrote, without a wait at its mbarrier",
             (unsigned long long)(k * grain));
    } else if (other_warp) {
      report(b, w, &r, lane,
             "writes shared byte %llu that warp %u lane %u wrote with another value, with no barrier between",
             (unsigned long long)(k * grain), word.writer, word.lane);
    }
    if (same_instruction && !equal) {
      report(b, w, &r, lane, "writes another value to shared byte %llu than lane %u of the same instruction",
             (unsigned long long)(k * grain), word.lane);
    }
    const bool read_here = word.reader == w.id && word.reader_clock == w.clocks[w.id];
    if (read_here && !equal && word.reading_lanes & ~(1u << lane)) {
      report(b, w, &r, lane,
             "writes shared byte %llu that another lane of its warp reads, with no bar.warp.sync between",
             (unsigned long long)(k * grain));
    }
    for (u32 v = 0; v < warps; v++) {
      if (v != w.id && b.read_clocks[k * warps + v] > w.clocks[v]) {
        report(b, w, &r, lane, "writes shared byte %llu that warp %u reads, with no barrier between",
               (unsigned long long)(k * grain), v);
        break;
      }
    }
    word.write_clock = w.clocks[w.id];
    word.writer = static_cast<u8>(w.id);
    word.lane = static_cast<u8>(lane);
    word.atomic = 0;
    word.same = 1u << w.id;
    word.writing_lanes = (same_instruction ? word.writing_lanes : 0) | 1u << lane;
    word.step = steps;
    if (copy) word.in_flight++;
  }
  return true;
}

// Completes groups of cp.async, the oldest first, until at most `left` groups are in flight.
void Launch::land(Block& b, Warp& w, size_t left) {
  for (; w.groups.size() > left; w.groups.pop_front()) {
    for (const Copy& copy : w.groups.front()) land_copy(b, copy, w.id, w.clocks[w.id]);
  }
}

void Launch::land_copy(Block& b, const Copy& copy, u32 writer, u32 clock) {
  const u32 grain = program.shared_grain;
  std::memcpy(&b.shared[copy.to], copy.bytes, copy.size);
  std::memset(&b.shared_defined[copy.to], 1, copy.size);
  for (u32 k = copy.to / grain; k <= (copy.to + copy.size - 1) / grain; k++) {
    SharedWord& word = b.words[k];
    if (word.in_flight) word.in_flight--;
    word.write_clock = clock;
    word.writer = static_cast<u8>(writer);
    word.lane = copy.lane;
    word.atomic = 0;
    word.same = writer < b.warps.size() ? 1u << writer : 0;
  }
}

// Whether wgmma and bulk copies see the word's last write: a bulk copy made it, or a fence.proxy.async followed it.
static bool fenced(const Block& b, const Warp& w, const SharedWord& word) {
  return word.writer >= b.warps.size() || word.write_clock <= w.fenced[word.writer];
}

// Checks the start of a read by a wgmma; the read ends in retire().
bool Launch::may_read_async(Block& b, Warp& w, const Record& r, u64 at, u32 size, bool& defined) {
  if (!may_read_shared(b, w, r, kLanes, at, size, defined)) return false;
  const u32 grain = program.shared_grain;
  for (u64 k = at / grain; k <= (at + size - 1) / grain; k++) {
    SharedWord& word = b.words[k];
    word.reading++;
    if (!fenced(b, w, word)) {
      report(b, w, &r, kLanes, "reads shared byte %llu that warp %u wrote, with no fence.proxy.async between",
             (unsigned long long)(k * grain), word.writer);
    }
  }
  return true;
}

// Checks the start of a bulk copy's write.
bool Launch::may_write_async(Block& b, Warp& w, const Record& r, u32 lane, u64 at, u32 size) {
  const u32 grain = program.shared_grain;
  for (u64 k = at / grain; at + size <= request.shared_bytes && k <= (at + size - 1) / grain; k++) {
    if (!fenced(b, w, b.words[k])) {
      report(b, w, &r, lane, "writes shared byte %llu that warp %u wrote, with no fence.proxy.async between",
             (unsigned long long)(k * grain), b.words[k].writer);
    }
  }
  return may_write_shared(b, w, r, lane, at, size, nullptr, true);
}

// Counts the passes over the 32 banks. A pass reaches at most one 4-byte word of each bank, for any number of lanes.
// Passes serve the whole warp if a lane accesses up to 4 bytes, half of the warp for 8 bytes, a quarter for 16.
void Launch::count_passes(const Record& record, u32 mask, const u64* at, u32 size) {
  if (!mask) return;
  Counters& c = counters(record);
  const u32 together = size <= 4 ? 32 : size == 8 ? 16 : 8;
  u32 passes = 0, least = 0;
  for (u32 start = 0; start < kLanes; start += together) {
    u64 words[128];
    u32 count = 0, depth[32] = {}, longest = 0;
    for (u32 l = start; l < start + together; l++) {
      if (!(mask >> l & 1)) continue;
      for (u32 k = 0; k < std::max(size / 4, 1u); k++) words[count++] = at[l] / 4 + k;
    }
    std::sort(words, words + count);
    count = static_cast<u32>(std::unique(words, words + count) - words);
    for (u32 k = 0; k < count; k++) longest = std::max(longest, ++depth[words[k] & 31]);
    passes += longest;
    least += (count + 31) / 32;
  }
  c.passes += passes;
  c.least += least;
}
