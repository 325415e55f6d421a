// Branches, divergence and reconvergence of the lanes of a warp, and barriers of the block.
//
// The active lanes are the lanes at the lowest pc that an unblocked lane has. By this rule alone, lanes that reach a
// .sync instruction by different branches need not execute it together. So a .sync instruction blocks a lane until all
// lanes of the lane's mask have arrived.
#include "table.h"

void select_lanes(Warp& w) {
  const u32 ready = w.live & ~w.blocked;
  u32 lowest = ~0u, active = 0, other = ~0u;
  for_lanes(ready, [&](u32 l) { lowest = std::min(lowest, w.pcs[l]); });
  for_lanes(w.live, [&](u32 l) {
    if (w.pcs[l] == lowest) active |= 1u << l;  // also lanes that are blocked at this instruction
    else other = std::min(other, w.pcs[l]);
  });
  w.blocked &= ~active;
  w.active = active;
  w.pc = lowest;
  w.next_other = other;
}

// Whether at least one active lane can execute a .sync instruction: all lanes of the lane's mask must have arrived.
// Blocks the active lanes that cannot. masks: one for each lane if `each`, else one for all lanes. next: what the
// instruction returns if the result is false.
bool gather(Launch& launch, Block& b, Warp& w, const Record& r, const u32* masks, bool each, Next& next) {
  next = Next::following;
  u32 ready = 0, waits_for = 0;
  for (u32 rest = w.active; rest; rest &= rest - 1) {
    const u32 l = __builtin_ctz(rest), mask = masks[each ? l : 0];
    const u32 left = mask & w.born & ~w.live;  // a mask may contain lanes that the block never had
    if (left) launch.report(b, w, &r, l, "the mask %08x has lanes %08x, which have left", mask, left);
    if (!(mask >> l & 1)) {
      launch.report(b, w, &r, l, "executes it, but is not in its own mask %08x", mask);
      launch.failed = true;
      next = Next::leave;
      return false;
    }
    const u32 missing = mask & w.live & ~w.active;
    ready |= u32(!missing) << l;
    waits_for |= missing;
  }
  if (ready == w.active) return true;
  const u32 waiting = w.active & ~ready;
  for_lanes(waiting, [&](u32 l) { w.pcs[l] = w.pc; });
  w.blocked |= waiting;
  if (ready) {
    w.active = ready;
    w.next_other = std::min(w.next_other, w.pc);
    return true;
  }
  Counters& c = launch.counters(r);
  c.runs--;
  c.lanes -= static_cast<u64>(__builtin_popcount(waiting));
  if (!(w.live & ~w.blocked)) {
    launch.report(b, w, &r, __builtin_ctz(waiting), "waits for lanes %08x, which wait elsewhere", waits_for);
    launch.failed = true;
    next = Next::leave;
    return false;
  }
  select_lanes(w);
  next = Next::chosen;
  return false;
}

bool gather_all(Launch& launch, Block& b, Warp& w, const Record& r, Next& next) {
  return gather(launch, b, w, r, &w.live, false, next);
}

