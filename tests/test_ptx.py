"""Tests of tests/ptx, which executes PTX on the CPU, with small programs."""

from __future__ import annotations

import math
import re
import textwrap

import numpy as np
import pytest
import torch
from ptx import build, coverage, machine
from ptx.machine import PtxError, Settings, extents
from ptx.text import Unsupported, entry_names

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

HEAD = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry probe(.param .u64 in, .param .u64 out) {
    .reg .pred %p<20>; .reg .b16 %h<20>; .reg .b32 %r<40>; .reg .f32 %f<20>; .reg .b64 %d<20>;
    .shared .align 16 .b8 memory[4096];
    ld.param.u64 %d0, [in]; ld.param.u64 %d1, [out];
    mov.u32 %r0, %tid.x; mov.u32 %r1, %laneid; mul.wide.u32 %d2, %r0, 4;
    add.s64 %d3, %d0, %d2; add.s64 %d4, %d1, %d2;
    shl.b32 %r2, %r0, 2;
"""


def run(body, given, threads=32, seed=0, out=None, tensor_map=b"", end="ret;"):
    """Executes HEAD and `body` in one block; returns `out`, which by default has one element for each thread.

    HEAD sets %r0 to the thread's index, %r1 to its lane, %r2 to 4 times the index, %d0 and %d1 to the addresses of
    `given` and `out`, and %d3 and %d4 to the addresses of the thread's elements there, of 4 bytes each. With
    tensor_map, the bytes that `encode` of tests/ptx/tensor_map.py returns, the map's address is in %d10.
    """
    text = HEAD + textwrap.dedent(body) + f"\n{end}\n}}\n"
    if tensor_map:
        text = text.replace("probe(", "probe(.param .align 64 .b8 map[128], ")
        text = text.replace("mov.u32 %r0,", "mov.b64 %d10, map; cvta.param.u64 %d10, %d10; mov.u32 %r0,")
    (name,) = entry_names(text)
    kernel = machine.kernel(text, name)
    out = torch.zeros(threads, dtype=given.dtype) if out is None else out
    parameters = tensor_map + np.array([given.data_ptr(), out.data_ptr()], np.uint64).tobytes()
    settings = Settings(seed | seed << 16, 1_000_000)  # the upper 16 bits seed errors of .approx results
    shared = kernel.static_shared
    machine.check(machine.run(kernel, (1,), (threads,), shared, parameters, extents([given, out]), settings))
    return out


def ints(n=32):
    return torch.arange(n, dtype=torch.int32)


def test_unknown_instruction_is_named_with_kernel_and_line():
    with pytest.raises(Unsupported, match=r"probe, PTX line 12: frob\.b32 %r3, %r4"):
        run("frob.b32 %r3, %r4;", ints())


def test_lanes_diverge_and_meet_again():
    body = """
    ld.global.u32 %r3, [%d3];
    and.b32 %r4, %r3, 1;
    setp.eq.s32 %p0, %r4, 0;
    @%p0 bra EVEN;
    mul.lo.s32 %r5, %r3, 10;
    bra.uni JOIN;
    EVEN:
    neg.s32 %r5, %r3;
    JOIN:
    shfl.sync.bfly.b32 %r6, %r5, 1, 31, -1;
    st.global.u32 [%d4], %r6;
    """
    x = ints()
    here = torch.where(x % 2 == 0, -x, 10 * x)
    assert torch.equal(run(body, x), here.view(-1, 2).flip(1).reshape(-1))


def test_lanes_of_one_instruction_may_form_groups():
    body = """
    setp.eq.s32 %p1, %r0, %r0; and.b32 %r3, %r1, 28; mov.u32 %r4, 15; shl.b32 %r4, %r4, %r3;
    redux.sync.add.s32 %r5, %r1, %r4;
    shfl.sync.bfly.b32 %r6, %r5, 1, 31, %r4;
    vote.sync.ballot.b32 %r7, %p1, %r4;
    add.s32 %r5, %r5, %r6;
    xor.b32 %r5, %r5, %r7; xor.b32 %r5, %r5, %r4;
    st.global.u32 [%d4], %r5;
    """
    assert torch.equal(run(body, ints()), 2 * ints().view(8, 4).sum(1).repeat_interleave(4).int())


def test_code_around_a_barrier_may_be_laid_out_in_any_order():
    body = """
    setp.lt.u32 %p0, %r1, 16;
    @%p0 bra LATER;
    MEET:
    bar.sync 0;
    st.global.u32 [%d4], %r0;
    bra DONE;
    LATER:
    add.s32 %r0, %r0, 100;
    bra MEET;
    DONE:
    """
    expected = ints(64)
    expected[expected % 32 < 16] += 100
    assert torch.equal(run(body, ints(64), threads=64), expected)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("add.s64 %d5, %d3, 4; ld.global.u32 %r3, [%d5];", r"lane 31: reads 4 bytes at \w+, outside of every tensor"),
        ("add.s64 %d5, %d4, -4; st.global.u32 [%d5], %r0;", r"lane 0: writes 4 bytes at \w+, outside of every tensor"),
        ("add.s64 %d5, %d0, 2; ld.global.u32 %r3, [%d5];", "is not a multiple of 4"),
        ("st.global.u32 [%d1], %r0;", r"writes another value at byte 0 of a tensor than block 0 warp 0 lane \d+"),
        ("mov.u32 %r5, memory; st.shared.u32 [%r5], %r0;", r"another value to shared byte 0 than lane \d+ of the same"),
        (
            "ld.shared.u32 %r3, [memory]; st.global.u32 [%d4], %r3;",
            "is undefined; the last undefined value comes from a read of shared bytes that",
        ),
        ("ld.shared.u32 %r3, [memory+4096];", "reads 4 bytes of shared memory at byte 4096 of memory"),
        ("setp.lt.u32 %p0, %r1, 5; @%p0 bra OUT; shfl.sync.idx.b32 %r3, %r0, 0, 31, -1; OUT:", "have left"),
        ("shfl.sync.idx.b32 %r3, %r0, 0, 31, 65535;", "lane 16: executes it, but is not in its own mask 0000ffff"),
        ("setp.lt.u32 %p0, %r1, 5; @%p0 bar.sync 0;", "only lanes 0000001f of ffffffff execute the barrier"),
        ("LOOP: bra LOOP;", "more than 1000000 instructions in one launch"),
        ("trap;", "executes trap"),
    ],
)
def test_errors(body, message):
    with pytest.raises(PtxError, match=message) as caught:
        run(body, ints())
    assert re.search(r"probe, PTX line \d+, no source line: ", str(caught.value))
    assert "block (0,0,0) warp 0" in str(caught.value)


EXCHANGE = """
mov.u32 %r5, memory;
add.s32 %r6, %r5, %r2;
st.shared.u32 [%r6], %r0;
{barrier}
xor.b32 %r7, %r0, {other};
shl.b32 %r7, %r7, 2;
add.s32 %r8, %r5, %r7;
ld.shared.u32 %r9, [%r8];
st.global.u32 [%d4], %r9;
"""


OVERWRITE = """
st.global.u32 [%d4], %r0;
{barrier}
xor.b32 %r7, %r0, 1;
mul.wide.u32 %d5, %r7, 4;
add.s64 %d5, %d1, %d5;
st.global.u32 [%d5], %r0;
"""


def test_race_between_lanes_that_write_global_memory_is_found():
    assert torch.equal(run(OVERWRITE.format(barrier="bar.warp.sync -1;"), ints()), ints() ^ 1)
    for seed in range(4):
        with pytest.raises(PtxError, match=r"writes another value at byte \d+ .* no synchronization between"):
            run(OVERWRITE.format(barrier=""), ints(), seed=seed)


def test_race_between_warps_is_found_in_every_order():
    good = run(EXCHANGE.format(barrier="bar.sync 0;", other=32), ints(64), threads=64)
    assert torch.equal(good, ints(64) ^ 32)
    for seed in range(4):
        with pytest.raises(PtxError, match=r"with no barrier between|never written"):
            run(EXCHANGE.format(barrier="", other=32), ints(64), threads=64, seed=seed)


def test_undefined_bytes_are_no_error_where_their_value_is_discarded():
    body = """
    mov.u32 %r5, memory;
    add.s32 %r6, %r5, %r2;
    setp.lt.u32 %p0, %r1, 7;
    @%p0 st.shared.u32 [%r6], %r0;
    bar.warp.sync -1;
    ld.shared.u32 %r9, [%r6];
    add.s32 %r9, %r9, 1;
    selp.b32 %r9, %r9, -1, %p0;
    st.global.u32 [%d4], %r9;
    """
    assert torch.equal(run(body, ints()), torch.where(ints() < 7, ints() + 1, -1))


ASYNC = """
mov.u32 %r5, memory;
add.s32 %r6, %r5, %r2;
cp.async.ca.shared.global [%r6], [%d3], 4;
{commit}
{wait}
bar.sync 0;
ld.shared.u32 %r9, [%r6];
st.global.u32 [%d4], %r9;
"""


def test_copies_land_at_their_wait():
    x = ints() * 3
    assert torch.equal(run(ASYNC.format(commit="cp.async.commit_group;", wait="cp.async.wait_group 0;"), x), x)
    for commit, wait in (("cp.async.commit_group;", "cp.async.wait_group 1;"), ("", "cp.async.wait_group 0;")):
        with pytest.raises(PtxError, match=r"which a cp\.async may still be writing"):
            run(ASYNC.format(commit=commit, wait=wait), x)


def test_a_copy_of_what_another_thread_wrote_needs_a_barrier():
    """Each thread of two warps writes an element, then copies the element of the other warp."""
    body = """
    st.global.u32 [%d4], %r0;
    {barrier}
    xor.b32 %r3, %r2, 128; cvt.u64.u32 %d5, %r3; add.s64 %d5, %d1, %d5;
    mov.u32 %r5, memory; add.s32 %r6, %r5, %r2;
    cp.async.ca.shared.global [%r6], [%d5], 4; cp.async.commit_group; cp.async.wait_group 0;
    """
    run(body.format(barrier="bar.sync 0;"), ints(64), threads=64)
    with pytest.raises(PtxError, match="reads global memory that another thread wrote"):
        run(body.format(barrier=""), ints(64), threads=64)


def test_an_exact_zero_rounded_down_is_minus_zero():
    body = "mov.f32 %f0, 0f3F800000; mov.f32 %f1, 0fBF800000; fma.rm.f32 %f2, %f0, %f0, %f1; st.global.f32 [%d4], %f2;"
    assert run(body, torch.zeros(1), threads=1).signbit().item()


ATOMIC = """
mov.u32 %r5, memory; add.s32 %r6, %r5, %r2; st.shared.u32 [%r6], %r0;
atom.shared.add.u32 %r7, [%r6], 1;
{then}
xor.b32 %r8, %r6, {other};
ld.shared.u32 %r9, [%r8]; st.global.u32 [%d4], %r9;
"""


def test_a_read_of_another_lanes_atomic_needs_a_barrier():
    assert torch.equal(run(ATOMIC.format(then="", other=0), ints()), ints() + 1)
    synchronized = ATOMIC.format(then="bar.warp.sync 0xffffffff;", other=4)
    assert torch.equal(run(synchronized, ints()), (ints() ^ 1) + 1)
    with pytest.raises(PtxError, match=r"lane \d+ of its warp wrote, with no bar\.warp\.sync between"):
        run(ATOMIC.format(then="", other=4), ints())


QUOTIENT = "mov.f32 %f2, 0f3FC00000; {}.f32 %f1, %f2, %f0;"  # 1.5 / x


@pytest.mark.parametrize(
    ("instruction", "exact", "ulps"),
    [
        ("rcp.approx.f32 %f1, %f0;", lambda x: 1 / x, 1),
        ("ex2.approx.f32 %f1, %f0;", torch.exp2, 2),
        (QUOTIENT.format("div.full"), lambda x: 1.5 / x, 2),
        (QUOTIENT.format("div.approx"), lambda x: 1.5 / x, 2),
    ],
)
def test_errors_in_ulps(instruction, exact, ulps):
    """The PTX ISA bounds them in ulps: 2^-23 of a result just above a power of two, half of that just below it."""
    body = f"ld.global.f32 %f0, [%d3]; {instruction} st.global.f32 [%d4], %f1;"
    x = torch.linspace(-2.003, -0.998, 1024)
    results = [run(body, x, threads=1024, seed=seed) for seed in (0, 1, 2, 3, 1)]
    rounded = exact(x.double()).float().view(torch.int32)
    assert torch.equal(results[0].view(torch.int32), rounded)
    assert torch.equal(results[1], results[4])
    assert not torch.equal(results[1], results[2])
    steps = torch.stack(results[1:]).view(torch.int32) - rounded
    assert steps.unique().tolist() == [k for k in range(-ulps, ulps + 1) if k]


@pytest.mark.parametrize(
    ("instruction", "given", "expected"),
    [
        ("rcp.approx.f32 %f1, %f0;", [0.0, -0.0, math.inf, -math.inf], [math.inf, -math.inf, 0.0, -0.0]),
        ("ex2.approx.f32 %f1, %f0;", [0.0, -0.0, math.inf, -math.inf], [1.0, 1.0, math.inf, 0.0]),
        ("tanh.approx.f32 %f1, %f0;", [0.0, -0.0, math.inf, -math.inf], [0.0, -0.0, 1.0, -1.0]),
        ("sin.approx.f32 %f1, %f0;", [0.0, -0.0, math.inf], [0.0, -0.0, math.nan]),
        ("cos.approx.f32 %f1, %f0;", [0.0, -0.0, math.inf], [1.0, 1.0, math.nan]),
        (QUOTIENT.format("div.approx"), [1.5 * 2**126, -1.5 * 2**126, math.inf], [0.0, -0.0, 0.0]),
        ("div.approx.f32 %f1, %f0, 0f7F000001;", [math.inf, -3.0], [math.nan, -0.0]),  # the divisor is above 2^126
    ],
)
def test_values_that_the_isa_tabulates_get_no_error(instruction, given, expected):
    x = torch.tensor(given)
    body = f"ld.global.f32 %f0, [%d3]; {instruction} st.global.f32 [%d4], %f1;"
    for seed in (0, 1, 2):
        got = run(body, x, threads=len(given), seed=seed)
        torch.testing.assert_close(got, torch.tensor(expected), rtol=0, atol=0, equal_nan=True)
        assert got.signbit()[~got.isnan()].tolist() == [math.copysign(1, each) < 0 for each in expected if each == each]


def test_reciprocals_in_float64_flush_subnormal_numbers():
    """rcp.approx.ftz.f64 of a subnormal number is infinite; a subnormal result becomes zero."""
    body = """
    mul.wide.u32 %d5, %r0, 8; add.s64 %d6, %d0, %d5; add.s64 %d7, %d1, %d5;
    ld.global.f64 %d8, [%d6]; rcp.approx.ftz.f64 %d9, %d8; st.global.f64 [%d7], %d9;
    """
    x = torch.tensor([2.0**-1023, -(2.0**-1023), 2.0**1023, 2.0, math.nan], dtype=torch.float64)
    got = run(body, x, threads=5)
    assert got[:4].tolist() == [math.inf, -math.inf, 0.0, 0.5]
    assert got.view(torch.int64)[4] == 0x7FFFFFFF << 32


@pytest.mark.parametrize(
    ("name", "exact", "bound", "start"),
    [("lg2", torch.log2, 2**-22, 0.51), ("sin", torch.sin, 2**-20.5, 0.51), ("cos", torch.cos, 2**-14.7, 300.0)],
)
def test_absolute_errors_of_approximate_instructions_are_bounded(name, exact, bound, start):
    body = f"ld.global.f32 %f0, [%d3]; {name}.approx.f32 %f1, %f0; st.global.f32 [%d4], %f1;"
    x = torch.linspace(start, start + 1.48, 1024)
    results = [run(body, x, threads=1024, seed=seed) for seed in range(8)]
    errors = torch.stack(results[1:]).double() - exact(x.double())
    assert bound / 2 < errors.abs().max() <= bound


@pytest.mark.parametrize(
    ("kind", "expected"), [("s32.f32", 0), ("u32.f32", 0), ("s64.f32", 1 << 63), ("u32.f64", 1 << 31)]
)
def test_nan_as_an_integer(kind, expected):
    """NaN becomes 0; if source or destination has 64 bits, only the highest bit of the integer is set (PTX ISA 9.0)."""
    to, source = ("%d6" if "64." in kind else "%r3"), ("%d5" if ".f64" in kind else "%f0")
    body = f"""
    ld.global.f32 %f0, [%d3];
    cvt.f64.f32 %d5, %f0; mov.b64 %d6, 0; cvt.rzi.{kind} {to}, {source};
    """
    body += "st.global.b64 [%d1], %d6;" if "64." in kind else "cvt.u64.u32 %d6, %r3; st.global.b64 [%d1], %d6;"
    out = run(body, torch.tensor([math.nan]), threads=1, out=torch.zeros(1, dtype=torch.int64))
    assert out.item() % 2**64 == expected


def test_mma_of_fragments():
    """An m16n8k16 product; the PTX ISA gives the lane and the register of each element."""
    torch.manual_seed(0)
    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 8).bfloat16()
    words = torch.zeros(32, 6, dtype=torch.int32)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        pairs = [a[g + 8 * (q & 1), 2 * t + 8 * (q >> 1) :][:2] for q in range(4)]
        pairs += [b[2 * t + 8 * q :, g][:2] for q in range(2)]
        words[lane] = torch.stack([each.contiguous() for each in pairs]).view(torch.int32).flatten()
    body = """
    mul.wide.u32 %d5, %r0, 24; add.s64 %d5, %d0, %d5; mul.wide.u32 %d6, %r0, 16; add.s64 %d6, %d1, %d6;
    ld.global.v2.b32 {%r10, %r11}, [%d5]; ld.global.v2.b32 {%r12, %r13}, [%d5+8];
    ld.global.v2.b32 {%r14, %r15}, [%d5+16];
    mov.f32 %f0, 0f00000000;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
        {%f1,%f2,%f3,%f4}, {%r10,%r11,%r12,%r13}, {%r14,%r15}, {%f0,%f0,%f0,%f0};
    st.global.v4.f32 [%d6], {%f1,%f2,%f3,%f4};
    """
    out = run(body, words, out=torch.zeros(32, 4))
    expected = a.float() @ b.float()
    got = torch.zeros(16, 8)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        got[g, 2 * t : 2 * t + 2], got[g + 8, 2 * t : 2 * t + 2] = out[lane, :2], out[lane, 2:]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_source_line_is_counted_once_and_its_places_for_each_kernel():
    places = [
        {"a.py:1": (1, 2), "a.py:2 in a.py:9": (0, 1), "a.py:3": (1, 1), "a.py:3 bar.sync": (0, 1)},
        {"a.py:2 in a.py:7": (2, 2), "b.py:1": (0, 3), "no source line": (0, 1)},
    ]
    kernels = {f"triton {k}": {"launches": 1, "specialisations": [k], "places": each} for k, each in enumerate(places)}
    data = coverage.merge({}, {"launches": 2, "steps": 9, "seconds": 0.1, "kernels": kernels})
    assert coverage.lines(data) == {"a.py:1": True, "a.py:2": True, "a.py:3": True, "b.py:1": False}
    missed = coverage.missed(data)
    assert missed == {"triton 0": ["a.py:2 in a.py:9", "a.py:3 bar.sync"], "triton 1": ["b.py:1", "no source line"]}
    assert coverage.waits_missed(data) == ["triton 0: bar.sync at a.py:3"]
    assert "2 of 4 places never executed" in coverage.report(data)
