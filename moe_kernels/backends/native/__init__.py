"""Code of the two C++ backends: allocates outputs, takes addresses, calls the launcher of the same name.

A function here gets the backend (backends/cpu.py or backends/cuda.py) as its first argument.
"""
