// ld, st and atom.
#include "table.h"

namespace {

void addresses(const Launch& launch, Warp& w, const Record& r, u32 k, bool shared, s64 offset, u64* at) {
  if (r.address == 4) {
    const u32* base = lanes_of<const u32>(launch, w, r, k);
    for (u32 l = 0; l < kLanes; l++)
      at[l] = shared ? static_cast<u32>(base[l] + static_cast<u32>(offset)) : base[l] + offset;
  } else {
    const u64* base = lanes_of<const u64>(launch, w, r, k);
    for (u32 l = 0; l < kLanes; l++) at[l] = base[l] + static_cast<u64>(offset);
    if (shared) for (u32 l = 0; l < kLanes; l++) at[l] = static_cast<u32>(at[l]);
  }
}

u64 extended(const u8* from, u32 size, bool is_signed) {
  u64 value = 0;
  std::memcpy(&value, from, size);
  if (is_signed && size < 8) {
    const u32 shift = 64 - 8 * size;
    value = static_cast<u64>(static_cast<s64>(value << shift) >> shift);
  }
  return value;
}

void load_lane(Launch& launch, Warp& w, const Record& r, u32 lane, const u8* from) {
  for (u32 k = 0; k < r.elements; k++) {
    const u64 value = extended(from + k * r.size, r.size, r.flag);
    std::memcpy(lanes_of<u8>(launch, w, r, k) + lane * r.width, &value, r.width);
  }
}

Next load_parameter(Launch& launch, Block&, Warp& w, const Record& r, u32 mask) {
  for_lanes(mask, [&](u32 l) { load_lane(launch, w, r, l, launch.request.parameters + r.immediate); });
  return Next::following;
}

Next load_global(Launch& launch, Block& b, Warp& w, const Record& r, u32 mask) {
  u64 at[kLanes];
  addresses(launch, w, r, r.count - 1u, false, r.immediate, at);
  check_defined(launch, b, w, r, r.count - 1u, mask, "an address");
  if (!launch.may_access_global(b, w, r, mask, at, r.size * r.elements, Launch::kRead)) return Next::leave;
  for_lanes(mask, [&](u32 l) { load_lane(launch, w, r, l, reinterpret_cast<const u8*>(at[l])); });
  const u32 unordered = launch.unordered_reads(b, w, mask, at, r.size * r.elements);
  if (unordered)
    launch.undefined_from(r, "read of global memory that another thread wrote, with no synchronization between");
  for (u32 k = 0; k < r.elements; k++) set_undefined(undefined_lanes(launch, w, r, k), both(unordered), mask);
  return Next::following;
}

Next load_shared(Launch& launch, Block& b, Warp& w, const Record& r, u32 mask) {
  u64 at[kLanes];
  addresses(launch, w, r, r.count - 1u, true, r.immediate, at);
  check_defined(launch, b, w, r, r.count - 1u, mask, "an address");
  const u32 size = r.size * r.elements;
  launch.count_passes(r, mask, at, size);
  u32 undefined = 0;
  for (u32 rest = mask; rest; rest &= rest - 1) {
    const u32 l = __builtin_ctz(rest);
    bool defined;
    if (!launch.may_read_shared(b, w, r, l, at[l], size, defined)) return Next::leave;
    if (!defined) undefined |= 1u << l;
  }
  for_lanes(mask, [&](u32 l) { load_lane(launch, w, r, l, &b.shared[at[l]]); });
  if (undefined) launch.undefined_from(r, "read of shared bytes that were never written");
  const u32 half = r.size / 2;
  for (u32 k = 0; k < r.elements; k++) {
    u64 halves = 0;
    for_lanes(undefined, [&](u32 l) {
      const u8* defined = &b.shared_defined[at[l] + k * r.size];
      for (u32 i = 0; i < r.size; i++) {
        if (!defined[i]) halves |= half == 0 ? both(1u << l) : u64(1) << (i < half ? l : 32 + l);
      }
    });
    set_undefined(undefined_lanes(launch, w, r, k), r.size == r.width ? halves : either(halves), mask);
  }
  return Next::following;
}

// The order in which the lanes of a warp store or update: ascending without a seed, random with one.
struct LaneOrder {
  u32 first, step;
  explicit LaneOrder(Launch& launch) : first(0), step(1) {
    if (!launch.seeded()) return;
    const u64 random = launch.random.next();
    first = random & 31;
    step = static_cast<u32>(random >> 5 & 15) * 2 + 1;
  }
  u32 operator[](u32 k) const { return (first + k * step) & 31; }
};

void gather_value(Launch& launch, Warp& w, const Record& r, u32 lane, u32 first, u8* value) {
  for (u32 k = 0; k < r.elements; k++) {
    std::memcpy(value + k * r.size, lanes_of<u8>(launch, w, r, first + k) + lane * r.width, r.size);
  }
}

Next store_global(Launch& launch, Block& b, Warp& w, const Record& r, u32 mask) {
  u64 at[kLanes];
  addresses(launch, w, r, 0, false, r.immediate, at);
  check_defined(launch, b, w, r, 0, mask, "an address");
  const u32 size = r.size * r.elements;
  if (!launch.may_access_global(b, w, r, mask, at, size, Launch::kWrite)) return Next::leave;
  u32 undefined = 0;
  for (u32 k = 0; k < r.elements; k++) {
    const u64 halves = undefined_lanes(launch, w, r, 1 + k);
    undefined |= static_cast<u32>(r.size * 2 <= r.width ? halves : either(halves));
  }
  undefined &= mask;
  launch.undefined_use(b, w, r, undefined, "a value that is stored");
  const LaneOrder order(launch);
  for (u32 k = 0; k < kLanes; k++) {
    const u32 l = order[k];
    if (!(mask >> l & 1)) continue;
    u8 value[16];
    gather_value(launch, w, r, l, 1, value);
    launch.note_written(b, w, r, l, at[l], size, value, false);
    std::memcpy(reinterpret_cast<void*>(at[l]), value, size);
  }
  return Next::following;
}

Next store_shared(Launch& launch, Block& b, Warp& w, const Record& r, u32 mask) {
  u64 at[kLanes];
  addresses(launch, w, r, 0, true, r.immediate, at);
  check_defined(launch, b, w, r, 0, mask, "an address");
  const u32 size = r.size * r.elements;
  launch.count_passes(r, mask, at, size);
  const LaneOrder order(launch);
  for (u32 k = 0; k < kLanes; k++) {
    const u32 l = order[k];
    if (!(mask >> l & 1)) continue;
    u8 value[16];
    gather_value(launch, w, r, l, 1, value);
    if (!launch.may_write_shared(b, w, r, l, at[l], size, value, false)) return Next::leave;
    std::memcpy(&b.shared[at[l]], value, size);
    for (u32 e = 0; e < r.elements; e++) {
      const u64 halves = undefined_lanes(launch, w, r, 1 + e) >> l & (u64(1) << 32 | 1);
      u8* defined = &b.shared_defined[at[l] + e * r.size];
      if (r.size * 2 <= r.width || r.size == 1) {  // all stored bytes are in the register's lower half
        std::memset(defined, !(halves & 1), r.size);
      } else {
        std::memset(defined, !(halves & 1), r.size / 2);
        std::memset(defined + r.size / 2, !(halves >> 32), r.size - r.size / 2);
      }
    }
  }
  return Next::following;
}

// Atomics. flag, used only for global memory: 1 for .release, .acquire and .acq_rel, all executed as .acq_rel.
template <class T, class F, bool shared>
Next update(Launch& launch, Block& b, Warp& w, const Record& r, u32 mask) {
  u64 at[kLanes];
  addresses(launch, w, r, 1, shared, r.immediate, at);
  check_defined(launch, b, w, r, 1, mask, "an address");
  if (shared) {
    launch.count_passes(r, mask, at, sizeof(T));
  } else if (!launch.may_access_global(b, w, r, mask, at, sizeof(T), Launch::kAtomic)) {
    return Next::leave;
  }
  T* to = lanes_of<T>(launch, w, r, 0);
  T values[kLanes];
  std::memcpy(values, lanes_of<T>(launch, w, r, 2), sizeof values);
  const LaneOrder order(launch);
  for (u32 k = 0; k < kLanes; k++) {
    const u32 l = order[k];
    if (!(mask >> l & 1)) continue;
    T* place = reinterpret_cast<T*>(at[l]);
    if (shared) {
      bool defined;
      for (u32 i = 0; i < sizeof(T) && at[l] + sizeof(T) <= launch.request.shared_bytes; i++) {
        SharedWord& each = b.words[(at[l] + i) / launch.program.shared_grain];
        if (each.atomic) each.write_clock = 0;  // an atomic does not race with an earlier atomic
      }
      if (!launch.may_read_shared(b, w, r, l, at[l], sizeof(T), defined)) return Next::leave;
      if (!defined) launch.report(b, w, &r, l, "updates shared bytes that were never written");
      place = reinterpret_cast<T*>(&b.shared[at[l]]);
      for (u32 i = 0; i < sizeof(T); i++) {
        SharedWord& each = b.words[(at[l] + i) / launch.program.shared_grain];
        each.write_clock = w.clocks[w.id];
        each.writer = static_cast<u8>(w.id);
        each.lane = static_cast<u8>(l);
        each.atomic = 1;
        each.writing_lanes = 1u << l;
        each.same = 1u << w.id;
      }
    } else {
      launch.note_written(b, w, r, l, at[l], sizeof(T), nullptr, true);
      if (r.flag) {
        auto& released = launch.released[at[l]];
        for (const auto& [block, known] : released) b.known[block].merge(known);
        for (const auto& [block, known] : b.known) released[block].merge(known);
        Known own{w.clocks, std::vector<u32>(w.clocks.size(), kAll)};
        // Of the writes of this warp at its present clock, only those of lane l surely precede the atomic.
        own.lanes[w.id] = 1u << l;
        released[b.index].merge(own);
      }
    }
    const T old = *place;
    *place = F{}(old, values[l]);
    to[l] = old;
  }
  set_undefined(undefined_lanes(launch, w, r, 0), 0, mask);
  return Next::following;
}

template <class T, class F>
void atomic(Table& t, const std::string& name, F) {
  t.add("atom.global." + name, update<T, F, false>);
  t.add("atom.shared." + name, update<T, F, true>);
}

}  // namespace

void add_memory(Table& t) {
  t.add("ld.param", load_parameter);
  t.add("ld.global", load_global);
  t.add("ld.shared", load_shared);
  t.add("st.global", store_global);
  t.add("st.shared", store_shared);
  for (const char* kind : {"u32", "s32"}) {
    atomic<u32>(t, std::string("add.") + kind, [](u32 x, u32 y) { return x + y; });
  }
  atomic<u64>(t, "add.u64", [](u64 x, u64 y) { return x + y; });
  atomic<u32>(t, "max.u32", [](u32 x, u32 y) { return x > y ? x : y; });
  atomic<s32>(t, "max.s32", [](s32 x, s32 y) { return x > y ? x : y; });
  atomic<u32>(t, "min.u32", [](u32 x, u32 y) { return x < y ? x : y; });
  atomic<s32>(t, "min.s32", [](s32 x, s32 y) { return x < y ? x : y; });
  atomic<u32>(t, "or.b32", [](u32 x, u32 y) { return x | y; });
  atomic<u32>(t, "and.b32", [](u32 x, u32 y) { return x & y; });
  atomic<u32>(t, "exch.b32", [](u32, u32 y) { return y; });
}
