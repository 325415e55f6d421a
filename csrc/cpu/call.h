// A kernel as Python calls it: kernel(isa, ...) with numbers, addresses and tensors, of which it gets the address. Past
// pybind11, which packs arguments into a tuple, and without a Python call for every address: some 10 us a call where a
// kernel before has emptied the caches.
#pragma once

#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "moe/bind.h"
#include "tensors.h"

namespace moe {

// The address of a tensor, 0 of None, or what Python says is one.
inline uint64_t address_of(PyObject* given) {
  if (given == Py_None) return 0;
  if (PyLong_Check(given)) return address(given);
  DLTensor tensor;
  if (Tensors::read(given, &tensor)) return reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset;
  return pybind11::handle(given).attr("data_ptr")().cast<uint64_t>();
}

struct Kernel {
  std::string name;
  std::vector<Launcher> by_isa;
  PyMethodDef definition = {};

  PyObject* call(PyObject* const* given, size_t count) const {
    if (count == 0) throw pybind11::type_error(name + ": expected the index of an instruction set first");
    const Launcher& launcher = by_isa.at(pybind11::handle(given[0]).cast<size_t>());
    const auto words = words_of(name.c_str(), launcher.types, given + 1, count - 1, address_of);
    int found = 0;
    {
      pybind11::gil_scoped_release unlocked;
      found = launcher.call(words.data());
    }
    return PyLong_FromLong(found);
  }

  static PyObject* from_python(PyObject* self, PyObject* const* given, Py_ssize_t count) {
    try {
      return static_cast<const Kernel*>(PyCapsule_GetPointer(self, nullptr))->call(given, size_t(count));
    } catch (pybind11::error_already_set& error) {
      error.restore();
    } catch (const pybind11::builtin_exception& error) {
      error.set_error();
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
  }
};

// A function of Python's that gets its arguments as they are. `definition` and `self` are held for ever.
inline pybind11::object fast_function(PyMethodDef* definition, PyObject* self) {
  return pybind11::reinterpret_steal<pybind11::object>(PyCFunction_New(definition, self));
}

template <class Function>
PyMethodDef fast(const char* name, Function function) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, nullptr};
}

inline void bind(pybind11::module_& m, const char* name, std::vector<Launcher> by_isa) {
  auto* const kernel = new Kernel{name, std::move(by_isa)};  // as long as the module, which is never unloaded
  kernel->definition = fast(kernel->name.c_str(), Kernel::from_python);
  m.attr(name) = fast_function(&kernel->definition, PyCapsule_New(kernel, nullptr, nullptr));
}

}  // namespace moe
