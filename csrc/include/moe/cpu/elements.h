// Conversions of rows between a dtype chosen at run time and T, the type of the computation: double for float64, float
// for other dtypes.
#pragma once

#include <algorithm>
#include <type_traits>

#include "moe/cpu/formats.h"
#include "moe/cpu/pairs.h"

namespace moe {
namespace MOE_ISA {

constexpr int kPackRows = 12;  // a packed matrix is stored in blocks of this many rows (Left in tiles.h)

template <class T>
struct Elements {
  int64_t size;    // bytes of an element
  bool same_type;  // elements are of type T
  bool in_pairs;   // matrix products take two elements at a time, as AVX512-BF16 multiplies bfloat16 (pairs.h)

  // Row r of `to` (rows, count) becomes row r of `from` if `token` is null, else row token[r] of `from`, or zeros if
  // token[r] is -1. Rows of `from` are `stride` elements apart, rows of `to` are to_row elements apart.
  void (*widen)(T* to, int64_t to_row, const void* from, int64_t stride, const int32_t* token, int64_t rows,
                int64_t count);
  void (*add)(T* to, const void* from, int64_t count);  // to += from
  void (*narrow)(void* to, const T* from, int64_t count);

  const T* read(const void* from, T* room, int64_t count) const {
    if (same_type) return static_cast<const T*>(from);
    widen(room, count, from, 0, nullptr, 1, count);
    return room;
  }
};

// Calls work(i) for 0 <= i < count. The calls must not depend on one another.
template <class Work>
inline void each_element(int64_t count, Work work) {
  int64_t i = 0;
  const auto take_steps = [&](auto step) {
    for (; i + step <= count; i += step) {
#pragma omp simd
      for (int64_t j = i; j < i + step; ++j) work(j);
    }
  };
  take_steps(std::integral_constant<int64_t, 32>());
  take_steps(std::integral_constant<int64_t, 16>());
  take_steps(std::integral_constant<int64_t, 8>());
  take_steps(std::integral_constant<int64_t, 4>());
  for (; i < count; ++i) work(i);
}

template <class F>
void widen_block(typename F::Wide* to, int64_t to_row, const void* from, int64_t stride, const int32_t* token,
                 int64_t rows, int64_t count) {
  const auto each_row = [&](auto length) {
    typename F::Wide* target = to;
    for (int64_t r = 0; r < rows; ++r, target += to_row) {
      const int64_t row = token == nullptr ? r : token[r];
      const auto* source = static_cast<const typename F::Key*>(from) + row * stride;
      if (row < 0) std::fill(target, target + length, typename F::Wide(0));
      else each_element(length, [=](int64_t i) { target[i] = F::widen(source[i]); });
    }
  };
  if (count == kPackRows) each_row(std::integral_constant<int64_t, kPackRows>());
  else each_row(count);
}

template <class F>
void add_row(typename F::Wide* to, const void* from, int64_t count) {
  each_element(count, [=](int64_t i) { to[i] += F::widen(static_cast<const typename F::Key*>(from)[i]); });
}

template <class F>
void narrow_row(void* to, const typename F::Wide* from, int64_t count) {
  each_element(count, [=](int64_t i) { static_cast<typename F::Key*>(to)[i] = F::narrow(from[i]); });
}

// narrow_row for bfloat16, with the conversion of AVX512-BF16.
template <class F>
void narrow_row_at_once(void* to, const typename F::Wide* from, int64_t count) {
  if constexpr (kPairs<typename F::Wide>) narrow_to_bf16(to, from, count, narrow_row<F>);
}

// The conversions between `dtype` and T. T must be double for float64, and float for other dtypes, as in with_wide.
template <class T>
inline Elements<T> elements_of(int dtype) {
  Elements<T> found{};
  with_format(dtype, [&](auto format) {
    using F = decltype(format);
    if constexpr (std::is_same_v<typename F::Wide, T>) {
      const bool in_pairs = std::is_same_v<F, BFloat16> && multiplies_pairs();
      found = {sizeof(typename F::Key), sizeof(typename F::Key) == sizeof(T), in_pairs, widen_block<F>, add_row<F>,
               in_pairs ? narrow_row_at_once<F> : narrow_row<F>};
    }
  });
  return found;
}

template <class Work>
inline void with_wide(int dtype, Work work) {
  if (DType(dtype) == DType::float64) work(double());
  else work(float());
}

}  // namespace MOE_ISA
}  // namespace moe
