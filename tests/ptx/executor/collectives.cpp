// Collectives of the lanes of a warp: shfl, vote, redux, match, elect, bar.warp.sync; and activemask.
#include "table.h"

namespace {

// Operand k is each lane's mask of the lanes that take part. A lane waits until all lanes of its mask have arrived.
#define GATHER(k)                                                  \
  Next next;                                                         \
  u32 masks[kLanes];                                                 \
  check_defined(launch, b, w, r, k, w.active, "the mask of a collective"); \
  std::memcpy(masks, lanes_of<const u32>(launch, w, r, k), sizeof masks); \
  if (!gather(launch, b, w, r, masks, true, next)) return next;      \
  mask &= w.active;

Next bar_warp(Launch& launch, Block& b, Warp& w, const Record& r, u32 mask) {
  GATHER(0)
  if ((masks[__builtin_ctz(w.active)] & w.live) == w.live) w.clocks[w.id]++;
  for_lanes(mask, [&](u32 l) { w.met_at[l] = launch.steps, w.met[l] = masks[l]; });
  return next;
}

enum How { kUp, kDown, kButterfly, kIndex };

// Operands: destination, predicate (written only with flag 1), source, lane or offset, clamp and segment mask, mask of
// lanes that take part.
template <How how>
Next shuffle(Launch& launch, Block& b, Warp& w, const Record& r, u32 mask) {
  GATHER(5)
  u32 from[kLanes], result[kLanes];
  std::memcpy(from, lanes_of<const u32>(launch, w, r, 2), sizeof from);
  const u32* lane = lanes_of<const u32>(launch, w, r, 3);
  const u32* clamp = lanes_of<const u32>(launch, w, r, 4);
  const u64 undefined = undefined_lanes(launch, w, r, 2);
  const u64 undefined_choice = either(undefined_lanes(launch, w, r, 3) | undefined_lanes(launch, w, r, 4));
  u32 inside = 0, absent = 0;
  u64 moved = undefined_choice;
  for (u32 l = 0; l < kLanes; l++) {
    const u32 by = lane[l] & 31, segment = clamp[l] >> 8 & 31, bound = clamp[l] & 31;
    const u32 limit = (l & segment) | (bound & ~segment), first = l & segment;
    s32 source;
    bool in;
    if (how == kUp) {
      source = static_cast<s32>(l) - static_cast<s32>(by), in = source >= static_cast<s32>(limit);
    } else if (how == kIndex) {
      source = static_cast<s32>(first | (by & ~segment)), in = source <= static_cast<s32>(limit);
    } else {
      source = static_cast<s32>(how == kDown ? l + by : l ^ by), in = source <= static_cast<s32>(limit);
    }
    if (in) inside |= 1u << l;
    else source = static_cast<s32>(l);
    if (!((w.active & masks[l]) >> source & 1)) absent |= 1u << l;
    result[l] = from[source];
    moved |= (undefined >> source & (u64(1) << 32 | 1)) << l;
  }
  if (absent & mask)
    launch.report(b, w, &r, __builtin_ctz(absent & mask), "lanes %08x shuffle from lanes that do not take part",
                  absent & mask);
  u32* to = lanes_of<u32>(launch, w, r, 0);
  for_lanes(mask, [&](u32 l) { to[l] = result[l]; });
  set_undefined(undefined_lanes(launch, w, r, 0), moved, mask);
  if (r.flag) {
    u32& predicate_to = predicate(launch, w, r, 1);
    predicate_to = (predicate_to & ~mask) | (inside & mask);
    set_undefined(undefined_lanes(launch, w, r, 1), undefined_choice, mask);
  }
  return next;
}

// For each different m in `masks`: computes f(m & mask) once, and gives the result to every lane whose mask is m.
template <class F, class Give>
void of_groups(const u32* masks, u32 mask, F&& f, Give&& give) {
  for (u32 rest = mask; rest;) {
    const u32 members = masks[__builtin_ctz(rest)], group = members & mask;
    const auto result = f(group);
    u32 same = 0;
    for_lanes(rest, [&](u32 l) { same |= u32(masks[l] == members) << l; });
    for_lanes(same, [&](u32 l) { give(l, result); });
    rest &= ~same;
  }
}

// The lanes whose mask has a lane in which operand k is undefined.
u64 undefined_groups(Launch& launch, Warp& w, const Record& r, u32 k, const u32* masks, u32 mask) {
  const u64 undefined = either(undefined_lanes(launch, w, r, k)) & both(mask);
  u64 found = 0;
  if (undefined) for_lanes(mask, [&](u32 l) { found |= undefined & masks[l] ? both(1u << l) : 0; });
  return found;
}

template <class T, class F>
Next reduce(Launch& launch, Block& b, Warp& w, const Record& r, u32 mask) {
  GATHER(2)
  T from[kLanes];
  std::memcpy(from, lanes_of<const T>(launch, w, r, 1), sizeof from);
  const u64 undefined = undefined_groups(launch, w, r, 1, masks, mask);
  T* to = lanes_of<T>(launch, w, r, 0);
  const auto sum = [&](u32 group) {
    T result = from[__builtin_ctz(group)];
    for_lanes(group & (group - 1), [&](u32 l) { result = F{}(result, from[l]); });
    return result;
  };
  of_groups(masks, mask, sum, [&](u32 l, T result) { to[l] = result; });
  set_undefined(undefined_lanes(launch, w, r, 0), undefined, mask);
  return next;
}
template <class T, class F>
void reduction(Table& t, const std::string& name, F) {
  t.add("redux.sync." + name, reduce<T, F>);
}

Next ballot(Launch& launch, Block& b, Warp& w, const Record& r, u32 mask) {
  GATHER(2)
  const u32 yes = predicate(launch, w, r, 1);
  const u64 undefined = undefined_groups(launch, w, r, 1, masks, mask);
  u32* to = lanes_of<u32>(launch, w, r, 0);
  of_groups(masks, mask, [&](u32 group) { return yes & group; }, [&](u32 l, u32 result) { to[l] = result; });
  set_undefined(undefined_lanes(launch, w, r, 0), undefined, mask);
  return next;
}

template <bool all>
Next vote(Launch& launch, Block& b, Warp& w, const Record& r, u32 mask) {
  GATHER(2)
  const u32 yes = predicate(launch, w, r, 1);
  const u64 undefined = undefined_groups(launch, w, r, 1, masks, mask);
  u32& to = predicate(launch, w, r, 0);
  const auto decide = [&](u32 group) { return all ? (yes & group) == group : (yes & group) != 0; };
  of_groups(masks, mask, decide, [&](u32 l, bool result) { to = (to & ~(1u << l)) | u32(result) << l; });
  set_undefined(undefined_lanes(launch, w, r, 0), undefined, mask);
  return next;
}

Next match_any(Launch& launch, Block& b, Warp& w, const Record& r, u32 mask) {
  GATHER(2)
  u32 from[kLanes];
  std::memcpy(from, lanes_of<const u32>(launch, w, r, 1), sizeof from);
  const u64 undefined = undefined_groups(launch, w, r, 1, masks, mask);
  u32* to = lanes_of<u32>(launch, w, r, 0);
  for_lanes(mask, [&](u32 l) {
    u32 found = 0;
    for_lanes(mask & masks[l], [&](u32 j) { found |= u32(from[j] == from[l]) << j; });
    to[l] = found;
  });
  set_undefined(undefined_lanes(launch, w, r, 0), undefined, mask);
  return next;
}

Next active_mask(Launch& launch, Block&, Warp& w, const Record& r, u32 mask) {
  u32* to = lanes_of<u32>(launch, w, r, 0);
  for_lanes(mask, [&](u32 l) { to[l] = w.active; });
  set_undefined(undefined_lanes(launch, w, r, 0), 0, mask);
  return Next::following;
}

// Operands: the leader's lane, a predicate that is true only for the leader, mask.
Next elect(Launch& launch, Block& b, Warp& w, const Record& r, u32 mask) {
  GATHER(2)
  u32* to = lanes_of<u32>(launch, w, r, 0);
  u32& led = predicate(launch, w, r, 1);
  const auto choose = [&](u32 group) {
    u32 rest = group;
    const u32 skipped =
        launch.seeded() ? Random{launch.request.seed ^ group}.below(static_cast<u32>(__builtin_popcount(group))) : 0;
    for (u32 k = 0; k < skipped; k++) rest &= rest - 1;
    return static_cast<u32>(__builtin_ctz(rest));
  };
  of_groups(masks, mask, choose,
            [&](u32 l, u32 leader) { to[l] = leader, led = (led & ~(1u << l)) | u32(l == leader) << l; });
  set_undefined(undefined_lanes(launch, w, r, 0), 0, mask);
  set_undefined(undefined_lanes(launch, w, r, 1), 0, mask);
  return next;
}

}  // namespace

