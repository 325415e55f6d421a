"""Every registered operator, called directly with wrong arguments, raises an error that names the argument or returns
what the definition says.

tests/helpers/operators makes the calls; `python -m tests.fuzz --operators` makes many more.
"""

from __future__ import annotations

import ctypes

import pytest

from tests.helpers.operators import gpu, pool
from tests.helpers.operators.cases import OPERATORS, cases, report, schema_of
from tests.helpers.operators.judge import every_operator
from tests.helpers.targets import HAS_GPU


@pytest.mark.parametrize("name", every_operator())
def test_wrong_arguments_are_refused(name):
    assert name in OPERATORS, f"{name} has no honest call: add it to tests/helpers/operators"
    given = cases(name)
    found = pool.run([each.fault for each in given])
    faults = sum(each is not None for each in found)
    assert not faults, f"{faults} of {len(given)} calls:\n{report(given, found)}"


def test_every_argument_is_described():
    """An argument that tests/helpers/operators does not know would not be tested."""
    unknown = []
    for name in every_operator():
        operator = OPERATORS[name]
        known = {*operator.tensors, *operator.ints, *operator.floats, *operator.choices, *operator.flags, "backend"}
        known |= {each for each, kind in schema_of(name).kinds.items() if kind == "bool"}
        unknown += [f"{name}.{each}" for each in schema_of(name).kinds if each not in known | operator.free]
    assert not unknown


@pytest.mark.skipif(HAS_GPU, reason="here these backends take CUDA tensors alone")
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("name", [name for name in every_operator() if "backend" in schema_of(name).kinds])
def test_gpu_backends_refuse_what_the_cpu_refuses(name, backend):
    if reason := gpu.missing(backend):
        pytest.skip(reason)
    given = gpu.wrong_calls(name) if gpu.implemented(name, backend) else []
    found = pool.run([lambda each=each: gpu.fault(each, backend) for each in given])
    faults = sum(each is not None for each in found)
    assert not faults, f"{faults} of {len(given)} calls:\n{report(given, found)}"


def test_a_crash_and_an_endless_loop_are_outcomes():
    def crash() -> None:
        ctypes.string_at(8)

    def endless() -> None:
        while True:
            pass

    found = pool.run([lambda: "first", crash, lambda: None, endless, lambda: "last"], seconds=1)
    assert found == ["first", "crash: SIGSEGV", None, "no return within 1 s", "last"]
