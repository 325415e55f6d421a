"""Tests of tiles, tensor descriptors and autotuning of Triton's grouped GEMM."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tests.helpers.grouped_gemm import check
from tests.ptx import triton_launch

triton = pytest.importorskip("triton", reason="Triton is not installed")

import moe_kernels as mk
from moe_kernels.backends.triton import _grouped_configs
from moe_kernels.backends.triton._grouped_configs import Tiles
from tests.helpers.targets import TARGETS, running


@pytest.fixture
def target():
    with running(next(each for each in TARGETS if each.backend == "triton")) as found:
        yield found


@pytest.mark.slow
def test_more_columns_than_a_tile_counts_in_32_bits_are_refused(target, monkeypatch):
    x, offsets = torch.ones(1, 2, device=target.device), torch.tensor([0, 1], dtype=torch.int32, device=target.device)
    monkeypatch.setattr(_grouped_configs, "MAX_COLUMNS", 4)
    assert mk.grouped_gemm(x, x.new_ones(1, 2, 4), offsets, backend="triton").tolist() == [[2] * 4]
    with pytest.raises(ValueError, match="grouped_gemm: the Triton kernel takes at most 4 columns, got 5"):
        mk.grouped_gemm(x, x.new_ones(1, 2, 5), offsets, backend="triton")


@pytest.mark.slow
def test_many_tiles(target, monkeypatch):
    for kernel in _grouped_configs.GENERAL:
        monkeypatch.setitem(_grouped_configs.GENERAL, kernel, Tiles(16, 16, 16, 4, 2))
    check(target, torch.float32, "zipf", (100, 20, 41, 5), "gelu", gathered=True)
    check(target, torch.float32, "adversarial", (60, 20, 44, 5), "swiglu", gathered=False)


@pytest.mark.slow
@pytest.mark.parametrize("gathered", [False, True])
def test_tensor_descriptors(target, gathered, monkeypatch):
    made = []

    def descriptor(x, *shape):
        made.append(tuple(x.shape))
        return plain(x, *shape)

    plain = _grouped_configs.TensorDescriptor
    monkeypatch.setattr(_grouped_configs, "TensorDescriptor", descriptor)
    if target.executed:
        monkeypatch.setattr(_grouped_configs, "loop", lambda device: 90)
    elif _grouped_configs.loop(torch.device("cuda", torch.cuda.current_device())) != 90:
        pytest.skip("this GPU has no tensor descriptors in hardware")
    compiled = target.executed and not target.interpreted
    with triton_launch.capability(90) if compiled else contextlib.nullcontext():
        check(target, torch.bfloat16, "zipf", (48, 80, 96, 5), "swiglu", gathered)
    tokens = 24 if gathered else 48
    assert set(made) == {(5, 80, 96), (48, 96)} | (set() if gathered else {(tokens, 80)})


def test_what_a_tensor_descriptor_cannot_describe_is_read_by_pointers(monkeypatch):
    """A tensor has no descriptor if all experts or all rows have one address (stride 0), rows are not contiguous or do
    not all start at multiples of 16 bytes, or the tensor is empty or float32."""
    monkeypatch.setattr(_grouped_configs, "loop", lambda device: 90)
    x = torch.zeros(4, 16, 16, dtype=torch.bfloat16)
    assert _grouped_configs._descriptor(x, [1, 16, 16]) is not x
    for other in (x[:1].expand(3, -1, -1), x[:, :1].expand(-1, 3, -1), x[..., 8:].mT, x[..., 4:], x[:0], x.float()):
        assert _grouped_configs._descriptor(other, [1, 16, 16]) is other
    odd = x.view(-1)[:540].view(3, 9, 20)
    assert _grouped_configs._descriptor(odd, [1, 16, 16]) is odd


def test_tiles_of_a_shape():
    few, narrow, wide = _grouped_configs.TILES["fwd", 90]
    for even, rows, columns, expected in (
        (True, 8 * 96, 2048, few),
        (True, 8 * 97, 2048, wide),
        (True, 8 * 97, 128, narrow),
        (False, 8 * 97, 2048, _grouped_configs.GENERAL["fwd"]),
    ):
        assert _grouped_configs.choose_tiles("fwd", 90, even, rows, 8, columns) == expected


def test_a_captured_call_is_not_timed(monkeypatch):
    class OnGpu:
        device, dtype, shape = torch.device("cuda", 0), torch.bfloat16, (64, 64)

    timed, launched = [], []
    monkeypatch.setenv("MOE_KERNELS_AUTOTUNE", "1")
    monkeypatch.setattr(_grouped_configs, "timed", {})
    monkeypatch.setattr(_grouped_configs, "loop", lambda device: 80)
    monkeypatch.setattr(_grouped_configs, "_divisible", lambda *given: True)
    monkeypatch.setattr(_grouped_configs, "_milliseconds", lambda launch, tiles: timed.append(tiles) or 1.0)
    for captured in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captured=captured: captured)
        _grouped_configs.run_with_tiles("fwd", OnGpu(), None, 512, 4, 128, launched.append)
        assert bool(timed) != captured
    assert len(launched) == 2


def test_autotuning_has_alternatives_that_fit_and_passes_over_those_that_do_not(monkeypatch):
    assert set(_grouped_configs.ALTERNATIVES) == set(_grouped_configs.TILES)
    for (kernel, which), known in _grouped_configs.ALTERNATIVES.items():
        for m, n, k, warps, stages in known:
            assert 2 * m * _grouped_configs.MAX_COLUMNS <= 2**31
            columns = 2 * n if kernel == "gated" else n
            # The buffers of the pipeline stages leave at least 2 KiB of the shared memory that a block can have.
            assert stages * k * (m + columns) * 2 <= {80: 163, 90: 227}[which] * 1024 - 2048
            assert m * columns <= 128 * 32 * warps  # at most 128 accumulators a thread
        assert not set(known) & set(_grouped_configs.TILES[kernel, which])

    def no_room(call, **options):
        raise triton.runtime.OutOfResources(2, 1, "shared memory")

    monkeypatch.setattr(triton.testing, "do_bench", no_room)
    assert _grouped_configs._milliseconds(lambda tiles: None, Tiles(128, 128, 64, 8, 4)) == float("inf")
    monkeypatch.setattr(triton.testing, "do_bench", lambda call, **options: call() or 2.0)
    assert _grouped_configs._milliseconds(lambda tiles: None, Tiles(128, 128, 64, 8, 4)) == 2.0
