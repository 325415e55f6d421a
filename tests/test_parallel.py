"""Experts across processes: every check runs on ranks of this machine, under gloo (tests/ranks)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks

EXACT = (
    "dropless",
    "dropless_of_three_choices",
    "dropless_of_one_choice",
    "capacity_by_priority",
    "static_capacity",
    "static_with_room",
    "expert_choice",
    "one_layer_experts",
    "global_choice",
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    started.close()


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("check", EXACT)
def test_equals_one_process_bit_for_bit(ranks: Ranks, check: str, n: int) -> None:
    ranks.run("exact", check, n)
