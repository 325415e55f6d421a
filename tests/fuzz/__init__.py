"""Random calls of every operation against the definition: on the CPU with every instruction set of this machine, with
--interpreted also in Triton's interpreter.

    python -m tests.fuzz --minutes 10 --processes 2          make fuzz MINUTES=10
    python -m tests.fuzz --case '{"op": "kwta", ...}'        repeats one case, as a failure prints it

A case is a `Spec`: plain values by name, which determine all tensors. operations.py draws a random spec, check.py runs,
compares and minimises it, values.py makes its tensors.
"""
