"""The regression set: kernels against compositions of PyTorch's operations, saved and compared by pytest-benchmark.

    make baseline      saves the kernels' times on this machine, as multiples of PyTorch's
    make regression    fails if a kernel's multiple is 1.2 or more, or exceeds the last saved one by more than 25 %

A round takes a sample of PyTorch's composition and one of the kernel, and records their ratio, so that the load of the
machine affects both.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench import timing
from bench.registry import ENTRIES
from moe_kernels.info import placement
from moe_kernels.verify import KERNELS, threads

ROUNDS = 30
SLOWER = 1.2  # limit of the median ratio; above 1, since a kernel that is as fast as PyTorch may measure slower

_elapsed = [0.0]


def composition_clock() -> float:
    """pytest-benchmark's timer: `_round` advances it by the kernel's time divided by the composition's."""
    return _elapsed[0]


def _cases() -> list[tuple[str, str, str]]:
    cases = []
    for op, entry in ENTRIES.items():
        for backend in KERNELS if entry.peers else ():
            device = placement(op, backend).device
            if device == "cuda" or (device == "cpu" and backend == "cpu"):  # interpreted kernels are not timed
                cases += [(op, backend, direction) for direction in entry.directions]
    return cases


@pytest.mark.benchmark(timer=composition_clock)
@pytest.mark.parametrize(("op", "backend", "direction"), _cases())
def test_keeps_up_with_pytorch(benchmark, op: str, backend: str, direction: str) -> None:
    entry, device = ENTRIES[op], placement(op, backend).device
    assert device is not None
    shape = entry.complete(entry.shapes["quick"][0], device)
    peer = next(iter(entry.peers.values()))
    if direction not in peer:
        pytest.skip("PyTorch's composition has no such direction")
    calls = {"kernel": entry.kernel(backend)[direction], "peer": peer[direction]}
    sets = _inputs(op, shape, device)
    with threads(1), timing.no_garbage_collection(), timing.samplers(calls, sets, device) as samples:
        benchmark.pedantic(lambda: _round(samples), rounds=ROUNDS, warmup_rounds=1)
    benchmark.extra_info |= {"shape": str(shape), "peer": next(iter(entry.peers))}
    if benchmark.enabled:
        assert benchmark.stats.stats.median < SLOWER, f"a kernel must take less than {SLOWER} times as long as PyTorch"


def _inputs(op: str, shape: dict, device: str) -> list[dict]:
    entry, dtype = ENTRIES[op], ENTRIES[op].dtypes[0]
    count = timing.sets_for(entry.least_bytes(shape, dtype, "forward")) if device == "cuda" else 1
    return [entry.inputs(shape, dtype, device) for _ in range(count)]


def _round(samples: dict[str, Callable[[], float]]) -> None:
    peer, kernel = samples["peer"](), samples["kernel"]()
    _elapsed[0] += kernel / peer
