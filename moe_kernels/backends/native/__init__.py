"""What the two C++ backends share: outputs allocated, addresses taken, the launcher of the same name called.

A function here gets the backend (backends/cpu.py or backends/cuda.py) as its first argument.
"""
