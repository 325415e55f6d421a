// mbarriers: a phase is complete after its arrivals and the bytes of its bulk copies.
//
// In this executor a phase without copies is complete at its last arrival. A phase with copies is completed by a warp's
// second try_wait, which writes the bytes to shared memory. The first try_wait fails even if all arrivals and copies
// were issued. So code that ignores the result of try_wait reads bytes too early, which is reported as an error.
#include "table.h"

namespace {

// The address of an mbarrier: operand k, which must be equal in all lanes of `mask`, plus `immediate`. ~0 after an
// error.
u32 address_of(Launch& launch, Block& b, Warp& w, const Record& r, u32 k, u32 mask) {
  for (u32 q = k; q < r.count; q++) check_defined(launch, b, w, r, q, mask, "an operand of an mbarrier");
  const u32* base = lanes_of<const u32>(launch, w, r, k);
  const u32 lane = __builtin_ctz(mask), at = base[lane] + static_cast<u32>(r.immediate);
  u32 other = 0;
  for_lanes(mask, [&](u32 l) { other |= u32(base[l] != base[lane]) << l; });
  if (!other && at % 8 == 0 && u64(at) + 8 <= launch.request.shared_bytes) return at;
  if (other) launch.report(b, w, &r, __builtin_ctz(other), "lanes have different addresses of an mbarrier");
  else
    launch.report(b, w, &r, lane, "the mbarrier's address %u is not a multiple of 8, or outside of shared memory", at);
  launch.failed = true;
  return ~0u;
}

void mark(Launch& launch, Block& b, u32 at, bool live) {
  for (u32 k = at / launch.program.shared_grain; k <= (at + 7) / launch.program.shared_grain; k++)
    b.words[k].mbarrier = live;
  std::memset(&b.shared_defined[at], 0, 8);
}

// Operands: address, number of arrivals of a phase.
Next init(Launch& launch, Block& b, Warp& w, const Record& r, u32 mask) {
  if (!mask) return Next::following;
  const u32 at = address_of(launch, b, w, r, 0, mask), lane = __builtin_ctz(mask);
  if (at == ~0u || !launch.may_write_shared(b, w, r, lane, at, 8, nullptr, false)) return Next::leave;
  Mbarrier fresh;
  const auto known = b.mbarriers.find(at);
  const u32 warps = static_cast<u32>(b.warps.size());
  fresh.slot = known != b.mbarriers.end() ? known->second.slot : warps + static_cast<u32>(b.mbarriers.size());
  if (fresh.slot >= warps + kMbarriers) {
    launch.report(b, w, &r, lane, "more than %u mbarriers in a block: not modelled", kMbarriers);
    launch.failed = true;
    return Next::leave;
  }
  fresh.clock = known != b.mbarriers.end() ? known->second.clock : launch.clock_base;
  fresh.expected = fresh.pending = lanes_of<const u32>(launch, w, r, 1)[lane];
  fresh.live = true;
  fresh.clocks.assign(w.clocks.size(), 0), fresh.fenced.assign(w.fenced.size(), 0);
  b.mbarriers[at] = fresh;
  mark(launch, b, at, true);
  return Next::following;
}

Next invalidate(Launch& launch, Block& b, Warp& w, const Record& r, u32 mask) {
  if (!mask) return Next::following;
  const u32 at = address_of(launch, b, w, r, 0, mask), lane = __builtin_ctz(mask);
  Mbarrier* m = at == ~0u ? nullptr : launch.find_mbarrier(b, w, r, lane, at);
  if (!m) return Next::leave;
  if (!m->copies.empty())
    launch.report(b, w, &r, lane, "the mbarrier is invalidated while %llu bytes for it may still be in flight",
                  (unsigned long long)m->copied);
  m->live = false;
  mark(launch, b, at, false);
  return launch.may_write_shared(b, w, r, lane, at, 8, nullptr, false) ? Next::following : Next::leave;
}

void raise(std::vector<u32>& to, const std::vector<u32>& by) {
  for (size_t k = 0; k < to.size(); k++) to[k] = std::max(to[k], by[k]);
}

bool all_issued(const Mbarrier& m) { return m.pending == 0 && m.copied >= m.bytes; }

void complete(Launch& launch, Block& b, Mbarrier& m) {
  m.clock++;
  for (const Copy& copy : m.copies) launch.land_copy(b, copy, m.slot, m.clock);
  m.copies.clear();
  m.copied = m.bytes = 0;
  m.pending = m.expected;
  m.phase++;
  m.clocks[m.slot] = m.clock;
}

// Operands: address, number of bytes that the phase then waits for in addition.
Next arrive(Launch& launch, Block& b, Warp& w, const Record& r, u32 mask) {
  if (!mask) return Next::following;
  const u32 at = address_of(launch, b, w, r, 0, mask);
  for (u32 rest = mask; rest; rest &= rest - 1) {
    const u32 lane = __builtin_ctz(rest);
    Mbarrier* m = at == ~0u ? nullptr : launch.find_mbarrier(b, w, r, lane, at);
    if (!m) return Next::leave;
    if (!m->pending) {
      launch.report(b, w, &r, lane, "arrives again before a wait found phase %llu complete",
                    (unsigned long long)m->phase);
      launch.failed = true;
      return Next::leave;
    }
    m->pending--;
    m->bytes += lanes_of<const u32>(launch, w, r, 1)[lane];
    raise(m->clocks, w.clocks), raise(m->fenced, w.fenced);
    if (all_issued(*m) && m->copies.empty()) complete(launch, b, *m);
  }
  w.clocks[w.id]++;
  return Next::following;
}

// Operands: the result, address, parity of the phase.
Next try_wait(Launch& launch, Block& b, Warp& w, const Record& r, u32 mask) {
  if (!mask) return Next::following;
  const u32 at = address_of(launch, b, w, r, 1, mask), lane = __builtin_ctz(mask);
  Mbarrier* m = at == ~0u ? nullptr : launch.find_mbarrier(b, w, r, lane, at);
  if (!m) return Next::leave;
  u32& result = predicate(launch, w, r, 0);
  set_undefined(undefined_lanes(launch, w, r, 0), 0, mask);
  const bool again = w.mbarrier == at && w.mbarrier_phase == m->phase;
  if ((lanes_of<const u32>(launch, w, r, 2)[lane] & 1) == (m->phase & 1)) {
    if (!again || !all_issued(*m)) {
      result &= ~mask;
      w.mbarrier = at, w.mbarrier_pc = w.pc, w.mbarrier_phase = m->phase;
      w.phase = Phase::at_mbarrier;
      w.pc++;
      return Next::leave;
    }
    if (m->copied > m->bytes) {
      launch.report(b, w, &r, lane, "%llu bytes arrive, but %llu are expected", (unsigned long long)m->copied,
                    (unsigned long long)m->bytes);
    }
    complete(launch, b, *m);
  }
  result |= mask;
  w.mbarrier = ~0u;
  raise(w.clocks, m->clocks), raise(w.fenced, m->fenced);
  return Next::following;
}

}  // namespace

Mbarrier* Launch::find_mbarrier(Block& b, Warp& w, const Record& r, u32 lane, u64 at) {
  bool defined;
  const auto found = b.mbarriers.find(static_cast<u32>(at));
  if (found != b.mbarriers.end() && found->second.live && may_read_shared(b, w, r, lane, at, 8, defined))
    return &found->second;
  report(b, w, &r, lane, "no mbarrier is initialised at %llu", (unsigned long long)at);
  failed = true;
  return nullptr;
}

// Lets each waiting warp run again, unless its next try_wait would fail.
bool Launch::release_mbarriers(Block& b) {
  bool any = false;
  for (Warp& w : b.warps) {
    if (w.phase != Phase::at_mbarrier) continue;
    const Mbarrier& m = b.mbarriers[w.mbarrier];
    if (m.live && m.phase == w.mbarrier_phase && !all_issued(m)) continue;
    w.phase = Phase::ready;
    any = true;
  }
  return any;
}

void add_mbarrier(Table& t) {
  t.add("mbarrier.init", init);
  t.add("mbarrier.inval", invalidate);
  t.add("mbarrier.arrive.expect_tx", arrive);
  t.add("mbarrier.try_wait.parity", try_wait);
}
