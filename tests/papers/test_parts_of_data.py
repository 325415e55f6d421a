"""The parts of the data that a comparison trains, tunes and evaluates on."""

from __future__ import annotations

import pytest
import torch

from moe_kernels.papers.recipes import Splits, comet
from moe_kernels.papers.train import comparison


def numbered(train, test, valid=None, source="source"):
    """Sample i of a part has input 10 i and label i, counted over all parts."""
    sizes = [train, test, valid or 0]
    parts, start = [], 0
    for size in sizes:
        rows = torch.arange(start, start + size)
        parts.append(((rows * 10.0)[:, None], rows))
        start += size
    return Splits(source, parts[0], parts[1], None if valid is None else parts[2])


def rows_of(part):
    x, y = part
    assert x.tolist() == [[10.0 * row] for row in y.tolist()]
    return y.tolist()


def drawn(size, seed):
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("choice", [{"choose": "best"}, {"patience": 1}, {"choose": "best", "patience": 2}], ids=str)
@pytest.mark.parametrize("train", [10, 29])
def test_a_tenth_of_the_training_set_validates(choice, train):
    found = comparison.parts(numbered(train, 5), comet.Comet(seed=3, **choice))
    order, tenth = drawn(train, 3), train // 10
    assert rows_of(found.valid) == order[:tenth]
    assert rows_of(found.train) == order[tenth:]
    assert rows_of(found.test) == list(range(train, train + 5))
    assert found.source == "source"


@pytest.mark.parametrize("choice", [{"choose": "best"}, {"patience": 1}], ids=str)
def test_no_tenth_is_held_out_of_fewer_than_ten_samples_or_beside_a_validation_part(choice):
    found = comparison.parts(numbered(9, 5), comet.Comet(**choice))
    assert (rows_of(found.train), found.valid) == (list(range(9)), None)
    found = comparison.parts(numbered(20, 5, 6), comet.Comet(**choice))
    assert (rows_of(found.train), rows_of(found.valid)) == (list(range(20)), list(range(25, 31)))


def test_nothing_validates_without_an_option_that_uses_it():
    for valid in (None, 6):
        found = comparison.parts(numbered(20, 5, valid), comet.Comet())
        assert (rows_of(found.train), found.valid) == (list(range(20)), None)


@pytest.mark.parametrize(("rows", "limit"), [(0, 20), (7, 7), (29, 29), (30, 30), (99, 30)])
def test_an_evaluation_has_a_fixed_choice_of_samples_in_their_order(rows, limit):
    """At most as many as the training samples, or --eval-rows."""
    found = comparison.parts(numbered(20, 30, 40), comet.Comet(choose="best", eval_rows=rows, seed=5))
    assert rows_of(found.test) == [20 + row for row in sorted(drawn(30, 0)[:limit])]
    assert rows_of(found.valid) == [50 + row for row in sorted(drawn(40, 0)[: max(limit, min(rows, 40))])]


def test_the_limit_counts_the_training_samples_without_the_tenth():
    found = comparison.parts(numbered(20, 30), comet.Comet(choose="best"))
    assert [len(part[0]) for part in (found.train, found.valid, found.test)] == [18, 2, 18]


@pytest.mark.parametrize("size", [9, 10, 47])
def test_tuning_evaluates_on_a_random_tenth(size):
    found, order = comparison._held_out(numbered(size, 3), 4), drawn(size, 4)
    assert rows_of(found.test) == order[: size // 10]
    assert rows_of(found.train) == order[size // 10 :]
    assert (found.valid, found.source) == (None, "source")
