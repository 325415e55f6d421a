// cp.async.bulk.tensor: a lane copies a box of a tensor into shared memory. The bytes are read at once and written when
// a wait at the mbarrier succeeds. fence.proxy.async makes earlier shared writes visible to such copies and to wgmma.
#include <algorithm>

#include "table.h"

namespace {

// The layout of tests/ptx/tensor_map.py, not that of a real CUtensorMap. Dimension 0 is contiguous.
struct TensorMap {
  u64 magic, base;
  u32 rank, element, span, unused;  // element: bytes of an element; span: bytes of a row of the box
  u64 sizes[5];    // elements
  u64 strides[4];  // bytes, of dimensions 1 and up
  u32 box[5];      // elements
};
constexpr u64 kMagic = 0x50414d524f534e54ull;

bool load_map(Launch& launch, Block& b, Warp& w, const Record& r, u32 lane, u64 at, TensorMap& map) {
  const u64 offset = at - reinterpret_cast<u64>(launch.request.parameters);
  if (offset % 64 == 0 && offset + sizeof map <= launch.program.parameter_bytes) {
    std::memcpy(&map, reinterpret_cast<const void*>(at), sizeof map);
    if (map.magic == kMagic && map.rank == r.elements) return true;
  }
  launch.report(b, w, &r, lane,
                "expected a tensor map of %u dimensions, at a multiple of 64 bytes in the kernel's parameters",
                r.elements);
  launch.failed = true;
  return false;
}

// Copies one row of the box in swizzled pieces of 16 bytes. The row has `skip` zeros, then `inside` elements from
// `source` on, then zeros.
bool copy_row(Launch& launch, Block& b, Warp& w, const Record& r, u32 lane, const TensorMap& map, Mbarrier& m,
              u64 source, s64 skip, s64 inside, u32 to) {
  u8 row[128] = {};
  Counters& c = launch.counters(r);
  if (inside > 0) {
    const u64 at[kLanes] = {source};
    const u32 bytes = static_cast<u32>(inside) * map.element;
    const int range = launch.find_range(source, bytes, -1);
    if (range < 0) {
      launch.report(b, w, &r, lane, "reads %u bytes at %llx, outside of every tensor", bytes,
                    (unsigned long long)source);
      launch.failed = true;
      return false;
    }
    if (launch.unordered_reads(b, w, 1, at, bytes))
      launch.report(b, w, &r, lane, "reads global memory that another thread wrote, with no synchronization between");
    const Range& here = launch.request.ranges[range];
    for (u64 sector = source >> 5; sector <= (source + bytes - 1) >> 5; sector++) {
      if (here.read_sectors) here.read_sectors[sector - (here.begin >> 5)] = 1;
      c.sectors++;
    }
    c.ideal += (bytes + 31) / 32;
    std::memcpy(row + skip * map.element, reinterpret_cast<const void*>(source), bytes);
  }
  for (u32 k = 0; k < map.span; k += 16) {
    const u32 at = (to + k) ^ ((to + k) >> 7 & (map.span / 16 - 1)) << 4;
    if (!launch.may_write_async(b, w, r, lane, at, 16)) return false;
    Copy copy{at, 16, static_cast<u8>(lane), {}};
    std::memcpy(copy.bytes, row + k, 16);
    m.copies.push_back(copy);
  }
  m.copied += map.span;
  return true;
}

// Operands: shared address (its offset is `immediate`), tensor map, mbarrier, coordinates. elements: number of
// dimensions.
Next copy(Launch& launch, Block& b, Warp& w, const Record& r, u32 mask) {
  for (u32 k = 0; k < r.count; k++) check_defined(launch, b, w, r, k, mask, "an address or coordinate");
  for (u32 rest = mask; rest; rest &= rest - 1) {
    const u32 lane = __builtin_ctz(rest);
    TensorMap map;
    if (!load_map(launch, b, w, r, lane, lanes_of<const u64>(launch, w, r, 1)[lane], map)) return Next::leave;
    Mbarrier* m = launch.find_mbarrier(b, w, r, lane, lanes_of<const u32>(launch, w, r, 2)[lane]);
    if (!m) return Next::leave;
    const u32 to = lanes_of<const u32>(launch, w, r, 0)[lane] + static_cast<u32>(r.immediate);
    if (to % 128) launch.report(b, w, &r, lane, "shared address %u is not a multiple of 128", to);
    s64 corner[5] = {};
    u32 rows = 1;
    for (u32 k = 0; k < map.rank; k++) corner[k] = lanes_of<const s32>(launch, w, r, 3 + k)[lane];
    for (u32 k = 1; k < map.rank; k++) rows *= map.box[k];
    const s64 skip = std::clamp<s64>(-corner[0], 0, map.box[0]);
    const s64 end = std::min<s64>(map.box[0], static_cast<s64>(map.sizes[0]) - corner[0]);
    launch.counters(r).requests++;
    for (u32 row = 0; row < rows; row++) {
      u64 source = map.base + static_cast<u64>(corner[0] + skip) * map.element;
      bool inside = true;
      for (u32 k = 1, left = row; k < map.rank; left /= map.box[k++]) {
        const s64 place = corner[k] + left % map.box[k];
        inside &= place >= 0 && place < static_cast<s64>(map.sizes[k]);
        source += static_cast<u64>(place) * map.strides[k - 1];
      }
      if (!copy_row(launch, b, w, r, lane, map, *m, source, skip, inside ? end - skip : 0, to + row * map.span))
        return Next::leave;
    }
  }
  return Next::following;
}

Next proxy_fence(Launch& launch, Block& b, Warp& w, const Record& r, u32 mask) {
  if (mask != w.live) launch.report(b, w, &r, 0, "fence.proxy.async by lanes %08x of %08x: not modelled", mask, w.live);
  std::copy_n(w.clocks.begin(), w.fenced.size(), w.fenced.begin());
  w.clocks[w.id]++;
  return Next::following;
}

Next parameter_address(Launch& launch, Block&, Warp& w, const Record& r, u32 mask) {
  u64* to = lanes_of<u64>(launch, w, r, 0);
  const u64* from = lanes_of<const u64>(launch, w, r, 1);
  for_lanes(mask, [&](u32 l) { to[l] = reinterpret_cast<u64>(launch.request.parameters) + from[l]; });
  return Next::following;
}

}  // namespace

void add_bulk(Table& t) {
  t.add("cp.async.bulk.tensor", copy);
  t.add("fence.proxy.async", proxy_fence);
  t.add("cvta.param", parameter_address);
}
