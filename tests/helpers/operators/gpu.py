"""The GPU backends on CPU tensors up to the start of a kernel, which raises `Started` instead.

No kernel is compiled, so neither nvcc nor a GPU is needed. Honest calls on these backends run in tests/ptx's executor
elsewhere (fixture `target`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from moe_kernels import backends
from tests.helpers.operators.cases import OPERATORS, Case, schema_of
from tests.helpers.operators.operator import Call
from tests.ptx.launchers import replace_module


class Started(BaseException):
    """A kernel was about to start."""


def _start(*args: Any, **named: Any) -> None:
    raise Started


class _Launchers:
    """In place of moe_kernels._cuda."""

    def announce(self, *tensors: torch.Tensor) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _start


@contextmanager
def on_cpu_tensors(backend: str) -> Iterator[None]:
    """In the block the backend takes CPU tensors and raises Started for each kernel."""
    with ExitStack() as stack:
        if backend == "triton":
            from triton.runtime.jit import JITFunction

            from tests.ptx import triton_launch

            triton_launch.install()
            stack.enter_context(patch.object(JITFunction, "run", _start))
        elif backend == "cuda":
            from moe_kernels.backends import cuda

            stack.enter_context(replace_module(cuda, _Launchers(), device_type="cpu"))
        yield


def _outcome(case: Case, call: Call, backend: str) -> str:
    with on_cpu_tensors(backend):
        try:
            schema_of(case.operator)(call | {"backend": backend})
        except Started:
            return "starts a kernel"
        except Exception as error:
            return f"raises {type(error).__name__}: {error}"
    return "returns"


def fault(case: Case, backend: str) -> str | None:
    """What is wrong with a call on a GPU backend: it must raise what it raises on the CPU, where other tests judge it,
    or else start a kernel."""
    call, _ = case.call()
    found = _outcome(case, call, backend)
    expected = _outcome(case, call, "cpu")
    if expected == "returns" and case.operator not in BY_TORCH:
        expected = "starts a kernel"
    return None if found == expected else f"{found}, but must as backend cpu: {expected}"


def implemented(name: str, backend: str) -> bool:
    return "backend" in schema_of(name).kinds and backend in OPERATORS[name].backends


def missing(backend: str) -> str | None:
    return backends.missing("triton", "kwta") if backend == "triton" else None


BY_TORCH = ("tree_gate_logits_bwd",)  # on a GPU PyTorch computes its products

# By the type of an argument in the schema, the changes that each backend must refuse.
WRONG = {
    "Tensor": ("one dimension more",),
    "Optional[Tensor]": ("one dimension more",),
    "int": ("-1",),
    "Optional[int]": ("-1",),
    "ScalarType": ("torch.int32",),
    "float": ("nan",),
    "str": ("'bogus'",),
    "List[bool]": ("[]",),
}


def wrong_calls(name: str) -> list[Case]:
    """An honest call, and it with one wrong value for each argument."""
    honest, call = next(iter(OPERATORS[name].honest(torch.float32).items()))
    found = [Case(name, "float32", honest)]
    for argument, kind in schema_of(name).kinds.items():
        if argument == "backend" or call[argument] is None:
            continue
        found += [Case(name, "float32", honest, ((argument, label),)) for label in WRONG.get(kind, ())]
        if argument in OPERATORS[name].index:
            found.append(Case(name, "float32", honest, ((argument, "last value above"),)))
    return found
