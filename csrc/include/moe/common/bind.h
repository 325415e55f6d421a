// Packs the arguments of a call from Python for a launcher (launcher.h).
#pragma once

#include <pybind11/pybind11.h>

#include <cstring>
#include <string>
#include <vector>

#include "moe/common/launcher.h"

namespace moe {

// Returns one uint64_t for each argument. `types` has their letters: d double, f float, p pointer, i int, l int64_t.
// pointer(object) converts the arguments of letter p.
template <class Pointer>
std::vector<uint64_t> pack_arguments(const char* name, const char* types, PyObject* const* given, size_t given_count,
                                     Pointer pointer) {
  const size_t count = std::strlen(types);
  if (given_count != count)
    throw pybind11::type_error(std::string(name) + ": expected " + std::to_string(count) + " arguments, got " +
                               std::to_string(given_count));
  std::vector<uint64_t> packed(count);
  for (size_t i = 0; i < count; ++i) {
    if (types[i] == 'd' || types[i] == 'f') {
      const double value = PyFloat_AsDouble(given[i]);
      const float narrow = float(value);
      if (types[i] == 'd') std::memcpy(&packed[i], &value, sizeof value);
      else std::memcpy(&packed[i], &narrow, sizeof narrow);
    } else if (types[i] == 'p') {
      packed[i] = pointer(given[i]);
    } else {
      const long long value = PyLong_AsLongLong(given[i]);
      if (types[i] == 'i' && value != int(value))
        throw pybind11::type_error(std::string(name) + ": argument " + std::to_string(i) +
                                   " must be a 32-bit integer, got " + std::to_string(value));
      packed[i] = uint64_t(value);
    }
    if (PyErr_Occurred()) throw pybind11::error_already_set();
  }
  return packed;
}

// Converts a pointer or a stream, which Python passes as an integer.
inline uint64_t address(PyObject* given) { return uint64_t(PyLong_AsLongLong(given)); }

}  // namespace moe
