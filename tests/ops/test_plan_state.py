"""Plans that are moved to other devices, saved, and loaded."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import fields

import pytest
import torch
from torch._subclasses import FakeTensorMode

import moe_kernels as mk


def plan():
    return mk.make_plan(torch.randint(4, (9, 2), generator=torch.Generator().manual_seed(0)), 4, capacity=3)


def plan_without_unused_rows():
    return mk.make_plan(torch.randint(4, (9, 2), generator=torch.Generator().manual_seed(0)), 4)


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


EDITS = {
    "slot_row must be": lambda state: state.update(slot_row=state["slot_row"][:3]),
    "expert_offsets must rise": lambda state: state["expert_offsets"].add_(1),
    "kept must be": lambda state: state["kept"][0].add_(1),
    "requested must": lambda state: state["requested"].zero_(),
    "dropped must": lambda state: state["dropped"].add_(1),
    "row_token must be from": lambda state: state["row_token"][0].fill_(9),
    "row_choice must be from": lambda state: state["row_choice"][0].fill_(-1),
    "slot_row must name": lambda state: state["slot_row"][0, 0].fill_(18),
    "must be r for every row": lambda state: state["row_token"].copy_(state["row_token"].roll(1)),
}


@pytest.mark.parametrize("words", EDITS)
def test_an_edited_plan_is_refused_when_it_is_loaded(words):
    state = plan_without_unused_rows().state_dict()
    mk.RoutingPlan.from_state_dict(state)
    EDITS[words](state)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    with pytest.raises(ValueError, match=f"RoutingPlan: .*{words}"):
        mk.RoutingPlan.from_state_dict(torch.load(file))


def test_a_plan_of_fake_tensors_is_copied():
    with FakeTensorMode():
        made = plan()
        assert mk.RoutingPlan.from_state_dict(made.state_dict()).slot_row.shape == made.slot_row.shape
    assert copy.deepcopy(plan().to("meta")).slot_row.is_meta
