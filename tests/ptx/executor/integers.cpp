// Integer and bit operations, and predicates. Either half of a lane's value may be undefined (Warp::undefined).
#include <algorithm>
#include <tuple>

#include "elementwise.h"
#include "numbers.h"

namespace {

// mov: a half of the result is undefined if the same half of the source is.
template <class T>
Next move(Launch& launch, Block&, Warp& warp, const Record& record, u32 mask) {
  T* to = lanes_of<T>(launch, warp, record, 0);
  const T* from = lanes_of<const T>(launch, warp, record, 1);
  if (mask == kAll) {
    std::memmove(to, from, sizeof(T) * kLanes);
  } else {
    for_lanes(mask, [&](u32 l) { to[l] = from[l]; });
  }
  set_undefined(undefined_lanes(launch, warp, record, 0), undefined_lanes(launch, warp, record, 1), mask);
  return Next::following;
}

// and, or, xor: a half of the result is undefined if the same half of a source is.
template <class F, class T>
Next bitwise(Launch& launch, Block&, Warp& warp, const Record& record, u32 mask) {
  T* to = lanes_of<T>(launch, warp, record, 0);
  const T* x = lanes_of<const T>(launch, warp, record, 1);
  const T* y = lanes_of<const T>(launch, warp, record, 2);
  const u64 undefined = undefined_lanes(launch, warp, record, 1) | undefined_lanes(launch, warp, record, 2);
  for (u32 l = 0; l < kLanes; l++) {
    if (mask >> l & 1) to[l] = F{}(x[l], y[l]);
  }
  set_undefined(undefined_lanes(launch, warp, record, 0), undefined, mask);
  return Next::following;
}
template <class T, class F>
void add_bitwise(Table& table, const std::string& name, F) {
  table.add(name, bitwise<F, T>);
}

template <class T>
Next select(Launch& launch, Block&, Warp& warp, const Record& record, u32 mask) {
  T* to = lanes_of<T>(launch, warp, record, 0);
  const T* x = lanes_of<const T>(launch, warp, record, 1);
  const T* y = lanes_of<const T>(launch, warp, record, 2);
  const u32 first = predicate(launch, warp, record, 3);
  const u64 chosen = both(first);
  const u64 undefined = (undefined_lanes(launch, warp, record, 1) & chosen) |
                        (undefined_lanes(launch, warp, record, 2) & ~chosen) |
                        undefined_lanes(launch, warp, record, 3);
  for (u32 l = 0; l < kLanes; l++) {
    const T value = first >> l & 1 ? x[l] : y[l];
    if (mask >> l & 1) to[l] = value;
  }
  set_undefined(undefined_lanes(launch, warp, record, 0), undefined, mask);
  return Next::following;
}

// Packs two halves into a register, the first source into the lower half.
template <class Whole, class Half>
Next pack(Launch& launch, Block&, Warp& warp, const Record& record, u32 mask) {
  Whole* to = lanes_of<Whole>(launch, warp, record, 0);
  const Half* low = lanes_of<const Half>(launch, warp, record, 1);
  const Half* high = lanes_of<const Half>(launch, warp, record, 2);
  const u64 of_low = undefined_lanes(launch, warp, record, 1), of_high = undefined_lanes(launch, warp, record, 2);
  for_lanes(mask,
            [&](u32 l) { to[l] = static_cast<Whole>(low[l]) | static_cast<Whole>(high[l]) << (8 * sizeof(Half)); });
  const u64 undefined = (either(of_low) & kAll) | (either(of_high) & ~u64(kAll));
  set_undefined(undefined_lanes(launch, warp, record, 0), undefined, mask);
  return Next::following;
}

template <class Whole, class Half>
Next unpack(Launch& launch, Block&, Warp& warp, const Record& record, u32 mask) {
  Whole from[kLanes];
  std::memcpy(from, lanes_of<const Whole>(launch, warp, record, 2), sizeof from);
  const u64 undefined = undefined_lanes(launch, warp, record, 2);
  Half* low = lanes_of<Half>(launch, warp, record, 0);
  Half* high = lanes_of<Half>(launch, warp, record, 1);
  for_lanes(mask, [&](u32 l) {
    low[l] = static_cast<Half>(from[l]);
    high[l] = static_cast<Half>(from[l] >> (8 * sizeof(Half)));
  });
  set_undefined(undefined_lanes(launch, warp, record, 0), both(static_cast<u32>(undefined)), mask);
  set_undefined(undefined_lanes(launch, warp, record, 1), both(static_cast<u32>(undefined >> 32)), mask);
  return Next::following;
}

// prmt selects bytes of two registers. A half of the result is undefined if one of its bytes is from an undefined half
// of a source, or if the selector is undefined.
Next permute(Launch& launch, Block&, Warp& warp, const Record& record, u32 mask) {
  u32* to = lanes_of<u32>(launch, warp, record, 0);
  const u32* x = lanes_of<const u32>(launch, warp, record, 1);
  const u32* y = lanes_of<const u32>(launch, warp, record, 2);
  const u32* selector = lanes_of<const u32>(launch, warp, record, 3);
  const u64 of_x = undefined_lanes(launch, warp, record, 1), of_y = undefined_lanes(launch, warp, record, 2);
  const u64 of_selector = either(undefined_lanes(launch, warp, record, 3));
  u64 undefined = of_selector;
  for_lanes(mask, [&](u32 l) {
    for (u32 i = 0; of_x | of_y && i < 4; i++) {
      const u32 byte = selector[l] >> (4 * i) & 7;
      const u64 source = byte < 4 ? of_x : of_y;
      if (source >> ((byte & 2) * 16 + l) & 1) undefined |= u64(1) << ((i & 2) * 16 + l);
    }
    to[l] = permuted(x[l], y[l], selector[l]);
  });
  set_undefined(undefined_lanes(launch, warp, record, 0), undefined, mask);
  return Next::following;
}

template <class F>
Next on_predicates(Launch& launch, Block&, Warp& warp, const Record& record, u32 mask) {
  const u32 x = predicate(launch, warp, record, 1);
  const bool two = record.count > 2;
  const u32 y = two ? predicate(launch, warp, record, 2) : 0;
  u64 undefined = undefined_lanes(launch, warp, record, 1);
  if (two) undefined |= undefined_lanes(launch, warp, record, 2);
  u32& to = predicate(launch, warp, record, 0);
  to = (to & ~mask) | (F{}(x, y) & mask);
  set_undefined(undefined_lanes(launch, warp, record, 0), undefined, mask);
  return Next::following;
}
template <class F>
void add_on_predicates(Table& table, const std::string& name, F) {
  table.add(name, on_predicates<F>);
}

template <class T>
void of_width(Table& t, const std::string& width) {
  constexpr u32 top = 8 * sizeof(T) - 1;
  t.add("mov.b" + width, move<T>);
  t.add("selp.b" + width, select<T>);
  unary<T, T>(t, "not.b" + width, [](T x) { return static_cast<T>(~x); });
  add_bitwise<T>(t, "and.b" + width, [](T x, T y) { return static_cast<T>(x & y); });
  add_bitwise<T>(t, "or.b" + width, [](T x, T y) { return static_cast<T>(x | y); });
  add_bitwise<T>(t, "xor.b" + width, [](T x, T y) { return static_cast<T>(x ^ y); });
  binary<T, T, u32>(t, "shl.b" + width, [](T x, u32 y) { return y > top ? T(0) : static_cast<T>(x << (y & top)); });
  for (const char* sign : {"u", "s"}) {  // u and s compute the same bits
    const std::string kind = sign + width;
    binary<T, T, T>(t, "add." + kind, [](T x, T y) { return static_cast<T>(x + y); });
    binary<T, T, T>(t, "sub." + kind, [](T x, T y) { return static_cast<T>(x - y); });
    binary<T, T, T>(t, "mul.lo." + kind, [](T x, T y) { return static_cast<T>(u64(x) * y); });
    ternary<T, T, T, T>(t, "mad.lo." + kind, [](T x, T y, T z) { return static_cast<T>(u64(x) * y + z); });
  }
}

template <class T>
void ordered(Table& t, const std::string& kind) {
  constexpr bool is_signed = std::is_signed_v<T>;
  using U = std::make_unsigned_t<T>;
  constexpr u32 top = 8 * sizeof(T) - 1;
  const std::string shift = is_signed ? kind : "u" + kind.substr(1);
  binary<T, T, T>(t, "min." + kind, [](T x, T y) { return x < y ? x : y; });
  binary<T, T, T>(t, "max." + kind, [](T x, T y) { return x > y ? x : y; });
  binary<T, T, u32>(t, "shr." + shift, [](T x, u32 y) {
    if constexpr (is_signed) return static_cast<T>(x >> (y > top ? top : y));
    return y > top ? T(0) : static_cast<T>(x >> (y & top));
  });
  binary<T, T, T>(t, "div." + kind, [](T x, T y) {
    if (y == 0) return static_cast<T>(-1);
    if (is_signed && y == static_cast<T>(-1)) return static_cast<T>(U(0) - U(x));
    return static_cast<T>(x / y);
  });
  binary<T, T, T>(t, "rem." + kind, [](T x, T y) {
    if (y == 0) return x;
    if (is_signed && y == static_cast<T>(-1)) return static_cast<T>(0);
    return static_cast<T>(x % y);
  });
  if constexpr (is_signed) {
    unary<T, T>(t, "neg." + kind, [](T x) { return static_cast<T>(U(0) - U(x)); });
    unary<T, T>(t, "abs." + kind, [](T x) { return x < 0 ? static_cast<T>(U(0) - U(x)) : x; });
  }
  compare<T>(t, "setp.eq." + kind, [](T x, T y) { return x == y; });
  compare<T>(t, "setp.ne." + kind, [](T x, T y) { return x != y; });
  compare<T>(t, "setp.lt." + kind, [](T x, T y) { return x < y; });
  compare<T>(t, "setp.le." + kind, [](T x, T y) { return x <= y; });
  compare<T>(t, "setp.gt." + kind, [](T x, T y) { return x > y; });
  compare<T>(t, "setp.ge." + kind, [](T x, T y) { return x >= y; });
}

template <class Wide, class T>
void widening(Table& t, const std::string& kind) {
  using U = std::make_unsigned_t<Wide>;
  binary<Wide, T, T>(t, "mul.wide." + kind, [](T x, T y) { return static_cast<Wide>(Wide(x) * Wide(y)); });
  ternary<Wide, T, T, Wide>(t, "mad.wide." + kind, [](T x, T y, Wide z) {
    return static_cast<Wide>(U(Wide(x) * Wide(y)) + U(z));
  });
  if constexpr (sizeof(T) == 4) {
    binary<T, T, T>(t, "mul.hi." + kind, [](T x, T y) { return static_cast<T>((Wide(x) * Wide(y)) >> 32); });
  }
}

}  // namespace

