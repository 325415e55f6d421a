// cp.async: the bytes are read at once, and written to shared memory when the warp waits for the copy's group or exits.
#include <algorithm>

#include "table.h"

namespace {

// Operands: shared address (its offset is `immediate`), global address (its offset is `second`), and with flag 1 the
// number of bytes to read; the rest of `size` bytes is filled with zeros.
Next copy(Launch& launch, Block& b, Warp& w, const Record& r, u32 mask) {
  const u32* to = lanes_of<const u32>(launch, w, r, 0);
  const u64* from = lanes_of<const u64>(launch, w, r, 1);
  const u32* given = r.flag ? lanes_of<const u32>(launch, w, r, 2) : nullptr;
  check_defined(launch, b, w, r, 0, mask, "an address");
  check_defined(launch, b, w, r, 1, mask, "an address");
  if (given) check_defined(launch, b, w, r, 2, mask, "the number of bytes to copy");
  u64 at[kLanes], target[kLanes];
  u32 size[kLanes], reads = 0;
  for (u32 l = 0; l < kLanes; l++) {
    at[l] = from[l] + static_cast<u64>(r.second);
    target[l] = static_cast<u32>(to[l] + static_cast<u32>(r.immediate));
    size[l] = given ? std::min<u32>(given[l], r.size) : r.size;
    if (size[l]) reads |= 1u << l;
  }
  // A read of fewer than `size` bytes, even of none, needs the alignment of `size`; only its bytes must be in a tensor.
  for_lanes(given ? mask : 0, [&](u32 l) {
    if (given[l] > r.size) launch.report(b, w, &r, l, "reads %u bytes for a copy of %u", given[l], r.size);
    if (given[l] < r.size && at[l] % r.size)
      launch.report(b, w, &r, l, "address %llx is not a multiple of %u", (unsigned long long)at[l], r.size);
  });
  for (u32 rest = mask & reads; rest;) {
    const u32 bytes = size[__builtin_ctz(rest)];
    u32 equal = 0;
    for_lanes(rest, [&](u32 l) { equal |= u32(size[l] == bytes) << l; });
    if (bytes == r.size) {
      if (!launch.may_access_global(b, w, r, equal, at, bytes, Launch::kRead)) return Next::leave;
    } else {
      for (u32 k = 0; k < bytes; k++) {
        u64 byte[kLanes];
        for (u32 l = 0; l < kLanes; l++) byte[l] = at[l] + k;
        if (!launch.may_access_global(b, w, r, equal, byte, 1, Launch::kRead)) return Next::leave;
      }
    }
    const u32 unordered = launch.unordered_reads(b, w, equal, at, bytes);
    for_lanes(unordered, [&](u32 l) {
      launch.report(b, w, &r, l, "reads global memory that another thread wrote, with no synchronization between");
    });
    rest &= ~equal;
  }
  launch.count_passes(r, mask, target, r.size);
  for (u32 rest = mask; rest; rest &= rest - 1) {
    const u32 l = __builtin_ctz(rest);
    if (!launch.may_write_shared(b, w, r, l, target[l], r.size, nullptr, true)) return Next::leave;
    Copy copy{static_cast<u32>(target[l]), r.size, static_cast<u8>(l), {}};
    if (size[l]) std::memcpy(copy.bytes, reinterpret_cast<const void*>(at[l]), size[l]);
    w.uncommitted.push_back(copy);
  }
  return Next::following;
}

Next commit(Launch& launch, Block& b, Warp& w, const Record& r, u32 mask) {
  if (mask != w.live)
    launch.report(b, w, &r, 0, "cp.async.commit_group by lanes %08x of %08x: not modelled", mask, w.live);
  w.groups.push_back(std::move(w.uncommitted));
  w.uncommitted.clear();
  return Next::following;
}

Next wait(Launch& launch, Block& b, Warp& w, const Record& r, u32 mask) {
  if (mask != w.live)
    launch.report(b, w, &r, 0, "cp.async.wait_group by lanes %08x of %08x: not modelled", mask, w.live);
  launch.land(b, w, static_cast<size_t>(r.immediate));
  return Next::following;
}

}  // namespace

void add_copies(Table& t) {
  t.add("cp.async", copy);
  t.add("cp.async.commit_group", commit);
  t.add("cp.async.wait_group", wait);
}
