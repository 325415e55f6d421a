// From Python's integers to a kernel's arguments. Only the two module.cpp files include this.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace moe {

// Python passes a pointer, a stream included, as an integer.
template <class T>
struct Wire {
  using type = T;
  static T unpack(T value) { return value; }
};

template <class T>
struct Wire<T*> {
  using type = std::uintptr_t;
  static T* unpack(std::uintptr_t address) { return reinterpret_cast<T*>(address); }
};

}  // namespace moe
