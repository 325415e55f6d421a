"""Tests of tiles, their files and tensor descriptors of Triton's grouped GEMM."""

from __future__ import annotations

import contextlib
import heapq
import json
import re
from dataclasses import replace

import pytest
import torch

from moe_kernels.verify import relative_error
from tests.helpers.grouped_gemm import check
from tests.ptx import session, triton_launch

triton = pytest.importorskip("triton", reason="Triton is not installed")
import triton.language as tl

import moe_kernels as mk
from moe_kernels.backends.triton import _grouped_configs
from moe_kernels.backends.triton._grouped_configs import Tiles
from moe_kernels.backends.triton._grouped_tiles import by_size
from tests.helpers.targets import TARGETS, reason_to_skip, running


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
    known = _grouped_configs.tables()["sm_90"]["fwd"]
    for table, rows, columns, expected in (
        (known, 8 * 96, 2048, known["few rows"]),
        (known, 8 * 97, 2048, known["other"]),
        (known, 8 * 97, 128, known["few columns"]),
        (None, 8 * 97, 2048, _grouped_configs.GENERAL["fwd"]),
    ):
        assert _grouped_configs.choose_tiles("fwd", table, rows, 8, columns) == expected
    assert _grouped_configs.choose_tiles("fwd", known, 8 * 96, 8, 2048, training=True) == known["other"]


# Bytes of shared memory that a block may have: with sm_80's code also on GPUs that have 99 KB, such as an RTX 4090.
SHARED = {"sm_80": 99 * 1024, "sm_90": 227 * 1024}


