"""Operations refuse plans whose arrays have a wrong dtype, shape or stride, or indices out of range."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import moe_kernels as mk
import moe_kernels.plan

EXPERTS = torch.tensor([[0, 1], [1, 2], [0, 2], [1, 0], [2, 1], [0, 1]])
TOKENS, ROWS = 6, 12
X, SLOTS = torch.randn(TOKENS, 4), torch.randn(ROWS, 4)
ARRAYS = ("expert_offsets", "row_token", "row_choice", "slot_row", "requested", "kept", "dropped")
EACH = pytest.mark.parametrize("backend", ["cpu", "reference"])


def plan() -> mk.RoutingPlan:
    return mk.make_plan(EXPERTS, 3)


def holding(name: str, value: int) -> mk.RoutingPlan:
    """The plan with `value` as the last element of its array `name`."""
    array = getattr(plan(), name).clone()
    array.view(-1)[-1] = value
    return replace(plan(), **{name: array})


def expert_mlp(made: mk.RoutingPlan, backend: str) -> Tensor:
    w_in, w_out = torch.randn(3, 4, 8), torch.randn(3, 8, 4)
    return mk.expert_mlp(X, made, w_in, w_out, weights=None, backend=backend)


OPS: dict[str, Callable[[mk.RoutingPlan, str], Tensor]] = {
    "dispatch": lambda made, backend: mk.dispatch(X, made, backend=backend),
    "combine": lambda made, backend: mk.combine(SLOTS, made, backend=backend),
    "expert_mlp": expert_mlp,
}
OFFSETS = "expert_offsets must rise from 0 to at most R = 12"
TOKEN, SLOT = r"row_token must be from -1 \(no token\) to 5", r"slot_row must be from -1 \(no row\) to 11"


@EACH
@pytest.mark.parametrize(
    ("op", "name", "value", "words"),
    [
        *(("dispatch", "row_token", value, TOKEN) for value in (6, 10**8, -2, -(2**31))),
        *((op, "slot_row", value, SLOT) for op in ("dispatch", "combine") for value in (12, 10**8, -2, -(2**31))),
        *((op, "expert_offsets", value, OFFSETS) for op in ("dispatch", "expert_mlp") for value in (13, -1)),
    ],
)
def test_indices_out_of_range_are_refused(op, name, value, words, backend):
    # Messages on row_token and slot_row end in "<least> to <greatest>"; a positive value here is the greatest.
    low = r"\[.*, " if name == "expert_offsets" else "-?\\d+ to " if value > 0 else ""
    with pytest.raises(ValueError, match=f"^{op}: plan.{words}; got {low}{value}"):
        OPS[op](holding(name, value), backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_every_instruction_set_refuses_them_whatever_the_dtype_and_width(dtype, monkeypatch):
    from moe_kernels.backends import cpu

    for isa in range(len(cpu.module.isas)):
        monkeypatch.setattr(cpu, "isa", isa)
        for width in (0, 1, 40):
            with pytest.raises(ValueError, match=r"^dispatch: plan\.slot_row must"):
                mk.dispatch(torch.randn(TOKENS, width).to(dtype), holding("slot_row", 12), backend="cpu")
            for weights in (None, torch.rand(TOKENS, 2)):
                with pytest.raises(ValueError, match=r"^combine: plan\.slot_row must"):
                    mk.combine(torch.randn(ROWS, width).to(dtype), holding("slot_row", 12), weights, backend="cpu")


def test_a_backward_refuses_what_it_alone_reads():
    rows, weights = SLOTS.clone().requires_grad_(), torch.rand(TOKENS, 2, requires_grad=True)
    for value in (13, -1):
        y = mk.combine(rows, holding("expert_offsets", value), weights, backend="cpu")
        with pytest.raises(ValueError, match=f"^combine: plan.{OFFSETS}; got .*, {value}]"):
            y.sum().backward()
    unfilled = replace(plan(), slot_row=plan().slot_row.clone().fill_(-1))  # drows would keep what its memory held
    with pytest.raises(ValueError, match=r"^combine: plan\.slot_row must name each of the 12 rows in use once"):
        mk.combine(rows, unfilled, weights, backend="cpu").sum().backward()


DISAGREEING = {
    "slot_row must name each of the 12 rows in use once": lambda made: made.slot_row[0].fill_(int(made.slot_row[1, 0])),
    "row_token and plan.slot_row must agree": lambda made: made.row_token.copy_(made.row_token.roll(1)),
}


@EACH
@pytest.mark.parametrize("op", ["dispatch", "expert_mlp"])
@pytest.mark.parametrize("words", DISAGREEING)
def test_arrays_that_disagree_are_refused(words, op, backend):
    made = plan()
    DISAGREEING[words](made)
    with pytest.raises(ValueError, match=f"^{op}: plan.{words}"):
        OPS[op](made, backend)


def test_a_large_expert_mlp_refuses_arrays_that_disagree():
    made = plan()
    w_in, w_out = torch.randn(3, 4, 2**17), torch.randn(3, 2**17, 4)
    made.row_token.copy_(made.row_token.roll(1))
    with pytest.raises(ValueError, match=r"^expert_mlp: plan.row_token and plan.slot_row must agree"):
        mk.expert_mlp(X, made, w_in, w_out, weights=None, backend="cpu")


@pytest.mark.parametrize(
    ("name", "value"), [("row_token", 6), ("row_token", -2), ("slot_row", 12), ("row_choice", 99), ("row_choice", -99)]
)
def test_the_backward_of_expert_mlp_refuses_a_plan_that_changed(name, value):
    made, x = plan(), X.clone().requires_grad_()
    w_in, w_out, weights = torch.randn(3, 4, 8), torch.randn(3, 8, 4), torch.rand(TOKENS, 2, requires_grad=True)
    y = mk.expert_mlp(x, made, w_in, w_out, weights=weights, backend="cpu")
    getattr(made, name).data.view(-1)[-1] = value  # .data: autograd does not see it
    with pytest.raises(ValueError, match=f"expert_mlp: plan.*{name}"):
        y.sum().backward()


@pytest.mark.parametrize(("name", "value"), [("row_token", 6), ("slot_row", 12), ("expert_offsets", 13)])
def test_expert_mlp_refuses_them(name, value):
    with pytest.raises(ValueError, match=f"{name} must"):
        expert_mlp(holding(name, value), "cpu")


@EACH
def test_minus_one_is_still_none(backend):
    made, first = plan(), int(plan().slot_row[0, 0])
    dropped = replace(made, slot_row=made.slot_row.masked_fill(made.slot_row == first, -1))
    y = mk.combine(SLOTS, dropped, backend=backend)
    torch.testing.assert_close(y[0], SLOTS[made.slot_row[0, 1]])
    torch.testing.assert_close(y[1:], mk.combine(SLOTS, made, backend="reference")[1:])
    nobody = mk.make_plan(torch.full_like(EXPERTS, -1), 3, capacity=2)
    assert not mk.dispatch(X, nobody, backend=backend).any()
    assert not mk.combine(SLOTS[: nobody.num_rows], nobody, backend=backend).any()


@EACH
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_another_kind_are_refused(op, name, backend):
    right = getattr(plan(), name)
    OPS[op](plan(), backend)
    with pytest.raises(TypeError, match=f"^{op}: plan.{name} must have dtype int32; got int64"):
        OPS[op](replace(plan(), **{name: right.long()}), backend)
    with pytest.raises(TypeError, match=f"^{op}: plan.{name} must be a Tensor, got list"):
        OPS[op](replace(plan(), **{name: right.tolist() if right.dim() else [0]}), backend)
    for wrong in (right[None], torch.cat([right.view(-1), right.view(-1)[:1]]), right.to("meta")):
        if wrong.device.type == "meta" and name == "row_token":
            continue  # row_token gives the plan's device: the message would name another array
        # row_token gives R: if its length is wrong, the message names row_choice.
        seen = "row_(token|choice)" if name == "row_token" else name
        with pytest.raises(ValueError, match=f"^{op}: plan.{seen} must be "):
            OPS[op](replace(plan(), **{name: wrong}), backend)
    if right.dim():
        with pytest.raises(ValueError, match=f"^{op}: plan.{name} must be .*, contiguous, on cpu; got "):
            OPS[op](replace(plan(), **{name: torch.stack([right, right], -1)[..., 0]}), backend)


@pytest.mark.parametrize("op", OPS)
def test_no_plan_has_more_rows_than_choices(op):
    more = torch.zeros(ROWS + 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"^{op}: plan must have at most T K = 12 rows, got 13"):
        OPS[op](replace(plan(), row_token=more, row_choice=more), "cpu")


@pytest.mark.slow
def test_the_reference_compiles_although_it_looks():
    """The check of a plan's values is a custom operator: it breaks no graph, and is not run with fake tensors."""

    def there_and_back(x: Tensor, made: mk.RoutingPlan) -> Tensor:
        return mk.combine(mk.dispatch(x, made, backend="reference"), made, backend="reference")

    got = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")(X, plan())
    torch.testing.assert_close(got, there_and_back(X, plan()))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert mk.dispatch(mode.from_tensor(X), plan(), backend="reference").shape == (ROWS, 4)
