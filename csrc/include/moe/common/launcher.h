// Wraps a function as a Launcher, which takes the arguments as an array of uint64_t. All launchers have one type, so
// that bindings to Python compile fast. An array element holds one argument: a pointer, an integer, the bits of a
// double, or the bits of a float in the low half.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace moe {

struct Launcher {
  int (*call)(const uint64_t* packed);  // returns the function's result, or 0 if the function is void
  const char* types;                    // a letter for each argument: p pointer, i int, l int64_t, f float, d double
};

template <class T>
T argument(uint64_t packed) {
  if constexpr (std::is_pointer_v<T>) return reinterpret_cast<T>(static_cast<uintptr_t>(packed));
  if constexpr (std::is_integral_v<T>) return static_cast<T>(packed);
  if constexpr (std::is_floating_point_v<T>) {
    T value;
    std::memcpy(&value, &packed, sizeof value);  // the machine is little-endian
    return value;
  }
}

template <class T>
constexpr char type_letter() {
  if constexpr (std::is_pointer_v<T>) return 'p';
  if constexpr (std::is_same_v<T, int>) return 'i';
  if constexpr (std::is_same_v<T, int64_t>) return 'l';
  if constexpr (std::is_same_v<T, float>) return 'f';
  if constexpr (std::is_same_v<T, double>) return 'd';
}

template <class... Arguments>
constexpr char kTypes[] = {type_letter<Arguments>()..., '\0'};

template <auto function>
struct Unpack;

template <class Result, class... Arguments, Result (*function)(Arguments...)>
struct Unpack<function> {
  template <size_t... i>
  static int apply(const uint64_t* packed, std::index_sequence<i...>) {
    if constexpr (std::is_void_v<Result>) {
      function(argument<Arguments>(packed[i])...);
      return 0;
    } else {
      return function(argument<Arguments>(packed[i])...);
    }
  }
  static int call(const uint64_t* packed) { return apply(packed, std::index_sequence_for<Arguments...>{}); }
};

template <class Result, class... Arguments>
constexpr const char* types_of(Result (*)(Arguments...)) {
  return kTypes<Arguments...>;
}

template <auto function>
constexpr Launcher launcher{Unpack<function>::call, types_of(function)};

}  // namespace moe
