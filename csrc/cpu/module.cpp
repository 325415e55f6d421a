// moe_kernels._cpu: the CPU kernels, each taking the index of an instruction set before its own arguments.

#include "look.h"
#include "moe/bind.h"
#include "ops.h"

#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

#if defined(__x86_64__)
#define EACH_ISA(op) moe::launcher<moe::base::op>, moe::launcher<moe::avx2::op>, moe::launcher<moe::avx512::op>
#else
#define EACH_ISA(op) moe::launcher<moe::base::op>
#endif

void bind(py::module_& m, const char* name, std::vector<moe::Launcher> by_isa) {
  m.def(name, [name, by_isa = std::move(by_isa)](int isa, const py::args& args) {
    const moe::Launcher& launcher = by_isa.at(isa);
    const auto words = moe::words_of(name, launcher.types, args);
    py::gil_scoped_release unlocked;
    return launcher.call(words.data());
  });
}

// From narrow to wide; the flags are those of setup.py.
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

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  m.attr("isas") = available_isas();
  m.def("read_tensors_by", &moe::Looks::read_by);
  // Past pybind11, which packs arguments into a tuple.
  static PyMethodDef look = {"look", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(moe::Looks::look)),
                             METH_FASTCALL, nullptr};
  m.add_object("look", PyCFunction_New(&look, nullptr));
#define BIND(op) bind(m, #op, {EACH_ISA(op)});
  MOE_CPU_OPS(BIND)
#undef BIND
}
