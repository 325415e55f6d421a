// The Python module moe_kernels._cpu: the functions of ops.h. Each takes two arguments before those of ops.h: the index
// of an instruction set in the module's tuple `isas`, and whether to release the GIL.

#include <optional>
#include <string>
#include <vector>

#include "moe/common/bind.h"
#include "ops.h"

namespace py = pybind11;

namespace {

#if defined(__x86_64__)
#define EACH_ISA(op) moe::launcher<moe::base::op>, moe::launcher<moe::avx2::op>, moe::launcher<moe::avx512::op>
#else
#define EACH_ISA(op) moe::launcher<moe::base::op>
#endif

// The instruction sets of setup.py (ISAS) that this processor supports, from narrow to wide.
py::tuple available_isas() {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512) return py::make_tuple("base", "avx2", "avx512");
  if (avx2) return py::make_tuple("base", "avx2");
#endif
  return py::make_tuple("base");
}

void bind(py::module_& m, const char* name, const std::vector<moe::Launcher>& by_isa) {
  m.def(name, [name, by_isa](size_t isa, bool release, const py::args& args) {
    const moe::Launcher& launcher = by_isa.at(isa);
    const auto arguments =
        moe::pack_arguments(name, launcher.types, PySequence_Fast_ITEMS(args.ptr()), args.size(), moe::address);
    // Short calls keep the GIL: taking it back from another thread may take sys.getswitchinterval(), 5 ms by default.
    const auto released = release ? std::make_optional<py::gil_scoped_release>() : std::nullopt;
    return launcher.call(arguments.data());
  });
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  m.attr("isas") = available_isas();
#define BIND(op) bind(m, #op, {EACH_ISA(op)});
  MOE_CPU_OPS(BIND)
#undef BIND
}
