"""Calls of the two C++ backends: each allocates the outputs and calls the C++ function.

The first argument of a function, `native`, is the backend's module: backends/cpu.py or backends/cuda.py. Schemas in
library/<op>.py state the types of the other arguments. `native.call(name, work, ...)` calls the C++ function `name`,
declared in csrc/cpu/ops.h and csrc/cuda/ops.h. Its arguments are numbers, dtypes, and arrays. An array is a tuple
(tensor or None, dtype, rank); the tensor is checked, and its address is passed.
"""
