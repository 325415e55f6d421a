"""A product by wgmma in PTX, and its misuses with the errors that tests/ptx reports."""

from __future__ import annotations

import torch

from tests.helpers.ptx_programs import run

WGMMA = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2, %f3, %f4}, %d6, %d7, %p1, 1, 1, 0, 0;"


# The product of A (64, 16) and B^T, with B (8, 16), in bfloat16. Rows have 32 bytes, so A has 128 and B has 16 pieces
# of 16 bytes. Shared memory holds them with a swizzle of 32 bytes.
PRODUCT = """
mul.wide.u32 %d5, %r0, 16; add.s64 %d5, %d0, %d5;
mov.u32 %r5, memory; shl.b32 %r6, %r0, 4; shr.u32 %r7, %r6, 3; and.b32 %r7, %r7, 16; xor.b32 %r6, %r6, %r7;
add.s32 %r6, %r5, %r6;
ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%d5]; st.shared.v4.b32 [%r6], {{%r10, %r11, %r12, %r13}};
setp.lt.u32 %p0, %r0, {pieces};
@%p0 ld.global.v4.b32 {{%r14, %r15, %r16, %r17}}, [%d5+2048];
@%p0 st.shared.v4.b32 [%r6+2048], {{%r14, %r15, %r16, %r17}};
fence.proxy.async.shared::cta;
bar.sync 0;
mov.b32 %f1, 0f00000000; mov.b32 %f2, %f1; mov.b32 %f3, %f1; mov.b32 %f4, %f1;
shr.u32 %r20, %r5, 4; cvt.u64.u32 %d6, %r20; or.b64 %d6, %d6, {descriptor}; add.s64 %d7, %d6, 128;
{before}
wgmma.fence.sync.aligned;
{scale}
{wgmma}
wgmma.commit_group.sync.aligned;
{between}
wgmma.wait_group.sync.aligned 0;
mul.wide.u32 %d8, %r0, 16; add.s64 %d8, %d1, %d8; st.global.v4.f32 [%d8], {{%f1, %f2, %f3, %f4}};
"""


ADD = "setp.ne.b32 %p1, %r5, -1;"  # scale-d is true: the wgmma adds to the accumulators


def one_product(before="", between="", descriptor=3 << 62 | 16 << 32, pieces=16, scale=ADD):
    values = torch.randn(72, 16).bfloat16()
    body = PRODUCT.format(
        before=before, between=between, descriptor=descriptor, pieces=pieces, scale=scale, wgmma=WGMMA
    )
    out = run(body, values.view(torch.int32), threads=128, out=torch.zeros(128, 4))
    thread = torch.arange(128)
    rows = thread // 32 * 16 + thread % 32 // 4
    found = torch.zeros(64, 8)
    for q in range(4):
        found[rows + 8 * (q // 2), 2 * (thread % 4) + q % 2] = out[:, q]
    return found, values[:64].float() @ values[64:].float().T


MISUSES = [
    (
        {"before": "shr.u32 %r21, %r0, 5; cvt.u64.u32 %d9, %r21; add.s64 %d6, %d6, %d9;"},
        "a wgmma that warp 0 of its warpgroup issues differently: descriptors",
    ),
    (
        {
            "before": f"{ADD} setp.ge.u32 %p2, %r0, 96; @%p2 bra OTHER;",
            "between": f"bra END; OTHER: wgmma.fence.sync.aligned; {WGMMA} wgmma.commit_group.sync.aligned; END:",
        },
        "a wgmma in whose place warp 0 of its warpgroup issues another instruction",
    ),
    (
        {"scale": "setp.lt.u32 %p1, %r0, 64;"},
        "a wgmma in whose place warp 0 of its warpgroup issues one with another scale-d",
    ),
    ({"scale": "setp.lt.u32 %p1, %r1, 16;"}, "a descriptor or scale that is not modelled: .* 0000ffff"),
    (
        {"scale": f"{ADD} add.f32 %f1, %f1, %f1;"},
        "on some path no wgmma.fence follows the last access to the accumulators, or the kernel's start",
    ),
    ({"before": "ld.shared.b64 %d6, [memory+4000];"}, "a descriptor or scale is undefined"),
    ({"before": "cvt.u64.u32 %d9, %r1; add.s64 %d6, %d6, %d9;"}, "lane 1: lanes differ in the descriptor of A"),
    ({"descriptor": 16 << 32}, "a descriptor or scale that is not modelled"),
    (
        {"before": "setp.ge.u32 %p2, %r0, 96; @%p2 bra OUT;", "between": "OUT:"},
        "this warp of its warpgroup never does",
    ),
    (
        {"pieces": 15},
        "a value that is stored is undefined; .* comes from a wgmma .*on unwritten shared bytes",
    ),
    ({"between": "add.f32 %f1, %f1, %f1;"}, "accumulator 0 was written while a wgmma"),
    ({"between": "st.shared.u32 [%r6], %r0;"}, "which a wgmma may still be reading"),
    (
        {"between": "mov.b32 %f5, %f1; st.global.f32 [%d4], %f5;"},
        "a value that is stored is undefined; the last undefined value comes from a wgmma",
    ),
    ({"before": "st.shared.u32 [%r6], %r0;"}, r"wrote, with no (fence\.proxy\.async|barrier) between"),
]
