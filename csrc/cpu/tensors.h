// Tensors read without Python's help, through DLPack's C exchange interface (version 1.3: github.com/dmlc/dlpack), of which
// torch's type holds a table of functions; what stands here of it is what is read, in its order.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace moe {

struct DLTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};

struct DLPackExchange {
  uint32_t major, minor;
  void* older;
  void *allocate, *managed_from_python, *managed_to_python;
  int (*tensor_from_python)(void* object, DLTensor* out);
};

class Tensors {
 public:
  // Reads objects whose type is one of `types` by the interface in `capsule`.
  static void read_by(const pybind11::capsule& capsule, const pybind11::tuple& types) {
    const auto* table = static_cast<const DLPackExchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (table == nullptr) throw pybind11::error_already_set();
    if (table->major != 1) throw pybind11::import_error("moe_kernels: DLPack's exchange interface is not version 1");
    from_python_ = table->tensor_from_python;
    types_ = types.inc_ref().ptr();
  }

  // False, and no error is set, where the object is of no such type, not strided, or on a device that DLPack does not know.
  static bool read(PyObject* object, DLTensor* out) {
    if (types_ == nullptr) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types_); ++i) {
      if (PyTuple_GET_ITEM(types_, i) != reinterpret_cast<PyObject*>(Py_TYPE(object))) continue;
      if (from_python_(object, out) == 0) return true;
      PyErr_Clear();
      return false;
    }
    return false;
  }

 private:
  static inline int (*from_python_)(void*, DLTensor*) = nullptr;
  static inline PyObject* types_ = nullptr;  // held for ever
};

}  // namespace moe