namespace {

Next branch(Launch& launch, Block&, Warp& w, const Record& r, u32 mask) {
  if (mask == w.active) {
    w.pc = static_cast<u32>(r.target);
    return Next::chosen;
  }
  if (!mask) return Next::following;
  launch.counters(r).requests++;
  for_lanes(w.active, [&](u32 l) { w.pcs[l] = mask >> l & 1 ? static_cast<u32>(r.target) : w.pc + 1; });
  select_lanes(w);
  return Next::chosen;
}

Next leave(Launch& launch, Block& b, Warp& w, const Record& r, u32 mask) {
  if (!mask) return Next::following;
  w.live &= ~mask;
  if (!w.live) {
    w.phase = Phase::done;
    if (!w.uncommitted.empty()) w.groups.push_back(std::move(w.uncommitted));
    launch.land(b, w, 0);
    if (!w.products.reads.empty()) w.products.groups.push_back(std::move(w.products.reads));
    launch.retire(b, w, 0);
    return Next::leave;
  }
  for_lanes(w.active & ~mask, [&](u32 l) { w.pcs[l] = w.pc + 1; });
  if (!(w.live & ~w.blocked)) {
    launch.report(b, w, &r, __builtin_ctz(mask), "lanes %08x wait for lanes that have left", w.live);
    launch.failed = true;
    return Next::leave;
  }
  select_lanes(w);
  return Next::chosen;
}

// A warp's arrival at a barrier. immediate: number of the barrier; second: how many threads the barrier waits for, 0
// for all.
bool arrive(Launch& launch, Block& b, Warp& w, const Record& r, u32 mask, Next& next) {
  if (!gather_all(launch, b, w, r, next)) return false;
  if (mask != w.live) {
    launch.report(b, w, &r, __builtin_ctz(w.live & ~mask), "only lanes %08x of %08x execute the barrier", mask, w.live);
    launch.failed = true;
    next = Next::leave;
    return false;
  }
  w.phase = Phase::at_barrier;
  w.barrier = static_cast<u32>(r.immediate);
  w.barrier_warps = static_cast<u32>(r.second / kLanes);
  w.barrier_pc = w.pc;
  w.reduction = -1;
  w.pc++;
  launch.request.barriers++;
  next = Next::leave;
  return true;
}

Next barrier(Launch& launch, Block& b, Warp& w, const Record& r, u32 mask) {
  Next next;
  arrive(launch, b, w, r, mask, next);
  return next;
}

template <char how>  // operands: destination, source
Next barrier_reduce(Launch& launch, Block& b, Warp& w, const Record& r, u32 mask) {
  Next next;
  if (!arrive(launch, b, w, r, mask, next)) return next;
  check_defined(launch, b, w, r, 1, w.live, "the predicate of a bar.red");
  const u32 yes = predicate(launch, w, r, 1) & w.live;
  w.reduction = launch.operand(r, 0);
  w.reduction_how = how;
  w.reduction_value = how == 'p' ? static_cast<u32>(__builtin_popcount(yes)) : how == 'a' ? yes == w.live : yes != 0;
  return next;
}

Next nothing(Launch&, Block&, Warp&, const Record&, u32) { return Next::following; }

Next trap(Launch& launch, Block& b, Warp& w, const Record& r, u32 mask) {
  if (!mask) return Next::following;
  launch.report(b, w, &r, __builtin_ctz(mask), "the kernel executes trap");
  launch.failed = true;
  return Next::leave;
}

}  // namespace

// Releases the warps of every complete barrier. The barrier orders the earlier accesses of these warps before their
// later ones, so each warp gets the maximum of their clocks.
bool Launch::release_barriers(Block& b) {
  bool any = false;
  for (u32 id = 0; id < 16; id++) {
    u32 arrived = 0, expected = 0, live = 0;
    for (Warp& w : b.warps) {
      live += w.phase != Phase::done;
      if (w.phase != Phase::at_barrier || w.barrier != id) continue;
      arrived++;
      expected = std::max(expected, w.barrier_warps);
    }
    if (!arrived || arrived < (expected ? expected : live)) continue;
    std::vector<u32> joined(b.warps[0].clocks.size(), 0), fenced(b.warps.size(), 0);
    u32 sum = 0, all = 1, some = 0;
    for (Warp& w : b.warps) {
      if (w.phase != Phase::at_barrier || w.barrier != id) continue;
      for (size_t k = 0; k < joined.size(); k++) joined[k] = std::max(joined[k], w.clocks[k]);
      for (size_t k = 0; k < fenced.size(); k++) fenced[k] = std::max(fenced[k], w.fenced[k]);
      sum += w.reduction_value, all &= w.reduction_value, some |= w.reduction_value;
    }
    for (Warp& w : b.warps) {
      if (w.phase != Phase::at_barrier || w.barrier != id) continue;
      w.clocks = joined, w.fenced = fenced;
      w.clocks[w.id]++;
      w.phase = Phase::ready;
      any = true;
      if (w.reduction < 0) continue;
      u32* to = reinterpret_cast<u32*>(w.registers + w.reduction);
      const u32 decision = w.reduction_how == 'a' ? all : some;
      if (w.reduction_how != 'p') *to = decision ? kAll : 0;
      else for (u32 l = 0; l < kLanes; l++) to[l] = sum;
    }
  }
  return any;
}

void add_control(Table& t) {
  t.add("bra", branch);
  t.add("ret", leave);
  t.add("bar.sync", barrier);
  t.add("bar.red.or.pred", barrier_reduce<'o'>);
  t.add("bar.red.and.pred", barrier_reduce<'a'>);
  t.add("bar.red.popc.u32", barrier_reduce<'p'>);
  t.add("nop", nothing);
  t.add("trap", trap);
}
