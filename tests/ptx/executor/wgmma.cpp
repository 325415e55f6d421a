// wgmma: products that the four warps of a warpgroup start together and wait for later.
//
// The executor computes the sums at the wgmma, but stores them in the accumulators at the wgmma.wait_group that waits
// for it. Until then the accumulators are undefined, and the operands must not be overwritten.
#include "numbers.h"
#include "table.h"

namespace {

constexpr u32 kMaxColumns = 256;

// The matrix descriptor of the PTX ISA. Bits 0-13: address; 16-29: leading byte offset; 32-45: stride byte offset, all
// three in units of 16 bytes; 49-51: base offset; 62-63: swizzle, 1 for 128 bytes, 2 for 64 and 3 for 32. span: bytes
// of the swizzle. known: whether the executor models this descriptor: it has a swizzle, and all other bits are 0, those
// of the base offset too.
struct Descriptor {
  static constexpr u64 kModelled = 0x3fffull | 0x3fffull << 16 | 0x3fffull << 32 | 3ull << 62;
  u32 start, leading, stride, span, row_chunks;
  bool known;
  explicit Descriptor(u64 d)
      : start(static_cast<u32>(d & 0x3fff) << 4), leading(static_cast<u32>(d >> 16 & 0x3fff) << 4),
        stride(static_cast<u32>(d >> 32 & 0x3fff) << 4), span(256u >> (d >> 62)), row_chunks(span / 16),
        known(d >> 62 && !(d & ~kModelled)) {}