void add_collectives(Table& t) {
  t.add("bar.warp.sync", bar_warp);
  t.add("shfl.sync.up.b32", shuffle<kUp>);
  t.add("shfl.sync.down.b32", shuffle<kDown>);
  t.add("shfl.sync.bfly.b32", shuffle<kButterfly>);
  t.add("shfl.sync.idx.b32", shuffle<kIndex>);
  for (const char* kind : {"u32", "s32"})
    reduction<u32>(t, std::string("add.") + kind, [](u32 x, u32 y) { return x + y; });
  reduction<u32>(t, "max.u32", [](u32 x, u32 y) { return x > y ? x : y; });
  reduction<s32>(t, "max.s32", [](s32 x, s32 y) { return x > y ? x : y; });
  reduction<u32>(t, "min.u32", [](u32 x, u32 y) { return x < y ? x : y; });
  reduction<s32>(t, "min.s32", [](s32 x, s32 y) { return x < y ? x : y; });
  reduction<u32>(t, "or.b32", [](u32 x, u32 y) { return x | y; });
  reduction<u32>(t, "and.b32", [](u32 x, u32 y) { return x & y; });
  reduction<u32>(t, "xor.b32", [](u32 x, u32 y) { return x ^ y; });
  t.add("vote.sync.ballot.b32", ballot);
  t.add("vote.sync.any.pred", vote<false>);
  t.add("vote.sync.all.pred", vote<true>);
  t.add("match.any.sync.b32", match_any);
  t.add("activemask.b32", active_mask);
  t.add("elect.sync", elect);
}
