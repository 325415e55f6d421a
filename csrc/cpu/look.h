// What the tensors of a call look like, as bytes: dtype, shape, strides and device of each. Python takes 2 us for this when
// it is warm and 20 after a kernel that has emptied the caches.
//
// Tensors are read through DLPack's C exchange interface (version 1.3: github.com/dmlc/dlpack), of which torch's type holds
// a table of functions; what stands here of it is what is read, in its order.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>

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

class Looks {
 public:
  // Reads objects whose type is one of `types` by the interface in `capsule`.
  static void read_by(const pybind11::capsule& capsule, const pybind11::tuple& types) {
    const auto* table = static_cast<const DLPackExchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (table == nullptr) throw pybind11::error_already_set();
    if (table->major != 1) throw pybind11::import_error("moe_kernels: DLPack's exchange interface is not version 1");
    Looks& looks = instance();
    looks.from_python_ = table->tensor_from_python;
    looks.types_ = types.inc_ref().ptr();
  }

  // bytes, or None where an argument is neither None nor a strided tensor of those types, or has more dimensions than fit.
  static PyObject* look(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    Looks& looks = instance();
    looks.used_ = 0;
    for (Py_ssize_t i = 0; i < count; ++i)
      if (!looks.add(arguments[i])) Py_RETURN_NONE;
    return PyBytes_FromStringAndSize(looks.bytes_, Py_ssize_t(looks.used_));
  }

 private:
  static Looks& instance() {
    static Looks looks;  // under the GIL
    return looks;
  }

  bool add(PyObject* object) {
    if (object == Py_None) return append("-", 1);
    DLTensor tensor;
    if (!known(Py_TYPE(object))) return false;
    if (from_python_(object, &tensor) != 0) {  // not strided, or on a device that DLPack does not know
      PyErr_Clear();
      return false;
    }
    const int32_t head[] = {tensor.device_type, tensor.device_id, tensor.ndim, tensor.code << 8 | tensor.bits};
    const size_t size = size_t(tensor.ndim) * sizeof(int64_t);
    return append(head, sizeof head) && append(tensor.shape, size) && append(tensor.strides, size);
  }

  bool known(PyTypeObject* type) const {
    if (types_ == nullptr) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types_); ++i)
      if (PyTuple_GET_ITEM(types_, i) == reinterpret_cast<PyObject*>(type)) return true;
    return false;
  }

  bool append(const void* from, size_t size) {
    if (used_ + size > sizeof bytes_) return false;
    std::memcpy(bytes_ + used_, from, size);
    used_ += size;
    return true;
  }

  int (*from_python_)(void*, DLTensor*) = nullptr;
  PyObject* types_ = nullptr;  // held for ever
  char bytes_[1024];
  size_t used_ = 0;
};

}  // namespace moe