  // Address of a chunk of 16 bytes; `chunk` is its index in `line`. If k_major, a line is a row of A or a column of B,
  // and its chunks follow each other along K. Else a line is an index of K, and its chunks follow each other along M
  // (for A) or N (for B). The swizzle XORs address bits 7, 7-8 or 7-9 (for a span of 32, 64 or 128) into the bits
  // from 4 on.
  u32 at(u32 line, u32 chunk, bool k_major) const {
    u32 where = start + line % 8 * span + line / 8 * stride;
    where += k_major ? chunk * 16 : chunk % row_chunks * 16 + chunk / row_chunks * leading;
    return where ^ (where >> 7 & (row_chunks - 1)) << 4;
  }
};

struct Bf16 {
  typedef u16 Word;
  static f32 value(u16 x) { return from_bf16(x); }
};
struct F16 {
  typedef u16 Word;
  static f32 value(u16 x) { return from_f16(x); }
};
struct Tf32 {  // the lower 13 bits are ignored
  typedef u32 Word;
  static f32 value(u32 x) { return bits<f32>(x & 0xffffe000u); }
};

// Reads `rows` rows of A, or columns of B, from number `first` on: of each, 32 bytes along K. Calls
// put(row - first, k, value) for each element, and sets bad[row - first] for a row with unwritten bytes.
template <class Kind, class Put>
bool fetch(Launch& launch, Block& b, Warp& w, const Record& r, u64 descriptor, u32 first, u32 rows, bool k_major,
           std::vector<bool>& bad, Put&& put) {
  typedef typename Kind::Word Word;
  constexpr u32 each = 16 / sizeof(Word), depth = 32 / sizeof(Word);
  const Descriptor d(descriptor);
  const u32 lines = k_major ? rows : depth, chunks = k_major ? 2 : rows / each;
  for (u32 line = 0; line < lines; line++) {
    for (u32 chunk = 0; chunk < chunks; chunk++) {
      const u32 at = k_major ? d.at(first + line, chunk, true) : d.at(line, first / each + chunk, false);
      bool defined;
      if (!launch.may_read_async(b, w, r, at, 16, defined)) return false;
      w.products.reads.push_back(at);
      Word words[each];
      std::memcpy(words, &b.shared[at], 16);
      for (u32 e = 0; e < each; e++) {
        const u32 row = k_major ? line : chunk * each + e, k = k_major ? chunk * each + e : line;
        put(row, k, Kind::value(words[e]));
        if (defined) continue;
        for (u32 q = 0; q < sizeof(Word); q++) {
          if (!b.shared_defined[at + e * sizeof(Word) + q]) bad[row] = true;
        }
      }
    }
  }
  return true;
}

template <class T>
bool uniform(Launch& launch, Block& b, Warp& w, const Record& r, const T* values, const char* what) {
  for (u32 l = 1; l < kLanes; l++) {
    if (values[l] == values[0]) continue;
    launch.report(b, w, &r, l, "lanes differ in %s", what);
    return false;
  }
  return true;
}

// Whether the warp's n-th wgmma equals that of the first warp of the warpgroup to reach its n-th.
bool agree(Launch& launch, Block& b, Warp& w, const Record& r, Agreement::Call call) {
  if ((w.id | 3) >= b.warps.size() || w.live != kAll) {
    launch.report(b, w, &r, 0, "a wgmma by fewer than four warps of 32 lanes");
    return false;
  }
  Agreement& group = b.agreements[w.id / 4];
  const u64 number = group.issued[w.id % 4]++ - group.first;
  if (number == group.calls.size()) {
    group.calls.push_back(call);
    return true;
  }
  const Agreement::Call known = group.calls[number];
  if (*std::min_element(group.issued, group.issued + 4) > group.first) group.calls.pop_front(), group.first++;
  if (known.pc != call.pc || known.scale != call.scale) {
    launch.report(b, w, &r, 0, "a wgmma in whose place warp %u of its warpgroup issues %s", known.warp,
                  known.pc != call.pc ? "another instruction" : "one with another scale-d");
    return false;
  }
  if (known.a == call.a && known.b == call.b) return true;
  launch.report(
      b, w, &r, 0,
      "a wgmma that warp %u of its warpgroup issues differently: descriptors %llx and %llx, in that warp %llx and %llx",
      known.warp, (unsigned long long)call.a, (unsigned long long)call.b, (unsigned long long)known.a,
      (unsigned long long)known.b);
  return false;
}

// Row (0 to 15) and column of the sum in accumulator q of lane l.
u32 row_of(u32 l, u32 q) { return l / 4 + 8 * (q >> 1 & 1); }
u32 column_of(u32 l, u32 q) { return 8 * (q / 4) + 2 * (l % 4) + (q & 1); }

u32* lanes_at(Warp& w, u32 place) { return reinterpret_cast<u32*>(w.registers + place); }

Product& product_of(Launch& launch, Warp& w, const Record& r, u32 count) {
  const u32* registers = launch.program.operands + r.operands;
  for (Product& each : w.products.running) {
    if (each.count == count && std::equal(registers, registers + count, each.registers)) return each;
  }
  Product fresh{registers, count, 0, std::vector<f32>(32 * count), std::vector<u64>(count)};
  for (u32 q = 0; q < count; q++) {
    u32* from = lanes_at(w, registers[q]);
    for (u32 l = 0; l < kLanes; l++) fresh.sums[row_of(l, q) * 2 * count + column_of(l, q)] = bits<f32>(from[l]);
    std::fill_n(from, kLanes, kPoison);
    fresh.undefined[q] = w.undefined[registers[q] / 64];
    w.undefined[registers[q] / 64] = ~u64(0);
  }
  w.products.running.push_back(std::move(fresh));
  return w.products.running.back();
}

void finish(Launch& launch, Block& b, Warp& w, const Record& r, const Product& product) {
  for (u32 q = 0; q < product.count; q++) {
    u32* to = lanes_at(w, product.registers[q]);
    u64& undefined = w.undefined[product.registers[q] / 64];
    const u32* other = std::find_if(to, to + kLanes, [](u32 x) { return x != kPoison; });
    if (other != to + kLanes || undefined != ~u64(0)) {
      launch.report(b, w, &r, static_cast<u32>(other - to) % kLanes,
                    "accumulator %u was written while a wgmma may still have been running", q);
    }
    for (u32 l = 0; l < kLanes; l++)
      to[l] = bits<u32>(product.sums[row_of(l, q) * 2 * product.count + column_of(l, q)]);
    undefined = product.undefined[q];
  }
}

// A's rows of a warp from its four registers: a register of a lane has 4 bytes along K, of row l / 4, 8 rows below, and
// of both rows 16 bytes further along K. That code may not change these registers before the wgmma.wait_group is not
// checked.
template <class Kind, class Put>
void unpack(Launch& launch, Warp& w, const Record& r, u32 operand, Put&& put) {
  typedef typename Kind::Word Word;
  constexpr u32 each = 4 / sizeof(Word);
  for (u32 q = 0; q < 4; q++) {
    const u32* lanes = lanes_of<const u32>(launch, w, r, operand + q);
    for (u32 l = 0; l < kLanes; l++) {
      Word words[each];
      std::memcpy(words, &lanes[l], 4);
      for (u32 e = 0; e < each; e++) {
        put(l / 4 + 8 * (q & 1), (l % 4 + 4 * (q >> 1)) * each + e, Kind::value(words[e]));
      }
    }
  }
}

// Operands: the accumulators, A (64, K) and B (K, N), and whether to add to the accumulators. B is a descriptor, A one or
// four registers. immediate: N; elements: bit 0 is 1 if A is not K-major, bit 1 if B is not, bit 2 if A is in registers;
// flag: 1 if a wgmma.fence is missing (forms_sm90.unfenced).
template <class Kind>
Next multiply(Launch& launch, Block& b, Warp& w, const Record& r, u32) {
  Next next = Next::following;
  if (!gather_all(launch, b, w, r, next)) return next;
  constexpr u32 depth = 32 / sizeof(typename Kind::Word);
  const u32 columns = static_cast<u32>(r.immediate), count = columns / 2;
  const bool in_registers = r.elements & 4;
  const u32 next_operand = count + (in_registers ? 4 : 1);
  const u64* of_a = in_registers ? nullptr : lanes_of<const u64>(launch, w, r, count);
  const u64* of_b = lanes_of<const u64>(launch, w, r, next_operand);
  const u32 scale = predicate(launch, w, r, next_operand + 1);
  for (u32 k = count; k < next_operand + 2; k++) check_defined(launch, b, w, r, k, kAll, in_registers ? "an operand" : "a descriptor or scale");
  const bool fine = (in_registers || uniform(launch, b, w, r, of_a, "the descriptor of A")) &&
                    uniform(launch, b, w, r, of_b, "the descriptor of B");
  const u64 a_at = in_registers ? 0 : of_a[0];
  launch.failed |= !fine || !agree(launch, b, w, r, {launch.index_of(r), scale & 1, a_at, of_b[0], w.id});
  const bool known = (in_registers || Descriptor(a_at).known) && Descriptor(of_b[0]).known;
  if (!launch.failed && (!known || (scale && scale != kAll))) {
    launch.report(b, w, &r, 0, "a descriptor or scale that is not modelled: %llx, %llx, %08x",
                  (unsigned long long)a_at, (unsigned long long)of_b[0], scale);
    launch.failed = true;
  }
  if (launch.failed) return Next::leave;
  if (r.flag) launch.report(b, w, &r, 0,
                            "on some path no wgmma.fence follows the last access to the accumulators, "
                            "or the kernel's start");

  f32 a[16][depth];
  static thread_local f32 bt[depth][kMaxColumns];
  std::vector<bool> bad_rows(16), bad_columns(columns);
  const u32 first = w.id % 4 * 16;
  const auto put = [&](u32 row, u32 k, f32 x) { a[row][k] = x; };
  if (in_registers) unpack<Kind>(launch, w, r, count, put);
  if ((!in_registers && !fetch<Kind>(launch, b, w, r, a_at, first, 16, !(r.elements & 1), bad_rows, put)) ||
      !fetch<Kind>(launch, b, w, r, of_b[0], 0, columns, !(r.elements & 2), bad_columns,
                   [&](u32 n, u32 k, f32 x) { bt[k][n] = x; })) {
    return Next::leave;
  }
  Product& product = product_of(launch, w, r, count);
  product.group = w.products.committed;
  if (!scale) {
    std::fill(product.sums.begin(), product.sums.end(), 0.0f);
    std::fill(product.undefined.begin(), product.undefined.end(), 0);
  }
  for (u32 i = 0; i < 16; i++) {
    f32* sums = &product.sums[i * columns];
    for (u32 k = 0; k < depth; k++) {
      for (u32 n = 0; n < columns; n++) sums[n] += a[i][k] * bt[k][n];
    }
  }
  for (u32 q = 0; q < count; q++) {
    for (u32 l = 0; l < kLanes; l++) {
      if (bad_rows[row_of(l, q)] || bad_columns[column_of(l, q)]) product.undefined[q] |= both(1u << l);
    }
  }
  launch.undefined_from(r,
                        "wgmma (before its wgmma.wait_group, on unwritten shared bytes or on undefined accumulators)");
  return next;
}

Next commit(Launch& launch, Block& b, Warp& w, const Record& r, u32) {
  Next next = Next::following;
  if (!gather_all(launch, b, w, r, next)) return next;
  w.products.groups.push_back(std::move(w.products.reads));
  w.products.reads.clear();
  w.products.committed++;
  return next;
}

Next wait(Launch& launch, Block& b, Warp& w, const Record& r, u32) {
  Next next = Next::following;
  if (!gather_all(launch, b, w, r, next)) return next;
  launch.retire(b, w, static_cast<size_t>(r.immediate));
  Products& products = w.products;
  const u64 done = products.committed - products.groups.size();
  for (const Product& each : products.running) {
    if (each.group < done) finish(launch, b, w, r, each);
  }
  std::erase_if(products.running, [&](const Product& each) { return each.group < done; });
  return next;
}

Next fence(Launch& launch, Block& b, Warp& w, const Record& r, u32) {
  Next next = Next::following;
  gather_all(launch, b, w, r, next);
  return next;
}

}  // namespace

