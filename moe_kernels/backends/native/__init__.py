"""Code of the two C++ backends: allocates outputs, takes addresses, calls the launcher of the same name.

The first argument of a function, `native`, is the backend: backends/cpu.py or backends/cuda.py. The others are those of
the operator in library/<op>.py, whose schema states their types. `native.launch(name, work, ...)` calls the C++
function of that name; csrc/cpu/ops.h and csrc/cuda/ops.h declare its arguments.
"""
