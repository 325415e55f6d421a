// Conversions, with the names cvt.<to>.<from> and cvt.<rounding or sat>.<to>.<from>. Without a rounding in the name,
// results in floating point round to nearest even.
#include <tuple>
#include <type_traits>

#include "elementwise.h"
#include "numbers.h"

namespace {

// The type of a register that holds a T; a byte is in a register of 16 bits.
template <class T>
using Register = std::conditional_t<sizeof(T) == 1, std::conditional_t<std::is_signed_v<T>, s16, u16>, T>;

template <class To, class From>
void integer(Table& t, const std::string& to, const std::string& from) {
  using D = Register<To>;
  using S = Register<From>;
  unary<D, S>(t, "cvt." + to + "." + from, [](S x) { return static_cast<D>(static_cast<To>(static_cast<From>(x))); });
}

template <class From>
void from_integer(Table& t, const std::string& from) {
  integer<s8, From>(t, "s8", from);
  integer<u8, From>(t, "u8", from);
  integer<s16, From>(t, "s16", from);
  integer<u16, From>(t, "u16", from);
  integer<s32, From>(t, "s32", from);
  integer<u32, From>(t, "u32", from);
  integer<s64, From>(t, "s64", from);
  integer<u64, From>(t, "u64", from);
  using S = Register<From>;
  unary<f32, S>(t, "cvt.f32." + from, [](S x) { return static_cast<f32>(static_cast<From>(x)); });
  unary<f64, S>(t, "cvt.f64." + from, [](S x) { return static_cast<f64>(static_cast<From>(x)); });
}

template <class To>
void to_integer(Table& t, const std::string& to) {
  unary<To, f32>(t, "cvt.rzi." + to + ".f32", [](f32 x) { return saturated<To>(std::trunc(x)); });
  unary<To, f32>(t, "cvt.rni." + to + ".f32", [](f32 x) { return saturated<To>(std::nearbyint(x)); });
  unary<To, f64>(t, "cvt.rzi." + to + ".f64", [](f64 x) { return saturated<To>(std::trunc(x)); });
  unary<To, f64>(t, "cvt.rni." + to + ".f64", [](f64 x) { return saturated<To>(std::nearbyint(x)); });
}

// Rounds two floats into the halves of a register, the first source into the upper half.
template <class Round>
struct Pair {
  static Next step(Launch& launch, Block&, Warp& warp, const Record& record, u32 mask) {
    u32* to = lanes_of<u32>(launch, warp, record, 0);
    const f32* high = lanes_of<const f32>(launch, warp, record, 1);
    const f32* low = lanes_of<const f32>(launch, warp, record, 2);
    const u64 of_high = undefined_lanes(launch, warp, record, 1), of_low = undefined_lanes(launch, warp, record, 2);
    for_lanes(mask, [&](u32 l) { to[l] = static_cast<u32>(Round{}(high[l])) << 16 | Round{}(low[l]); });
    const u64 undefined = (either(of_low) & kAll) | (either(of_high) & ~u64(kAll));
    set_undefined(undefined_lanes(launch, warp, record, 0), undefined, mask);
    return Next::following;
  }
};
template <class Round>
void pair(Table& t, const std::string& name, Round) {
  t.add(name, Pair<Round>::step);
}

}  // namespace

void add_conversions(Table& t) {
  from_integer<s8>(t, "s8");
  from_integer<u8>(t, "u8");
  from_integer<s16>(t, "s16");
  from_integer<u16>(t, "u16");
  from_integer<s32>(t, "s32");
  from_integer<u32>(t, "u32");
  from_integer<s64>(t, "s64");
  from_integer<u64>(t, "u64");
  to_integer<s32>(t, "s32");
  to_integer<u32>(t, "u32");
  to_integer<s64>(t, "s64");
  to_integer<u64>(t, "u64");
  unary<f32, f64>(t, "cvt.f32.f64", [](f64 x) { return static_cast<f32>(x); });
  unary<f64, f32>(t, "cvt.f64.f32", [](f32 x) { return static_cast<f64>(x); });
  unary<f32, f32>(t, "cvt.rni.f32.f32", [](f32 x) { return std::nearbyint(x); });
  unary<f32, f32>(t, "cvt.rmi.f32.f32", [](f32 x) { return std::floor(x); });
  unary<f32, f32>(t, "cvt.rpi.f32.f32", [](f32 x) { return std::ceil(x); });
  unary<f32, f32>(t, "cvt.rzi.f32.f32", [](f32 x) { return std::trunc(x); });
  unary<f32, f32>(t, "cvt.sat.f32.f32", [](f32 x) { return x != x || x < 0 ? 0.0f : x > 1 ? 1.0f : x; });
  unary<f32, u16>(t, "cvt.f32.bf16", [](u16 x) { return from_bf16(x); });
  unary<f32, u16>(t, "cvt.f32.f16", [](u16 x) { return from_f16(x); });
  unary<f64, u16>(t, "cvt.f64.bf16", [](u16 x) { return static_cast<f64>(from_bf16(x)); });
  unary<f64, u16>(t, "cvt.f64.f16", [](u16 x) { return static_cast<f64>(from_f16(x)); });
  unary<u16, f32>(t, "cvt.bf16.f32", [](f32 x) { return to_bf16(x); });
  unary<u16, f32>(t, "cvt.f16.f32", [](f32 x) { return to_f16(x); });
  unary<u16, f64>(t, "cvt.f16.f64", [](f64 x) { return x != x ? u16(0x7fff) : bits<u16>(static_cast<_Float16>(x)); });
  pair(t, "cvt.bf16x2.f32", [](f32 x) { return to_bf16(x); });
  pair(t, "cvt.f16x2.f32", [](f32 x) { return to_f16(x); });
}