def test_tiles_fit():
    from bench.tiles import CANDIDATES, FEW_ROWS

    tables = _grouped_configs.tables()
    assert set(tables) == set(SHARED)
    for device, table in tables.items():
        for kernel, classes in table.items():
            others = [Tiles(*each) for each in (*CANDIDATES[kernel, int(device[3:])], *FEW_ROWS)]
            for tiles in (*classes.values(), *others):
                columns = 2 * tiles.n if kernel == "gated" else tiles.n
                assert 2 * tiles.m * _grouped_configs.MAX_COLUMNS <= 2**31
                assert tiles.m * columns <= 128 * 32 * tiles.num_warps  # at most 128 accumulators a thread
                needed = tiles.num_stages * tiles.k * (tiles.m + columns) * 2
                assert needed <= 227 * 1024 - 2048
                if tiles in classes.values():  # candidates may need more: they are passed over
                    assert needed <= SHARED[device] - 2048


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A file of tiles that MOE_KERNELS_TILES names, and its content, which tests may write again."""
    table = json.loads(_grouped_configs.FILE.read_text())
    path = tmp_path / "tiles.json"
    monkeypatch.setenv(_grouped_configs.VARIABLE, str(path))

    def write(content):
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        _grouped_configs.tables.cache_clear()

    yield table, write
    monkeypatch.undo()
    _grouped_configs.tables.cache_clear()


def test_a_file_has_tiles_of_a_device(written, monkeypatch):
    table, write = written
    mine = json.loads(json.dumps(table["sm_80"]))
    mine["fwd"]["other"] = [64, 64, 32, 4, 2]
    write({"NVIDIA Some GPU": mine})
    monkeypatch.setattr(_grouped_configs, "loop", lambda device: 80)
    gpu = torch.device("cuda", 0)
    for name, expected in (("NVIDIA Some GPU", (64, 64, 32, 4, 2)), ("NVIDIA Other", table["sm_80"]["fwd"]["other"])):
        monkeypatch.setattr(_grouped_configs, "_name", lambda device, name=name: name)
        assert tuple(_grouped_configs.table(gpu)["fwd"]["other"]) == tuple(expected)


def test_a_file_without_tiles_is_refused(written):
    table, write = written
    del table["sm_80"]["fwd"]["few rows"]
    for content, reason in (
        ("{", "Expecting"),
        ([1], "has no attribute 'items'"),
        ({"sm_80": {"fwd": {"other": [1, 2]}}}, "missing 3 required positional arguments"),
        (table, "sm_80 needs tiles of fwd for few rows, few columns, other"),
    ):
        write(content)
        with pytest.raises(ValueError, match=f"grouped_gemm: MOE_KERNELS_TILES names .*{reason}.*bench tiles"):
            _grouped_configs.tables()


def test_the_fastest_tiles_are_written(monkeypatch, tmp_path):
    """Trials with a clock that knows the tiles: a call takes as many milliseconds as forward has stages."""
    from bench import tiles

    launched = []

    def bench(call, return_mode):
        launched.clear()
        call()
        if launched[-1].n == 256:
            raise triton.runtime.OutOfResources(2, 1, "shared memory")
        return float(launched[-1].num_stages)

    def inputs(shape, dtype, device):
        return plain({**shape, "T": 48, "D": 32, "H": 16, "E": 4, "K": 2}, dtype, "cpu")

    run = _grouped_configs.run_with_tiles
    plain = tiles.ENTRIES["expert_mlp"].inputs
    monkeypatch.setitem(tiles.ENTRIES, "expert_mlp", replace(tiles.ENTRIES["expert_mlp"], inputs=inputs))
    monkeypatch.setattr(triton.testing, "do_bench", bench)
    monkeypatch.setattr(_grouped_configs, "loop", lambda device: 80)

    in_use = _grouped_configs.tables()["sm_80"]["fwd"]["other"]

    def spy(kernel, x, other, num_rows, num_experts, columns, launch, training=False):
        def noted(tiles):
            launched.append(tiles)
            launch(in_use)  # which Triton has compiled for other tests

        run(kernel, x, other, num_rows, num_experts, columns, noted, training)

    monkeypatch.setattr("moe_kernels.backends.triton.grouped_gemm.run_with_tiles", spy)
    with running(next(each for each in TARGETS if each.backend == "triton")):
        found = tiles.trials("fwd", "other")
    assert {each.tiles: each.ms for each in found} == {
        (128, 128, 32, 4, 4): 4.0,
        (128, 128, 32, 8, 4): 4.0,
        (128, 128, 32, 4, 3): 3.0,
        (128, 256, 32, 8, 3): float("inf"),
    }
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(_grouped_configs, "_name", lambda device: "mine")
    tiles.write(tmp_path / "tiles.json", "mine", found)
    (table,) = json.loads((tmp_path / "tiles.json").read_text()).values()
    assert table["fwd"]["other"] == [128, 128, 32, 4, 3]
    assert table["hidden"] == {name: list(each) for name, each in _grouped_configs.tables()["sm_80"]["hidden"].items()}


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_few_tokens_launch_the_tiles_that_have_rows_alone(backend):
    """One token with 8 of 128 experts and 12 column tiles, as Qwen3-30B's up product has: 9 row tiles, not 129."""
    found = next(each for each in TARGETS if each.backend == backend)
    if reason_to_skip(found) or not found.executed or found.interpreted:
        pytest.skip(reason_to_skip(found) or "grids are recorded where PTX is executed")
    x, weight = torch.randn(1, 16).bfloat16(), torch.randn(128, 16, 1536).bfloat16()
    plan = mk.make_plan(torch.arange(0, 128, 16, dtype=torch.int32)[None], 128, backend="reference")
    with running(found), session.recorded() as launches:
        got = mk.grouped_gemm(x, weight, plan.expert_offsets, row_token=plan.row_token, backend=backend)
    assert [each.grid[0] for each in launches] == [9 * 12]
    expected = mk.grouped_gemm(x, weight, plan.expert_offsets, row_token=plan.row_token, backend="reference")
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_multiples_of_16_bytes_are_read_so(target, dtype):
    """Of a size Triton itself knows only whether it is a multiple of 16 elements."""
    if not target.executed or target.interpreted:
        pytest.skip("instructions are recorded where PTX is executed")
    unit = 16 // dtype.itemsize
    dim, hidden = 9 * unit, 7 * unit
    plan = mk.make_plan(torch.randint(0, 2, (40, 1), dtype=torch.int32), 2, backend="reference")
    leaves = [
        (torch.randn(shape) / 4).to(dtype).requires_grad_() for shape in ((40, dim), (2, dim, hidden), (2, hidden, dim))
    ]
    options = {"weights": torch.ones(40, 1), "b_in": leaves[1].new_ones(2, hidden), "b_out": leaves[1].new_ones(2, dim)}
    options["activation"] = "relu"
    with session.recorded() as launches:
        out = mk.expert_mlp(leaves[0], plan, *leaves[1:], **options, backend="triton")
        gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))
    kernels = {each.kernel.title for each in launches}
    assert kernels == {"_grouped_gemm_fwd", "_combine_fwd", "_expert_mlp_bwd_hidden", "_grouped_gemm_bwd_weight"}
    for each in launches:
        ran = [text for text, runs in zip(each.kernel.texts, each.counters["runs"], strict=False) if runs]
        assert not [text for text in ran if re.search(r"(ld|st)\.global\S*\.b16 ", text)]
        whole, parts = (sum(f"cp.async.{kind}.shared.global" in text for text in ran) for kind in ("cg", "ca"))
        indices = 8 if each.kernel.title == "_grouped_gemm_bwd_weight" else 0  # row_token, 4 bytes at a time
        assert parts <= indices
        assert whole > parts or each.kernel.title == "_combine_fwd"
    expected = mk.expert_mlp(leaves[0], plan, *leaves[1:], **options, backend="reference")
    wanted = torch.autograd.grad(expected, leaves, torch.ones_like(out))
    for got, want in zip((out, *gradients), (expected, *wanted), strict=True):
        assert relative_error(got.detach(), want.detach()) <= max(2 * torch.finfo(dtype).eps, 1e-6)


