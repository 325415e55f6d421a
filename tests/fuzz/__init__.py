"""Random calls of every operation, on every backend that runs here, against the definition.

    python -m tests.fuzz --minutes 10 --processes 2          make fuzz MINUTES=10
    python -m tests.fuzz --case '{"op": "kwta", ...}'        one case again, as a failure prints it

A case is a `Spec`: plain values by name, from which all tensors follow. operations.py draws a spec and runs it,
check.py compares and minimises, values.py makes tensors of a kind and a layout.
"""
