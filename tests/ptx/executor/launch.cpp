// Runs a launch: blocks one after the other, the warps of a block in turns. The seed determines both orders.
#include <cstdarg>
#include <cstdio>
#include <numeric>

#include "approximate.h"
#include "table.h"

namespace {

const Table& table() {
  static const Table built = [] {
    Table t;
    add_control(t), add_integers(t), add_floats(t), add_conversions(t);
    add_memory(t), add_copies(t), add_collectives(t), add_tensor(t);
    add_wgmma(t), add_mbarrier(t), add_bulk(t);
    return t;
  }();
  return built;
}

constexpr u64 kMaxErrors = 1000;  // a launch ends at so many errors, as a missing barrier can cause millions

}  // namespace

void Launch::report(const Block& b, const Warp& w, const Record* record, u32 lane, const char* format, ...) {
  if (++request.errors >= kMaxErrors) failed = true;
  const u32 pc = record ? index_of(*record) : program.size;
  for (u32 k = 0; k < request.finding_count; k++) {
    Finding& each = request.findings[k];
    if (each.pc == pc && each.kind == static_cast<u32>(reinterpret_cast<uintptr_t>(format))) {
      each.times++;
      return;
    }
  }
  if (request.finding_count >= request.finding_limit) return;
  Finding& found = request.findings[request.finding_count++];
  found.pc = pc, found.warp = w.id, found.lane = lane,
  found.kind = static_cast<u32>(reinterpret_cast<uintptr_t>(format)), found.times = 1;
  std::copy(b.id, b.id + 3, found.block);
  va_list list;
  va_start(list, format);
  std::vsnprintf(found.text, sizeof found.text, format, list);
  va_end(list);
}

void Launch::undefined_use(const Block& b, const Warp& w, const Record& r, u32 lanes, const char* what) {
  if (!lanes) return;
  report(b, w, &r, __builtin_ctz(lanes), "%s is undefined; the last undefined value comes from a %s (instruction %u)",
         what, origin_why, origin);
}

void Launch::start(Block& b, u32 index) {
  const u32* grid = request.grid;
  const u32* block = request.block;
  b.index = index;
  b.id[0] = index % grid[0], b.id[1] = index / grid[0] % grid[1], b.id[2] = index / grid[0] / grid[1];
  std::memset(b.shared.data(), 0xcd, b.shared.size());
  std::memset(b.shared_defined.data(), 0, b.shared_defined.size());
  b.known.clear(), b.mbarriers.clear();
  const u32 threads = block[0] * block[1] * block[2], warps = static_cast<u32>(b.warps.size());
  u32 latest = clock_base;
  for (const Warp& w : b.warps) {
    for (u32 each : w.clocks) latest = std::max(latest, each);
  }
  clock_base = latest + 1;
  for (u32 k = 0; k < warps; k++) {
    Warp& w = b.warps[k];
    const u32 lanes = std::min(kLanes, threads - kLanes * k);
    w.live = w.active = w.born = lanes == kLanes ? kAll : (1u << lanes) - 1;
    w.pc = 0, w.blocked = 0, w.next_other = ~0u, w.phase = Phase::ready, w.reduction = -1, w.reduction_value = 0;
    w.uncommitted.clear(), w.groups.clear();
    w.clocks.assign(warps + kMbarriers, clock_base - 1);
    w.clocks[k] = clock_base;
    w.fenced.assign(warps, clock_base - 1);
    w.products = Products();
    w.mbarrier = ~0u;
    std::fill(w.met_at, w.met_at + kLanes, 0);
    for (u32 l = 0; l < kLanes; l++) {
      const u32 t = kLanes * k + l;
      const u32 values[] = {t % block[0], t / block[0] % block[1], t / block[0] / block[1],
                            block[0], block[1], block[2], b.id[0], b.id[1], b.id[2], grid[0], grid[1], grid[2],
                            l, k, (1u << l) - 1, ((2u << l) - 1)};
      for (u32 q = 0; q < 16; q++) reinterpret_cast<u32*>(w.registers + program.special[q])[l] = values[q];
    }
  }
}

void Launch::run_warp(Block& b, Warp& w, u64 budget) {
  const std::vector<Operation>& operations = table().operations;
  for (u64 end = steps + std::min(budget, request.step_limit + 1 - std::min(steps, request.step_limit)); steps < end;) {
    if (w.pc >= w.next_other) {
      for_lanes(w.active, [&](u32 l) { w.pcs[l] = w.pc; });
      select_lanes(w);
    }
    if (w.pc >= program.size) {
      report(b, w, nullptr, 0, "ran past the last instruction");
      failed = true;
      return;
    }
    const Record& r = program.records[w.pc];
    steps++;
    u32 mask = w.active;
    if (r.guard >= 0) {
      const u32 guard = *reinterpret_cast<u32*>(w.registers + r.guard);
      const u64 undefined = w.undefined[r.guard / 64] & both(mask);
      if (undefined) undefined_use(b, w, r, static_cast<u32>(either(undefined)), "a guard");
      mask &= r.negated ? ~guard : guard;
    }
    Counters& c = request.counters[w.pc];
    c.runs++;
    c.lanes += static_cast<u64>(__builtin_popcount(mask));
    switch (operations[r.op].step(*this, b, w, r, mask)) {
      case Next::following: w.pc++; break;
      case Next::chosen: break;
      case Next::leave: return;
    }
    if (failed) return;
  }
}

