"""Compiled and exported programs, which call the operators without the checks of the public functions, refuse a plan
that does not fit with an error that names the operator and the argument."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

import moe_kernels as mk
from tests.helpers.operators import pool

T, E, K, D = 6, 3, 2, 8
Arguments = tuple[Tensor, mk.RoutingPlan, Tensor]
W_IN, W_OUT = torch.randn(E, D, 5), torch.randn(E, 5, D)


class Rows(torch.nn.Module):
    def forward(self, x: Tensor, plan: mk.RoutingPlan, weights: Tensor) -> Tensor:
        return mk.combine(torch.tanh(mk.dispatch(x, plan)), plan, weights)


class Experts(torch.nn.Module):
    def forward(self, x: Tensor, plan: mk.RoutingPlan, weights: Tensor) -> Tensor:
        return mk.expert_mlp(x, plan, W_IN, W_OUT, weights=weights)


def a_plan(tokens: int = T) -> mk.RoutingPlan:
    experts = torch.arange(tokens * K).view(tokens, K) % E
    return mk.make_plan(experts, E)


def arguments(plan: mk.RoutingPlan) -> Arguments:
    return torch.randn(T, D), plan, torch.rand(T, K)


def holding(name: str, place: int, value: int) -> mk.RoutingPlan:
    plan = a_plan()
    array = getattr(plan, name).clone()
    array.view(-1)[place] = value
    return replace(plan, **{name: array})


def shorter(name: str) -> mk.RoutingPlan:
    return replace(a_plan(), **{name: getattr(a_plan(), name)[:-1].contiguous()})


# By name: plans that do not fit T tokens. num_tokens is a constant of a program, so these plans keep it. First those
# with the sizes of the plan for which a program was compiled: after another's error in a new compilation torch.compile
# gives the program up, and compiles its functions, also those of operators, one by one.
PLANS: dict[str, Callable[[], mk.RoutingPlan]] = {
    "row_token edited": lambda: holding("row_token", 3, T),
    "row_token huge": lambda: holding("row_token", 3, 10**8),
    "slot_row edited": lambda: holding("slot_row", 3, T * K),
    "slot_row below": lambda: holding("slot_row", 3, -2),
    "expert_offsets past the end": lambda: holding("expert_offsets", -1, T * K + 1),
    "a used row that nobody fills": lambda: holding("slot_row", 3, -1),
    "a row that two choices fill": lambda: holding("slot_row", 3, 0),
    "of more tokens": lambda: replace(a_plan(T + 1), num_tokens=T),
    "of fewer tokens": lambda: replace(a_plan(T - 1), num_tokens=T),
    "row_token shorter": lambda: shorter("row_token"),
    "slot_row shorter": lambda: shorter("slot_row"),
    "expert_offsets empty": lambda: replace(a_plan(), expert_offsets=torch.empty(0, dtype=torch.int32)),
}


def compiled(module: torch.nn.Module, backend: str) -> Callable[..., Tensor]:
    torch._inductor.config.compile_threads = 1  # processes of its own would outlive this one
    program = torch.compile(module, backend=backend, dynamic=True)
    program(*arguments(a_plan()))
    return program


def exported(module: torch.nn.Module) -> Callable[..., Tensor]:
    plan, auto = a_plan(), torch.export.Dim.AUTO

    def dims(value: object) -> dict | None:
        return dict.fromkeys(range(value.dim()), auto) if isinstance(value, Tensor) else None

    shapes = {0: auto}, [dims(getattr(plan, each.name)) for each in fields(plan)], {0: auto, 1: auto}
    return torch.export.export(module, arguments(plan), dynamic_shapes=shapes, strict=False).module()


def outcome(program: Callable[..., Tensor], plan: mk.RoutingPlan) -> str:
    try:
        return f"returned {tuple(program(*arguments(plan)).shape)}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def outcomes(make: Callable[[], Callable[..., Tensor]]) -> list[str | None]:
    """What the program does with each plan, in a process that may crash. The program is compiled once."""
    program: list[Callable[..., Tensor]] = []

    def task(name: str) -> str:
        if not program:
            program.append(make())
        return outcome(program[0], PLANS[name]())

    return pool.run([lambda name=name: task(name) for name in PLANS], seconds=120)


ARRAYS = "row_token|slot_row|expert_offsets|row_choice"
OPERATORS = "(dispatch|combine|expert_mlp)(_fwd)?"
NAMED = rf"^(ValueError|TypeError|RuntimeError|BackendError): {OPERATORS}: .*\b({ARRAYS}|x|weights)\b"
GUARD = r"^AssertionError: Guard failed: "  # torch's own refusal, before any operator runs


@pytest.mark.parametrize(
    ("module", "how"),
    [(Rows, "aot_eager"), (Rows, "export"), (Experts, "aot_eager"), (Experts, "export"), (Rows, "inductor")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_program_refuses_plans_that_do_not_fit(module, how):
    made = exported if how == "export" else lambda given: compiled(given, how)
    found = outcomes(lambda: made(module()))
    wrong = [
        f"a plan {name}: {each}"
        for name, each in zip(PLANS, found, strict=True)
        if not re.match(f"{NAMED}|{GUARD}", each)
    ]
    assert not wrong, "\n".join(wrong)


def test_onnx_export_is_refused_by_name(monkeypatch):
    """torch's exporter would end in a DispatchError, and does so for the sort of the definitions, too."""
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    for backend in (None, "reference"):
        with pytest.raises(mk.BackendError, match=r"topk_gate: ONNX export is not supported.*use torch.export"):
            mk.topk_gate(torch.randn(3, 4), 2, backend=backend)
