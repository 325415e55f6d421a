// From Python's numbers to a launcher's words. Only the two module.cpp files include this.
#pragma once

#include <pybind11/pybind11.h>

#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "moe/launcher.h"

namespace moe {

// Python passes a pointer, a stream included, as an integer.
inline std::vector<uint64_t> words_of(const char* name, const char* types, const pybind11::args& args) {
  const size_t count = std::strlen(types);
  if (args.size() != count)
    throw pybind11::type_error(std::string(name) + ": expected " + std::to_string(count) + " arguments, got " +
                               std::to_string(args.size()));
  std::vector<uint64_t> words(count);
  for (size_t i = 0; i < count; ++i) {
    PyObject* given = PyTuple_GET_ITEM(args.ptr(), i);
    if (types[i] == 'd' || types[i] == 'f') {
      const double value = PyFloat_AsDouble(given);
      const float narrow = float(value);
      if (types[i] == 'd') std::memcpy(&words[i], &value, sizeof value);
      else std::memcpy(&words[i], &narrow, sizeof narrow);
    } else {
      const long long value = PyLong_AsLongLong(given);
      if (types[i] == 'i' && value != int(value))
        throw pybind11::type_error(std::string(name) + ": argument " + std::to_string(i) + " is no 32-bit integer: " +
                                   std::to_string(value));
      words[i] = uint64_t(value);
    }
    if (PyErr_Occurred()) throw pybind11::error_already_set();
  }
  return words;
}

}  // namespace moe
