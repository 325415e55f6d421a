"""Runs the body of a small PTX program."""

from __future__ import annotations

import textwrap

import numpy as np
import pytest
import torch

from tests.ptx import build, machine
from tests.ptx.machine import Settings, extents
from tests.ptx.text import entry_names

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


ERRORS = [
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
]
