// moe_kernels._cuda: the CUDA launchers, and what the driver offers.

#include <cuda_runtime_api.h>

#include <sstream>
#include <stdexcept>
#include <string>

#include "moe/bind.h"
#include "ops.h"

namespace py = pybind11;

namespace {

// A launcher's error becomes an exception that names the operation and its arguments, the shapes among them.
template <class... Args>
void bind(py::module_& m, const char* name, cudaError_t (*launcher)(Args...)) {
  m.def(name, [name, launcher](typename moe::Wire<Args>::type... args) {
    const cudaError_t status = launcher(moe::Wire<Args>::unpack(args)...);
    if (status == cudaSuccess) return;
    std::ostringstream message;
    message << name << ": " << cudaGetErrorString(status) << "; arguments";
    ((message << ' ' << args), ...);
    throw std::runtime_error(message.str());
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
#define BIND(op) bind(m, #op, moe::op);
  MOE_CUDA_OPS(BIND)
#undef BIND
}