// Ends the reads of groups of wgmma, the oldest first, until at most `left` groups may still run.
void Launch::retire(Block& b, Warp& w, size_t left) {
  const u32 grain = program.shared_grain, warps = static_cast<u32>(b.warps.size());
  for (auto& groups = w.products.groups; groups.size() > left; groups.pop_front()) {
    for (const u32 at : groups.front()) {
      for (u32 k = at / grain; k <= (at + 15) / grain; k++) {
        b.words[k].reading--;
        b.read_clocks[static_cast<size_t>(k) * warps + w.id] = w.clocks[w.id];
      }
    }
  }
}

void Launch::check_agreements(Block& b) {
  for (u32 g = 0; g < b.agreements.size(); g++) {
    Agreement& group = b.agreements[g];
    for (u32 q = 0; q < 4 && !group.calls.empty(); q++) {
      if (group.issued[q] > group.first) continue;
      const Agreement::Call& call = group.calls.front();
      report(b, b.warps[4 * g + q], program.records + call.pc, 0,
             "a wgmma that warp %u issues and this warp of its warpgroup never does", call.warp);
      failed = true;
      break;
    }
    group = Agreement();
  }
}

void add_wgmma(Table& t) {
  t.add("wgmma.m64k16.bf16", multiply<Bf16>);
  t.add("wgmma.m64k16.f16", multiply<F16>);
  t.add("wgmma.m64k8.tf32", multiply<Tf32>);
  t.add("wgmma.fence", fence);
  t.add("wgmma.commit_group", commit);
  t.add("wgmma.wait_group", wait);
}
