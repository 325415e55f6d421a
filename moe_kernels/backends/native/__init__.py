"""Code of the two C++ backends: allocates outputs, takes addresses, calls the launcher of the same name.

The first argument of a function is the backend (backends/cpu.py or backends/cuda.py), the others are those of the
operator in library/<op>.py, whose schema states their types.
"""
