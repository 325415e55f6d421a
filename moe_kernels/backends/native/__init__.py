"""Calls of the two C++ backends: each allocates the outputs and calls the C++ function.

The first argument of a function, `native`, is the backend: backends/cpu.py or backends/cuda.py. The others are those of
the operator in library/<op>.py, whose schema states their types. `native.call(name, work, ...)` calls the C++ function
of that name, declared in csrc/cpu/ops.h and csrc/cuda/ops.h. An argument may be a number, a dtype, or an array: a tuple
(tensor or None, dtype, rank), which is checked and becomes an address.
"""
