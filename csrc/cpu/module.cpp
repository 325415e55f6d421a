// moe_kernels._cpu: the CPU kernels, each taking the index of an instruction set before its own arguments.

#include "call.h"
#include "look.h"
#include "ops.h"

namespace py = pybind11;

namespace {

#if defined(__x86_64__)
#define EACH_ISA(op) moe::launcher<moe::base::op>, moe::launcher<moe::avx2::op>, moe::launcher<moe::avx512::op>
#else
#define EACH_ISA(op) moe::launcher<moe::base::op>
#endif

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
#if defined(__x86_64__)
  m.attr("on_amd") = bool(__builtin_cpu_is("amd"));
  m.attr("multiplies_pairs") = bool(__builtin_cpu_supports("avx512bf16"));  // those of moe/pairs.h
#else
  m.attr("on_amd") = m.attr("multiplies_pairs") = false;
#endif
  m.def("read_tensors_by", &moe::Tensors::read_by);
  static PyMethodDef look = moe::fast("look", moe::Looks::look);
  m.attr("look") = moe::fast_function(&look, nullptr);
#define BIND(op) moe::bind(m, #op, {EACH_ISA(op)});
  MOE_CPU_OPS(BIND)
#undef BIND
}
