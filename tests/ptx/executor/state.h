// State of a launch, of a block and of a warp.
#pragma once

#include <cstring>
#include <deque>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "asynchronous.h"

enum class Phase : u8 { ready, at_barrier, at_mbarrier, done };

struct Warp {
  u32 id = 0;
  u8* registers = nullptr;
  // By register (its offset / 64): mask of the lanes whose value has an undefined lower half (bits 0-31 of the mask) or
  // upper half (bits 32-63).
  u64* undefined = nullptr;
  u32 born = 0;              // mask of the lanes that exist; only the last warp of a block can lack lanes
  u32 live = 0;              // mask of the lanes that have not exited
  u32 active = 0;            // mask of the lanes that execute the instruction at pc
  u32 blocked = 0;           // mask of the lanes that wait for other lanes at a .sync instruction
  u32 pc = 0;
  u32 next_other = ~0u;      // lowest pc of the lanes that are not active
  u32 pcs[kLanes] = {};      // pc of each lane that is not active
  Phase phase = Phase::ready;
  u32 barrier = 0, barrier_warps = 0, barrier_pc = 0;
  s64 reduction = -1;        // offset of bar.red's destination register, or -1
  char reduction_how = 0;    // o: or, a: and, p: popc
  u32 reduction_value = 0;
  std::vector<u32> clocks;   // vector clock: an entry for each warp, then one for each mbarrier
  std::vector<u32> fenced;   // by warp: its writes up to this clock are visible to wgmma and bulk copies
  std::vector<Copy> uncommitted;
  std::deque<std::vector<Copy>> groups;
  Products products;
  u32 mbarrier = ~0u, mbarrier_pc = 0;  // address (~0: none) and pc of the last failed try_wait
  u64 mbarrier_phase = 0;
  u64 met_at[kLanes] = {};   // by lane: Launch::steps at its last bar.warp.sync
  u32 met[kLanes] = {};      // by lane: mask of that bar.warp.sync
};

// The last accesses to one word of shared memory, of shared_grain bytes (types.h).
struct SharedWord {
  u32 write_clock = 0;
  u8 writer = 0, lane = 0;   // warp and lane of the last write; writer >= number of warps: bulk copy
  u8 atomic = 0;             // 1 if the last write was an atomic
  u8 in_flight = 0;          // copies that may still be writing it
  u8 mbarrier = 0;           // 1 if it belongs to an mbarrier in use
  u32 same = 0;              // mask of the warps that wrote the present value
  u32 reading = 0;           // number of wgmma reads that may still run
  u64 step = 0;
  u32 writing_lanes = 0;     // mask of the lanes that wrote it in the last write's instruction; for an atomic one lane
  // The last read by a lane was by warp `reader` at its clock reader_clock. reading_lanes: mask of this warp's lanes
  // that have read the word at this clock.
  u32 reading_lanes = 0;
  u32 reader_clock = ~0u;
  u8 reader = 0;
};

// The writes of one block that happened before some access of another block. Of warp k these are the writes at clocks
// below clocks[k], and at clock clocks[k] those of the lanes in the mask lanes[k].
struct Known {
  std::vector<u32> clocks, lanes;

  bool includes(u32 warp, u32 clock, u32 lane) const {
    return clock < clocks[warp] || (clock == clocks[warp] && lanes[warp] >> lane & 1);
  }
  void merge(const Known& other) {
    clocks.resize(other.clocks.size()), lanes.resize(other.lanes.size());
    for (size_t k = 0; k < clocks.size(); k++) {
      if (other.clocks[k] > clocks[k]) clocks[k] = other.clocks[k], lanes[k] = 0;
      if (other.clocks[k] == clocks[k]) lanes[k] |= other.lanes[k];
    }
  }
};

struct Block {
  u32 index = 0;
  u32 id[3] = {};
  std::vector<Warp> warps;
  std::vector<u8> shared, shared_defined;
  std::vector<SharedWord> words;
  std::vector<u32> read_clocks;  // (words, warps): clock of the warp's last read of the word
  std::map<u32, Mbarrier> mbarriers;  // by address
  std::vector<Agreement> agreements;  // of each warpgroup
  std::map<u32, Known> known;    // by index of a block: its writes that atomics order before accesses here
};

// The last write of this launch to one word of global memory, of global_grain bytes (types.h).
struct GlobalWord {
  u32 block = 0;             // index of the block + 1; 0: not written
  u16 warp = 0;
  u8 lane = 0, atomic = 0;
  u32 clock = 0;
  u32 lanes = 0;             // mask of the lanes that wrote it in the last write's instruction
  u64 step = 0;
};

// After an instruction a warp goes on at the next pc or at a pc that the instruction chose, or run_warp returns.
enum class Next { following, chosen, leave };

struct Launch;
using Step = Next (*)(Launch&, Block&, Warp&, const Record&, u32 mask);