void Launch::run() {
  const u32 total = request.grid[0] * request.grid[1] * request.grid[2];
  const u32 threads = request.block[0] * request.block[1] * request.block[2], warps = (threads + kLanes - 1) / kLanes;
  const u32 words = request.shared_bytes / program.shared_grain + 32;
  approximation_seed = request.seed >> 16 ? Random{request.seed >> 16}.next() : 0;
  std::vector<u32> order(total);
  std::iota(order.begin(), order.end(), 0u);
  if (seeded()) {
    for (u32 k = total; k > 1; k--) std::swap(order[k - 1], order[random.below(k)]);
  }
  Block b;
  b.shared.resize(request.shared_bytes + 32);
  b.shared_defined.resize(request.shared_bytes + 32);
  b.words.resize(words);
  b.read_clocks.resize(static_cast<size_t>(words) * warps);
  b.warps.resize(warps);
  b.agreements.assign((warps + 3) / 4, Agreement());
  std::vector<u8> registers(static_cast<size_t>(warps) * program.register_bytes + 64, 0xcd);
  std::vector<u64> undefined(static_cast<size_t>(warps) * (program.register_bytes / 64), 0);
  u8* base = reinterpret_cast<u8*>((reinterpret_cast<u64>(registers.data()) + 63) & ~u64(63));
  for (u32 k = 0; k < warps; k++) {
    b.warps[k].id = k;
    b.warps[k].registers = base + static_cast<size_t>(k) * program.register_bytes;
    b.warps[k].undefined = undefined.data() + static_cast<size_t>(k) * (program.register_bytes / 64);
    std::memcpy(b.warps[k].registers, program.constants, program.constant_bytes);
  }
  for (u32 k = 0; k < total && !failed; k++) {
    start(b, order[k]);
    request.blocks++;
    while (!failed) {
      bool left = false, ran = false;
      const u32 first = seeded() ? random.below(warps) : 0;
      for (u32 q = 0; q < warps && !failed; q++) {
        Warp& w = b.warps[(first + q) % warps];
        if (w.phase == Phase::ready) {
          run_warp(b, w, seeded() ? 1 + random.below(2000) : ~u64(0) >> 1);
          ran = true;
        }
        left |= w.phase != Phase::done;
      }
      if (!left) break;
      const bool released = release_barriers(b) | release_mbarriers(b);
      if (!released && !ran && !failed) report_deadlock(b);
      if (steps > request.step_limit) {
        report(b, b.warps[0], program.records + std::min(b.warps[0].pc, program.size - 1), 0,
               "more than %llu instructions in one launch", (unsigned long long)request.step_limit);
        failed = true;
      }
    }
    if (!failed) end(b);
  }
  request.steps = steps;
}

void Launch::report_deadlock(Block& b) {
  const Warp* waiting = &b.warps[0];
  for (const Warp& w : b.warps) {
    if (w.phase == Phase::at_barrier || w.phase == Phase::at_mbarrier) waiting = &w;
  }
  failed = true;
  if (waiting->phase == Phase::at_barrier) {
    report(b, *waiting, program.records + waiting->barrier_pc, 0,
           "waits at a barrier that the other warps never reach");
    return;
  }
  const Mbarrier& m = b.mbarriers[waiting->mbarrier];
  report(b, *waiting, program.records + waiting->mbarrier_pc, 0,
         "waits at the mbarrier at %u: %u arrivals are missing, and %llu of %llu bytes have arrived", waiting->mbarrier,
         m.pending, (unsigned long long)m.copied, (unsigned long long)m.bytes);
}

// Ends a block: reports a wgmma that not all warps of its warpgroup issued and a bulk copy in flight, and clears the
// marks of the mbarriers.
void Launch::end(Block& b) {
  check_agreements(b);
  for (auto& [at, m] : b.mbarriers) {
    if (m.copies.empty()) continue;
    report(b, b.warps[0], nullptr, 0, "the block ends while %llu bytes for the mbarrier at %u may still be in flight",
           (unsigned long long)m.copied, at);
    failed = true;
  }
  for (const auto& [at, m] : b.mbarriers) {
    for (u32 k = at / program.shared_grain; m.live && k <= (at + 7) / program.shared_grain; k++)
      b.words[k].mbarrier = 0;
  }
}

extern "C" {

const char* ptx_operations() {
  static const std::string names = [] {
    std::string all;
    for (const Operation& each : table().operations) all.append(each.name).push_back(' ');
    return all;
  }();
  return names.c_str();
}

// Sizes of the structures in types.h; machine.py compares them with those of records.py.
u32 ptx_size(u32 which) {
  const u32 sizes[] = {sizeof(Record),  sizeof(Counters), sizeof(Range),
                       sizeof(Finding), sizeof(Variable), sizeof(Program), sizeof(Request)};
  return sizes[which];
}

void ptx_run(const Program* program, Request* request) { Launch(*program, *request).run(); }
}