void add_integers(Table& t) {
  of_width<u16>(t, "16");
  of_width<u32>(t, "32");
  of_width<u64>(t, "64");
  ordered<s16>(t, "s16");
  ordered<u16>(t, "u16");
  ordered<s32>(t, "s32");
  ordered<u32>(t, "u32");
  ordered<s64>(t, "s64");
  // .relu, from sm_90 on: a negative result becomes 0.
  binary<s32, s32, s32>(t, "min.relu.s32", [](s32 x, s32 y) { return std::max(std::min(x, y), 0); });
  binary<s32, s32, s32>(t, "max.relu.s32", [](s32 x, s32 y) { return std::max(std::max(x, y), 0); });
  ordered<u64>(t, "u64");
  widening<s32, s16>(t, "s16");
  widening<u32, u16>(t, "u16");
  widening<s64, s32>(t, "s32");
  widening<u64, u32>(t, "u32");
  binary<u64, u64, u64>(t, "mul.hi.u64", [](u64 x, u64 y) { return u64((unsigned __int128)x * y >> 64); });
  binary<s64, s64, s64>(t, "mul.hi.s64", [](s64 x, s64 y) { return s64((__int128)x * y >> 64); });
  ternary<u32, u32, u32, u32>(t, "bfe.u32", [](u32 a, u32 p, u32 n) { return field_u32(a, p, n); });
  ternary<s32, s32, u32, u32>(t, "bfe.s32", [](s32 a, u32 p, u32 n) { return field_s32(a, p, n); });
  unary<u32, u32>(t, "popc.b32", [](u32 x) { return u32(__builtin_popcount(x)); });
  unary<u32, u64>(t, "popc.b64", [](u64 x) { return u32(__builtin_popcountll(x)); });
  unary<u32, u32>(t, "clz.b32", [](u32 x) { return x ? u32(__builtin_clz(x)) : 32u; });
  unary<u32, u32>(t, "brev.b32", [](u32 x) { return reversed(x); });
  unary<u32, u32>(t, "bfind.u32", [](u32 x) { return x ? u32(31 - __builtin_clz(x)) : ~0u; });
  ternary<s32, u32, u32, s32>(t, "dp4a.s32.s32", [](u32 x, u32 y, s32 z) { return dot_bytes<s8, s8>(x, y, z); });
  ternary<s32, u32, u32, s32>(t, "dp4a.u32.u32", [](u32 x, u32 y, s32 z) { return dot_bytes<u8, u8>(x, y, z); });
  struct Insert {
    u32 operator()(u32 a, u32 b, u32 p, u32 n) const { return inserted(a, b, p, n); }
  };
  t.add("bfi.b32", Each<Insert, u32, u32, u32, u32, u32>::step);
  struct Funnel {
    u32 operator()(u32 a, u32 b, u32 n) const { return u32((u64(b) << 32 | a) << (n & 31) >> 32); }
  };
  t.add("shf.l.wrap.b32", Each<Funnel, u32, u32, u32, u32>::step);
  struct FunnelRight {
    u32 operator()(u32 a, u32 b, u32 n) const { return u32((u64(b) << 32 | a) >> (n & 31)); }
  };
  t.add("shf.r.wrap.b32", Each<FunnelRight, u32, u32, u32, u32>::step);
  t.add("prmt.b32", permute);
  t.add("pack.b32", pack<u32, u16>);
  t.add("pack.b64", pack<u64, u32>);
  t.add("unpack.b32", unpack<u32, u16>);
  t.add("unpack.b64", unpack<u64, u32>);
  add_on_predicates(t, "mov.pred", [](u32 x, u32) { return x; });
  add_on_predicates(t, "not.pred", [](u32 x, u32) { return ~x; });
  add_on_predicates(t, "and.pred", [](u32 x, u32 y) { return x & y; });
  add_on_predicates(t, "or.pred", [](u32 x, u32 y) { return x | y; });
  add_on_predicates(t, "xor.pred", [](u32 x, u32 y) { return x ^ y; });
}