struct Random {
  u64 state;
  u64 next() {  // splitmix64
    u64 z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  u32 below(u32 n) { return n < 2 ? 0 : static_cast<u32>(next() % n); }
};

struct Launch {
  const Program& program;
  Request& request;
  Random random;
  u64 steps = 0;
  u32 clock_base = 1;        // clocks of earlier blocks are below it
  bool failed = false;
  u32 origin = 0;            // index of the last instruction that introduced an undefined value, and why
  const char* origin_why = "";
  std::vector<std::vector<GlobalWord>> written;  // by Range, then by word; no words before the Range's first write
  // By address of an atomic with .release, .acquire or .acq_rel, then by block.
  std::unordered_map<u64, std::map<u32, Known>> released;

  Launch(const Program& p, Request& r) : program(p), request(r), random{r.seed}, written(r.range_count) {}

  // Reports an error; errors of equal instruction and format share a Finding. 1000 errors end the launch. lane: kLanes
  // for a read by the whole warp.
  void report(const Block& block, const Warp& warp, const Record* record, u32 lane, const char* format, ...)
      __attribute__((format(printf, 6, 7)));
  u32 index_of(const Record& record) const { return static_cast<u32>(&record - program.records); }
  Counters& counters(const Record& record) { return request.counters[index_of(record)]; }
  u32 operand(const Record& record, u32 k) const { return program.operands[record.operands + k]; }
  bool seeded() const { return request.seed != 0; }

  // Reports that a stored value, a guard or an address is undefined in `lanes`, if there are any, and names `origin`.
  void undefined_use(const Block& block, const Warp& warp, const Record& record, u32 lanes, const char* what);
  void undefined_from(const Record& record, const char* why) { origin = index_of(record), origin_why = why; }

  // Defined in launch.cpp, release_barriers in control.cpp.
  void run();
  bool release_barriers(Block& block);
  void run_warp(Block& block, Warp& warp, u64 budget);
  void start(Block& block, u32 index);
  void end(Block& block);
  void report_deadlock(Block& block);

  // shared.cpp: the may_ functions check an access and return false if it is out of bounds.
  bool within_variable(const Block&, const Warp&, const Record&, u32 lane, u64 at, u32 size, const char* what);
  bool may_read_shared(Block&, Warp&, const Record&, u32 lane, u64 at, u32 size, bool& defined);
  bool may_write_shared(Block&, Warp&, const Record&, u32 lane, u64 at, u32 size, const u8* value, bool copy);
  void count_passes(const Record&, u32 mask, const u64* at, u32 size);
  void land(Block&, Warp&, size_t left);
  void land_copy(Block&, const Copy&, u32 writer, u32 clock);
  bool may_read_async(Block&, Warp&, const Record&, u64 at, u32 size, bool& defined);
  bool may_write_async(Block&, Warp&, const Record&, u32 lane, u64 at, u32 size);

  // wgmma.cpp, mbarrier.cpp
  void retire(Block&, Warp&, size_t left);
  void check_agreements(Block&);
  Mbarrier* find_mbarrier(Block&, Warp&, const Record&, u32 lane, u64 at);
  bool release_mbarriers(Block&);

  // global.cpp: may_access_global checks the accesses of one instruction; it returns false if one is out of bounds.
  enum Access { kRead, kWrite, kAtomic };
  bool may_access_global(Block&, Warp&, const Record&, u32 mask, const u64* at, u32 size, Access);
  u32 unordered_reads(const Block&, const Warp&, u32 mask, const u64* at, u32 size) const;
  void note_written(Block&, Warp&, const Record&, u32 lane, u64 at, u32 size, const u8* value, bool atomic);
  int find_range(u64 at, u32 size, int hint) const;
};

template <class T>
inline T* lanes_of(const Launch& launch, Warp& warp, const Record& record, u32 k) {
  return reinterpret_cast<T*>(warp.registers + launch.operand(record, k));
}
inline u32& predicate(const Launch& launch, Warp& warp, const Record& record, u32 k) {
  return *lanes_of<u32>(launch, warp, record, k);
}
inline u64& undefined_lanes(const Launch& launch, Warp& warp, const Record& record, u32 k) {
  return warp.undefined[launch.operand(record, k) / 64];
}
// Sets both halves of the lanes that have an undefined half.
inline u64 either(u64 halves) { return halves | (halves >> 32) | (halves << 32); }
inline u64 both(u32 lanes) { return lanes | static_cast<u64>(lanes) << 32; }
inline void set_undefined(u64& to, u64 value, u32 mask) {
  if ((to | value) == 0) return;
  const u64 lanes = both(mask);
  to = (to & ~lanes) | (value & lanes);
}
// Reports that operand k is undefined in some lanes of `mask`.
inline void check_defined(Launch& launch, const Block& b, Warp& w, const Record& r, u32 k, u32 mask, const char* what) {
  const u64 undefined = undefined_lanes(launch, w, r, k);
  if (undefined) launch.undefined_use(b, w, r, static_cast<u32>(either(undefined)) & mask, what);
}
template <class F>
inline void for_lanes(u32 mask, F&& f) {
  for (; mask; mask &= mask - 1) f(static_cast<u32>(__builtin_ctz(mask)));
}

// control.cpp
void select_lanes(Warp& warp);
bool gather(Launch&, Block&, Warp&, const Record&, const u32* masks, bool each, Next& next);
bool gather_all(Launch&, Block&, Warp&, const Record&, Next& next);
