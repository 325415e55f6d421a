// The Python module moe_kernels._cuda: the launchers of ops.h, the versions of CUDA's runtime and driver, and the
// architectures for which the kernels are compiled.

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "moe/common/bind.h"
#include "ops.h"

namespace py = pybind11;

namespace {

void bind(py::module_& m, const char* name, const moe::Launcher& launcher) {
  m.def(name, [name, launcher](const py::args& args) {
    const auto arguments =
        moe::pack_arguments(name, launcher.types, PySequence_Fast_ITEMS(args.ptr()), args.size(), moe::address);
    // Releases the GIL: a launch waits while the device's queue is full, and a kernel in the queue may wait for what
    // another Python thread does (NCCL: pytorch issue 109074).
    const auto status = [&] {
      const py::gil_scoped_release release;
      return cudaError_t(launcher.call(arguments.data()));
    }();
    if (status != cudaSuccess)
      throw std::runtime_error(std::string(name) + ": " + cudaGetErrorString(status) + "; arguments " +
                               std::string(py::str(args)));
  });
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  m.attr("runtime_version") = CUDART_VERSION;
  m.attr("architectures") = MOE_CUDA_ARCHITECTURES;
  m.def("driver_version", [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
  });
#define BIND(op) bind(m, #op, moe::launcher<moe::op>);
  MOE_CUDA_OPS(BIND)
#undef BIND
}
