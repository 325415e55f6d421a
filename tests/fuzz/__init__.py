"""The fuzzer: random calls of the operations, compared with the definitions.

Calls use all CPU instruction sets of this machine. With --interpreted F a fraction F uses Triton's interpreter.

    python -m tests.fuzz --minutes 10 --processes 2
    python -m tests.fuzz --case '{"op": "kwta", ...}'        repeats one case; every failure prints this command

A case is a `Spec`: a dict of plain values that determines all tensors. operations.py draws a random spec, values.py
makes its tensors, check.py runs it, compares the outputs and minimises failing specs.
"""
