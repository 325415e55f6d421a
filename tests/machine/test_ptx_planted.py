"""Defects planted in the kernels' PTX: when tests/ptx executes it on the CPU, errors or wrong values show them."""

from __future__ import annotations

import re
import struct

import pytest
import torch

import moe_kernels as mk
from tests.helpers.planted_ptx import GPU, gemm, kwta, on
from tests.ptx import cuda_launch, machine, plant, session, toolkit, triton_launch
from tests.ptx.build import run
from tests.ptx.machine import PtxError

pytestmark = pytest.mark.skipif(not GPU, reason="the kernels run on a GPU or are interpreted")


def gate(backend):
    logits = torch.randn(64, 33, generator=torch.Generator().manual_seed(0))
    return mk.topk_gate(logits, 3, backend=backend)[0]


def topk_gate_bwd(backend):
    logits = torch.randn(9, 40, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weights, _ = mk.topk_gate(logits, 3, order="softmax_topk", backend=backend)
    return torch.autograd.grad(weights.square().sum(), logits)[0]


def plan_rank(backend):
    experts = torch.randint(-1, 5, (300, 2), generator=torch.Generator().manual_seed(0))
    return mk.make_plan(experts, 5, backend=backend).slot_row.float()


def plan_scan(backend):
    experts = torch.randint(300, (400, 2), generator=torch.Generator().manual_seed(0))
    return mk.make_plan(experts, 300, capacity=2, backend=backend).expert_offsets.float()


def sinkhorn_log_bwd(backend):
    scores = torch.randn(3, 12, 12, generator=torch.Generator().manual_seed(0))
    sums = torch.ones(12).requires_grad_()
    p = mk.sinkhorn(scores, 2, rows=sums, columns=sums.detach(), backend=backend)
    return torch.autograd.grad(p.square().sum(), sums)[0]


CALLS = {each.__name__: each for each in (kwta, gemm, gate, topk_gate_bwd, plan_rank, plan_scan, sinkhorn_log_bwd)}


def caught(call, backend, expected, edit, seeds=(0,)):
    """The error that execution with the edit raises, or "wrong values"; None if no seed shows the defect."""
    for seed in seeds:
        with session.planted(edit), session.seed(seed):
            try:
                got = call(backend)
            except PtxError as error:
                return str(error)
        if not torch.equal(got.nan_to_num(1e9), expected.nan_to_num(1e9)):
            return "wrong values"
    return None


def launched(name, backend):
    """The result of CALLS[name] without a defect, and the launch of the kernel whose title contains `name`."""
    with session.recorded() as results:
        expected = CALLS[name](backend)
    (result,) = [each for each in results if name in each.kernel.title]
    return expected, result


def only_in(kernel, edit):
    """The edit, applied only to PTX that contains the kernel."""
    return lambda text: edit(text) if kernel.name in text else text


# needless: number of barriers that can be deleted without an error. The loop of Triton's product waits at its head for
# the copies that it has awaited at its end.
@pytest.mark.parametrize(
    ("name", "backend", "needless"),
    [("kwta", "triton", 0), ("kwta", "cuda", 0), ("gemm", "triton", 1), ("gemm", "cuda", 0)],
)
def test_every_deleted_barrier(name, backend, needless):
    if backend == "triton" and triton_launch.release() < (3, 9):
        pytest.skip("Triton before 3.9 adds barriers without need")
    with on(backend):
        expected, result = launched(name, backend)
        lines = plant.executed(result, r"bar\.(sync|red)|barrier")
        assert lines
        missed = []
        for line in lines:
            if "bar.red" in result.kernel.texts[result.kernel.lines.index(line)]:
                continue  # later instructions read the result of bar.red
            edit = only_in(result.kernel, plant.on_line(line, r"bar\.sync\s+\d+;", ""))
            if not caught(CALLS[name], backend, expected, edit, seeds=(0, 1, 2)):
                missed.append(line)
        found = f"neither errors nor wrong values without {missed} of {lines}"
        assert len(missed) == needless, found


# needless: number of warp barriers that can be deleted without an error. The last one of plan_rank separates two tiles
# of 1024 choices, but the 600 choices here are one tile.
@pytest.mark.parametrize(
    ("name", "needless"),
    [("plan_rank", 1), ("sinkhorn_log_bwd", 0), ("topk_gate_bwd", 0)],
)
def test_every_deleted_barrier_of_a_warp(name, needless):
    """tests/ptx runs a warp's lanes in lockstep: without a barrier values stay right, but the race check raises."""
    with on("cuda"):
        expected, result = launched(name, "cuda")
        lines = plant.executed(result, r"bar\.warp\.sync")
        edits = [only_in(result.kernel, plant.on_line(line, r"bar\.warp\.sync\s+[^;]+;", "")) for line in lines]
        errors = [caught(CALLS[name], "cuda", expected, edit) or "" for edit in edits]
        assert len(lines) > needless
        found = [re.search("with no (bar.warp.sync|synchronization) between", error) for error in errors]
        assert sum(each is not None for each in found) == len(lines) - needless


def test_no_barrier_before_an_atomic():
    """An atomic with no barrier before it releases only the stores of its own thread."""
    with on("triton"):
        expected, result = launched("plan_scan", "triton")
        (atomic,) = plant.executed(result, r"atom\.global")
        # One barrier is in the kernel's source, Triton adds the other.
        two = [each for each in plant.executed(result, r"bar\.sync") if each < atomic][-2:]

        def edit(text):
            for line in two:
                text = plant.on_line(line, r"bar\.sync\s+\d+;", "")(text)
            return text

        error = caught(plan_scan, "triton", expected, only_in(result.kernel, edit)) or ""
        assert "read of global memory that another thread wrote" in error


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_pipeline_of_a_product(backend):
    with on(backend):
        expected, result = launched("gemm", backend)
        waits = plant.executed(result, r"cp\.async\.wait_group")
        commits = plant.executed(result, r"cp\.async\.commit_group")
        assert waits
        assert commits
        raised = plant.replaced(r"cp\.async\.wait_group\s+\d+", "cp.async.wait_group 7")
        dropped = plant.replaced(r"cp\.async\.commit_group\s*;", "")
        for edit in (raised, dropped):
            error = caught(gemm, backend, expected, only_in(result.kernel, edit)) or ""
            assert "cp.async may still be writing" in error


def some_lanes_are_guarded(result, pattern):
    """PTX lines of the guarded instructions that match `pattern`, if some lanes executed them and others did not."""
    kernel, counters = result.kernel, result.counters
    return [
        kernel.lines[pc]
        for pc, text in enumerate(kernel.texts)
        if re.match(rf"@\S+\s+{pattern}", text) and 0 < counters["lanes"][pc] < 32 * counters["runs"][pc]
    ]


@pytest.mark.parametrize("kind", ["ld", "st"])
def test_removed_guards_of_loads_and_stores(kind):
    with on("triton"):
        expected, result = launched("kwta", "triton")
        lines = some_lanes_are_guarded(result, rf"{kind}\.global")
        assert lines
        for line in lines:
            outcome = caught(kwta, "triton", expected, plant.on_line(line, r"@!?%p\d+\s", " "))
            assert "outside of every tensor" in (outcome or ""), line


def test_removed_branch_around_a_store():
    """nvcc branches around stores. Without the branch, lanes beyond the end of the row store too."""
    with on("cuda"):
        expected, result = launched("kwta", "cuda")
        kernel, found = result.kernel, 0
        for pc, text in enumerate(kernel.texts):
            stores = any("st.global" in each for each in kernel.texts[pc + 1 : pc + 12])
            diverges = 0 < result.counters["lanes"][pc] < 32 * result.counters["runs"][pc]
            if re.match(r"@\S+ bra", text) and stores and diverges:
                edit = only_in(kernel, plant.on_line(kernel.lines[pc], r"@!?%p\d+\s+bra\s+\S+;", ""))
                found += bool(caught(kwta, "cuda", expected, edit))
        assert found


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_wrong_swizzle(backend):
    """Turns one xor at a time into an or. Some xors swizzle addresses, so at least one edit causes an error or wrong
    values."""
    with on(backend):
        expected, result = launched("gemm", backend)
        lines = plant.executed(result, r"xor\.b32")
        outcome = {
            line: caught(gemm, backend, expected, only_in(result.kernel, plant.on_line(line, r"xor\.b32", "or.b32")))
            for line in lines
        }
        assert any(outcome.values()), outcome


def test_shuffle_left_out_of_a_sum():
    """One shuffle at a time becomes a move of the lane's own value: each time, an error or wrong values follow."""
    with on("triton"):
        expected, result = launched("gate", "triton")
        lines = plant.executed(result, r"shfl\.sync\.bfly")
        edits = [
            plant.on_line(line, r"shfl\.sync\.bfly\.b32\s+(%r\d+),\s*(%r\d+)[^;]*;", r"mov.b32 \1, \2;")
            for line in lines
        ]
        outcome = [caught(gate, "triton", expected, edit) or "" for edit in edits]
        assert all(outcome)


@pytest.mark.parametrize(
    ("backend", "name"), [("triton", "kwta"), ("triton", "gate"), ("cuda", "kwta"), ("cuda", "gate")]
)
def test_lane_missing_from_a_mask(backend, name):
    with on(backend):
        expected, result = launched(name, backend)
        lines = plant.executed(result, r"(shfl|redux|vote|match|bar\.warp)\.")
        assert lines
        kernel = result.kernel
        texts = {line: kernel.texts[kernel.lines.index(line)] for line in lines}
        # Edits only the first and the last line with each opcode, to save time.
        opcodes = {line: re.sub(r"^@\S+\s+", "", text).split()[0] for line, text in texts.items()}
        last = {opcode: line for line, opcode in opcodes.items()}
        first = {opcode: line for line, opcode in reversed(opcodes.items())}
        for line in sorted({*first.values(), *last.values()}):
            text = texts[line]
            edit = only_in(kernel, plant.on_line(line, r"(-1|%r\d+)(\s*;)", r"0xfffffffe\2"))
            outcome = caught(CALLS[name], backend, expected, edit)
            assert "is not in its own mask fffffffe" in (outcome or ""), text


TWO_ARRAYS = """
extern "C" __global__ void shift(const float* x, float* y, int to, int from) {
  __shared__ float near[64], far[64];
  const int i = threadIdx.x;
  near[i + to] = x[i];
  far[i] = 2 * x[i];
  __syncthreads();
  y[i] = near[63 - i] + far[i - from];
}
"""


def shifted(to, from_, folder):
    nvcc = toolkit.find().nvcc
    (folder / "shift.cu").write_text(TWO_ARRAYS)
    run([str(nvcc), "-arch=sm_80", "-lineinfo", "-ptx", str(folder / "shift.cu"), "-o", str(folder / "shift.ptx")])
    kernel = machine.kernel((folder / "shift.ptx").read_text(), "shift")
    x, y = torch.randn(64), torch.zeros(64)
    parameters = struct.pack("<2Q2i", x.data_ptr(), y.data_ptr(), to, from_)
    memory = machine.extents([x, y])
    machine.check(machine.run(kernel, (1,), (64,), kernel.static_shared, parameters, memory, machine.Settings()))
    assert torch.equal(y, x.flip(0) + 2 * x)


@pytest.mark.parametrize(
    ("to", "from_", "message"),
    [
        (1, 0, r"shift.cu:5: st\.shared.*\n.*warp 1 lane 31: writes 4 bytes .* at byte 256 of near, which has 256"),
        (0, 1, r"shift.cu:8: ld\.shared.*\n.*warp 0 lane 0: reads 4 bytes .* at byte -4 of far, which has 256"),
    ],
)
def test_index_of_one_array_reaches_the_next(to, from_, message, tmp_path):
    if cuda_launch.unavailable():
        pytest.skip(str(cuda_launch.unavailable()))
    shifted(0, 0, tmp_path)
    with pytest.raises(PtxError, match=message):
        shifted(to, from_, tmp_path)