def test_sizes_are_passed_in_units_of_16_bytes():
    x = torch.zeros(1, dtype=torch.bfloat16)
    for sizes, passed, unit, whole in (
        ((1000, 48), [125, 6], 8, 3), ((1000, 4), [125, 4], 8, 1), ((6, 32), [6, 4], 8, 2),
        ((8, 0, 5), [1, 0, 5], 8, 3), ((32, 48, 0), [2, 3, 0], 16, 7), ((16, 2**31), [1, 2**31], 16, 1),
    ):  # fmt: skip
        assert _grouped_configs.in_units(x, *sizes) == (passed, {"UNIT": unit, "WHOLE": whole})
    assert _grouped_configs.in_units(x.float(), 1000, 4, 2) == ([250, 1, 2], {"UNIT": 4, "WHOLE": 3})


@pytest.mark.parametrize(("experts", "block"), [(0, 8), (1, 8), (8, 8), (9, 16), (64, 64), (65, 128)])
def test_few_experts_share_a_block(experts, block):
    assert _grouped_configs.block_of(experts) == block


@triton.jit
def _places(offsets_ptr, out_ptr, E, SORTED: tl.constexpr):
    place = tl.program_id(0)
    tl.store(out_ptr + place, by_size(place, offsets_ptr, E, SORTED))


@pytest.mark.parametrize("rows", [[3, 0, 7, 7, 1], [0, 0], [5], [64, *[1] * 63], list(range(40))], ids=str)
def test_the_weight_gradient_takes_experts_by_their_rows(target, rows):
    offsets = torch.tensor([0, *rows], device=target.device).cumsum(0).int()
    found = torch.full((len(rows),), -1, dtype=torch.int32, device=target.device)
    _places[(len(rows),)](offsets, found, len(rows), triton.next_power_of_2(len(rows)))
    assert found.tolist() == sorted(range(len(rows)), key=lambda e: (-rows[e], e))


def longest(rows: list[int], slots: int, blocks: int, step: int) -> int:
    """Steps until the last block ends, where blocks of the experts start in this order, each as a slot gets free."""
    ends = [0] * slots
    for count in rows:
        for _ in range(blocks):
            heapq.heapreplace(ends, ends[0] + -(-count // step))
    return max(ends)


def test_a_heavy_expert_costs_a_fifth_at_most():
    """Half of Qwen3-30B's 262144 rows in the last of 128 experts, on an A100 with two blocks a multiprocessor."""
    balanced = longest([2048] * 128, 216, 96, 32)
    skewed = [131072 // 127] * 127 + [131072]
    assert longest(skewed, 216, 96, 32) > 1.5 * balanced  # in ascending order
    assert longest(sorted(skewed, reverse=True), 216, 96, 32) <= 1.2 * balanced
