// Element types of the CPU kernels, as template arguments F. F::Key is a signed integer with the size of an element,
// and F::Wide the type of the computation. Kernels read the bits of an element as an F::Key. The key of an element
// (key_of) is an F::Key too; keys are ordered as the values are.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "moe/common/dtypes.h"

namespace moe {
namespace MOE_ISA {

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits_as: sizes differ");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// widen converts bits to a value, exactly; narrow converts a value to bits, rounded to nearest even. Both keep NaN.
// decode and encode are for values >= 0 that are not NaN. encode need not round to nearest.
struct Float32 {
  using Key = int32_t;
  using Wide = float;
  static constexpr Key inf = 0x7f800000;
  static Wide decode(Key magnitude) { return bits_as<Wide>(magnitude); }
  static Key encode(Wide magnitude) { return bits_as<Key>(magnitude); }
  static Wide widen(Key bits) { return bits_as<Wide>(bits); }
  static Key narrow(Wide value) { return bits_as<Key>(value); }
};

struct Float64 {
  using Key = int64_t;
  using Wide = double;
  static constexpr Key inf = 0x7ff0000000000000;
  static Wide decode(Key magnitude) { return bits_as<Wide>(magnitude); }
  static Key encode(Wide magnitude) { return bits_as<Key>(magnitude); }
  static Wide widen(Key bits) { return bits_as<Wide>(bits); }
  static Key narrow(Wide value) { return bits_as<Key>(value); }
};

struct BFloat16 {
  using Key = int16_t;
  using Wide = float;
  static constexpr Key inf = 0x7f80;
  static Wide decode(Key magnitude) { return widen(magnitude); }
  static Key encode(Wide magnitude) { return Key(bits_as<int32_t>(magnitude) >> 16); }
  static Wide widen(Key bits) { return bits_as<Wide>(uint32_t(uint16_t(bits)) << 16); }
  static Key narrow(Wide value) {
    const uint32_t bits = bits_as<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return Key((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
  }
};

struct Float16 {
  using Key = int16_t;
  using Wide = float;
  static constexpr Key inf = 0x7c00;
  // The exponent's bias is larger by 112 in a float. The product is exact, also for subnormal numbers; inf gives 65536.
  static Wide decode(Key magnitude) { return bits_as<float>(int32_t(magnitude) << 13) * 0x1p112f; }
  static Key encode(Wide magnitude) {
    return Key(bits_as<int32_t>(std::min(magnitude, 65536.0f) * 0x1p-112f) >> 13);
  }
  static Wide widen(Key bits) {
    const uint32_t magnitude = uint32_t(bits) & 0x7fff, sign = (uint32_t(bits) & 0x8000) << 16;
    const uint32_t finite = bits_as<uint32_t>(decode(Key(magnitude)));
    return bits_as<float>((magnitude < 0x7c00 ? finite : magnitude << 13 | 0x7f800000) | sign);
  }
  static Key narrow(Wide value) {
    const uint32_t bits = bits_as<uint32_t>(value), magnitude = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    // Below 2^-14, the last place of a float16 is 2^-24, as is that of a float in [0.5, 1): adding 0.5 rounds. From
    // 2^-14 on, adding 0xfff and the lowest bit that is kept rounds to nearest even.
    const uint32_t small = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    const uint32_t rounded = magnitude < 0x38800000 ? small : normal;
    const uint32_t finite = magnitude < 0x477ff000 ? rounded : 0x7c00;  // 65520 is the least value that rounds to inf
    return Key(sign | (magnitude > 0x7f800000 ? 0x7e00 | (magnitude >> 13 & 0x3ff) : finite));
  }
};

// The key of an element: its bits without the sign, negated for a negative value. NaN has the key inf + 1.
template <class F>
inline typename F::Key key_of(typename F::Key bits) {
  using Key = typename F::Key;
  const Key magnitude = bits & std::numeric_limits<Key>::max();
  const Key mirrored = bits < 0 ? Key(-magnitude) : magnitude;
  return magnitude > F::inf ? Key(F::inf + 1) : mirrored;
}

// The value of a key that is not NaN's; +-65536 for float16's +-inf.
template <class F>
inline typename F::Wide value_of(typename F::Key key) {
  using Key = typename F::Key;
  using Bits = std::conditional_t<sizeof(typename F::Wide) == 8, int64_t, int32_t>;
  const Key sign = key >> (8 * sizeof(Key) - 1);
  const Bits size = bits_as<Bits>(F::decode(Key((key ^ sign) - sign)));
  return bits_as<typename F::Wide>(Bits(size | (Bits(sign) & std::numeric_limits<Bits>::min())));
}

// The value of a key, or 0 if the value is not finite.
template <class F>
inline typename F::Wide finite_or_zero(typename F::Key key) {
  using Key = typename F::Key;
  using Unsigned = std::make_unsigned_t<Key>;
  const Key sign = key >> (8 * sizeof(Key) - 1), magnitude = Key((key ^ sign) - sign);
  return Unsigned(magnitude) < Unsigned(F::inf) ? value_of<F>(key) : typename F::Wide(0);
}

// The key of a value, rounded to the format as encode does.
template <class F>
inline typename F::Key key_near(typename F::Wide value) {
  using Key = typename F::Key;
  const Key sign = -Key(std::signbit(value));
  return Key((F::encode(std::abs(value)) ^ sign) - sign);
}

template <class Work>
inline void with_format(int dtype, Work work) {
  switch (DType(dtype)) {
    case DType::float32: return work(Float32());
    case DType::bfloat16: return work(BFloat16());
    case DType::float16: return work(Float16());
    case DType::float64: return work(Float64());
  }
}

}  // namespace MOE_ISA
}  // namespace moe
