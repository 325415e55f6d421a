"""What a part of a checkpoint may be replaced by: types, lengths, limits of numbers, the state of an optimiser."""

from __future__ import annotations

import re

import pytest
import torch

from moe_kernels.papers.train.contents import check_like, check_optimiser, check_rows

NUMBER = "must be a number below 2^63, got"


@pytest.mark.parametrize(
    ("own", "found"),
    [
        (torch.zeros(2, 3), torch.ones(2, 3)),
        (torch.zeros(()), torch.ones(())),
        ({"a": 1, "b": "x"}, {"a": 2, "c": None}),  # keys of both are compared
        ({}, {"a": 1}),
        ([1, 2.5], [3, 4]),
        ((), ()),
        (("a", (1,)), ("b", (2,))),
        (0, 2**63 - 1),
        (0, -(2**63) + 1),
        (1.5, 7),  # an integer may stand for a float
        (1.5, float("nan")),
        ("a", ""),
        (None, False),
        (True, None),
        (None, None),
        (False, True),
        (b"a", b"b"),
    ],
    ids=str,
)
def test_a_value_of_the_same_kind_may_replace_another(own, found):
    check_like("x", own, found)


@pytest.mark.parametrize(
    ("own", "found", "message"),
    [
        (torch.zeros(2), [0.0, 0.0], "x must be a tensor, got list"),
        (torch.zeros(2), torch.zeros(2, 1), "x must be float32 (2,), got float32 (2, 1)"),
        (torch.zeros(2), torch.zeros(2).int(), "x must be float32 (2,), got int32 (2,)"),
        ({"a": 1}, [1], "x must be dict, got list"),
        ("a", {"a": 1}, "x must be str, got dict"),
        (None, {"a": 1}, "x must be NoneType, got dict"),
        (1, {"a": 1}, f"x {NUMBER} dict"),
        ({"a": {"b": 1}}, {"a": {"b": "c"}}, f"x, a, b {NUMBER} str"),
        ([1], (1,), "x must be list, got tuple"),
        ((1,), [1], "x must be tuple, got list"),
        ([1, 2], [1], "x must have 2 entries, got 1"),
        ([1], [1, 2], "x must have 1 entries, got 2"),
        ([1, 2, ["a"]], [1, 2, [3]], "x, 2, 0 must be str, got int"),
        (0, 2**63, f"x {NUMBER} int"),
        (0, -(2**63), f"x {NUMBER} int"),
        (0.5, 2**63, f"x {NUMBER} int"),
        (0, True, f"x {NUMBER} bool"),
        (0, None, f"x {NUMBER} NoneType"),
        (1, 1.0, "x must be int, got float"),
        (1, torch.ones(()), f"x {NUMBER} Tensor"),
        (None, 5, "x must be NoneType, got int"),
        (False, "a", "x must be bool, got str"),
        (True, 1, "x must be bool, got int"),
        ("a", None, "x must be str, got NoneType"),
        ("a", False, "x must be str, got bool"),
    ],
    ids=str,
)
def test_a_value_of_another_kind_is_named(own, found, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_like("x", own, found)


def test_rows_and_terms_are_equally_long_lists_of_numbers_by_name():
    check_rows([], [], ("a",))
    check_rows([{"a": 1, "b": 2.5}, {"a": float("nan")}], [{}, {"l1": 1}], ("a",))
    check_rows([{}], [{}], ())
    for rows, terms, message in (
        (({"a": 1},), [{}], "rows must be a list of dicts"),
        ([{"a": 1}, 5], [{}, {}], "rows must be a list of dicts"),
        ([{"a": 1}], None, "terms must be a list of dicts"),
        ([{"a": 1}], [[]], "terms must be a list of dicts"),
        ([{"a": True}], [{}], "rows must have numbers by name, got 'a': bool"),
        ([{"a": 1, 2: 3}], [{}], "rows must have numbers by name, got 2: int"),
        ([{"a": 1}], [{"l1": "x"}], "terms must have numbers by name, got 'l1': str"),
        ([{"a": 1}, {"c": 2}, {"b": 1}], [{}] * 3, "a row has no a, b, c"),
        ([{"a": 1, "b": 1, "c": 1}], [], "terms must have 1 entries as rows has, got 0"),
        ([{"a": 1, "b": 1, "c": 1}], [{}, {}], "terms must have 1 entries as rows has, got 2"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            check_rows(rows, terms, ("c", "a", "b"))


def test_the_state_of_adam_is_tensors_of_the_parameters_and_a_number_of_steps():
    """The learning rate may differ, and the options that say which kernels a device uses."""
    weights = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(4))]
    optimiser = torch.optim.Adam([{"params": weights[:1]}, {"params": weights[1:], "lr": 0.5}], lr=0.1)
    for each in weights:
        each.grad = torch.ones_like(each)
    optimiser.step()

    def check(parameter=1, group=1, of_group=None, **changed):
        state = optimiser.state_dict()
        state["state"][parameter] = {k: v for k, v in (state["state"][parameter] | changed).items() if v is not None}
        state["param_groups"][group] |= of_group or {}
        check_optimiser(optimiser, state)

    check()
    for step in (3, 3.0, torch.tensor(3.0), torch.tensor([3])):
        check(step=step)
    for allowed in ({"lr": 0.25}, {"fused": True}, {"foreach": False}, {"capturable": True}):
        check(of_group=allowed)
    for changed, message in (
        ({"step": "a"}, "state of parameter 1, step must be a number"),
        ({"step": torch.ones(2)}, "state of parameter 1, step must be a number"),
        ({"step": True}, "state of parameter 1, step must be a number"),
        ({"exp_avg": torch.ones(3)}, "state of parameter 1, exp_avg must be float32 (4,), got float32 (3,)"),
        ({"parameter": 0, "exp_avg_sq": 1.0}, "state of parameter 0, exp_avg_sq must be a tensor, got float"),
        ({"exp_avg": None}, "state of parameter 1 must have step, exp_avg, exp_avg_sq; got step, exp_avg_sq"),
        ({"of_group": {"eps": 0.5}}, "param_groups have other eps"),
        ({"of_group": {"betas": (0.5, 0.5), "amsgrad": True}}, "param_groups have other amsgrad, betas"),
        ({"group": 0, "of_group": {"lr": "a"}}, f"param_groups, 0, lr {NUMBER} str"),
        ({"group": 0, "of_group": {"params": [0, 1]}}, "param_groups, 0, params must have 1 entries, got 2"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            check(**changed)
