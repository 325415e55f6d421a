"""The small cases of moe_kernels.verify launch every Triton kernel of the plans, of sinkhorn and of tree_gate."""

from __future__ import annotations

import importlib

import numpy
import pytest
import torch

from tests.ptx.summary import triton_kernels

pytest.importorskip("triton", reason="Triton is not installed")

from moe_kernels import backends
from moe_kernels.verify import check

PLANS = ("make_plan", "plan_expert_choice", "plan_priority")


@pytest.mark.parametrize(
    "ops", [PLANS, ("sinkhorn",), ("tree_gate", "tree_route")], ids=["plan", "sinkhorn", "tree_gate"]
)
def test_every_kernel_is_launched(ops, monkeypatch):
    if (reason := backends.unsupported("triton", ops[0], "cpu", torch.bfloat16)) is not None:
        pytest.skip(reason)  # on a machine with a GPU, Triton takes no CPU tensors
    module = importlib.import_module(f"moe_kernels.backends.triton.{backends.file_of('triton', ops[0])}")
    launched = set()
    for name in ("kwta", "topk_gate", "plan", "dispatch", "combine", "sinkhorn", "tree_gate"):
        each = importlib.import_module(f"moe_kernels.backends.triton.{name}")
        launch = each.launch

        def record(kernel, *arguments, launch=launch, **named):
            launched.add(kernel.fn.__name__)
            launch(kernel, *arguments, **named)

        monkeypatch.setattr(each, "launch", record)
    dtypes = (torch.float32,) if ops == ("sinkhorn",) else (torch.float32, torch.bfloat16)
    verdicts = [check(op, "triton", dtype, "cpu", small=True) for op in ops for dtype in dtypes]
    assert {each.verdict for each in verdicts} == {"ok"}, verdicts
    assert launched >= {name for name in triton_kernels() if hasattr(module, name)}


def test_an_interpreter_that_cannot_loop_is_unsupported(monkeypatch):
    """In the interpreter of Triton 3.6 a loop bound is an array, which numpy 2.4 does not convert to an int."""
    from moe_kernels.backends import triton as kernels

    monkeypatch.setattr(kernels.triton, "__version__", "3.6.0")
    for version, refused in (("2.3.5", False), ("2.4.6", True)):
        monkeypatch.setattr(numpy, "__version__", version)
        monkeypatch.setattr(kernels.triton.knobs.runtime, "interpret", True)
        reason = kernels.unsupported("cpu", torch.float32, (torch.float32,))
        assert (reason is not None) == refused
        assert not refused or "numpy below 2.4" in reason
