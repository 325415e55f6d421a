"""Plans that are moved to other devices, saved, and loaded."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import fields

import pytest
import torch

import moe_kernels as mk


def plan():
    return mk.make_plan(torch.randint(4, (9, 2), generator=torch.Generator().manual_seed(0)), 4, capacity=3)


def equal(one, other):
    pairs = [(getattr(one, each.name), getattr(other, each.name)) for each in fields(one)]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def test_a_plan_moves_whole():
    made = plan()
    moved = made.to("meta")
    assert {each.device.type for each in vars(moved).values() if isinstance(each, torch.Tensor)} == {"meta"}
    assert (moved.num_tokens, moved.num_experts) == (9, 4)
    assert made.to("cpu") is made
    assert made.to(torch.device("cpu"), non_blocking=True) is made
    if torch.cuda.is_available():
        there = made.pin_memory().to("cuda", non_blocking=True)
        assert there.slot_row.is_cuda
        assert equal(there.to("cpu"), made)


def test_a_plan_is_loaded_with_weights_only():
    made = plan()
    x = torch.randn(9, 4)
    mk.dispatch(x, made)  # a used plan is saved like a new one
    for saved in (made, {"plan": made, "y": x}):
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        found = torch.load(file, weights_only=True)
        found = found if saved is made else found["plan"]
        assert equal(found, made)
        assert vars(found).keys() == {each.name for each in fields(made)}
        assert torch.equal(mk.dispatch(x, found), mk.dispatch(x, made))
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert equal(again, made)


def test_a_plan_is_a_state_dict_and_back():
    made, file = plan(), io.BytesIO()
    torch.save(made.state_dict(), file)
    file.seek(0)
    assert equal(mk.RoutingPlan.from_state_dict(torch.load(file, weights_only=True)), made)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"_checked": True}, ValueError, "expected the fields num_tokens, .*; got .*_checked"),
        ({"kept": None}, TypeError, "kept must be an int32 tensor, got NoneType"),
        ({"kept": torch.zeros(4)}, TypeError, "kept must be an int32 tensor, got torch.float32"),
        ({"num_tokens": 9.0}, TypeError, "num_tokens must be an int, got float"),
    ],
)
def test_other_states_are_refused(change, error, words):
    with pytest.raises(error, match=f"RoutingPlan: {words}"):
        mk.RoutingPlan.from_state_dict(plan().state_dict() | change)


def test_a_loaded_plan_that_does_not_fit_is_refused_by_operations():
    state = plan().state_dict()
    wrong = mk.RoutingPlan.from_state_dict(state | {"slot_row": state["slot_row"][:3]})
    with pytest.raises(ValueError, match=r"dispatch: plan\.slot_row must be"):
        mk.dispatch(torch.randn(9, 4), wrong)
