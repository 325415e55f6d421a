"""Every error that tests/ptx/executor can report, each caused by a small program."""

from __future__ import annotations

import re

import pytest
import torch

from tests.helpers.ptx_programs import ERRORS, EXCHANGE, ints, pytestmark, run  # noqa: F401
from tests.helpers.wgmma import MISUSES, one_product
from tests.ptx import build, tensor_map
from tests.ptx.machine import PtxError
from tests.ptx.text import parse

# Name: (program, pattern of the expected error). A block has one warp, or two if the name begins with "warps".
CASES = {
    # bounds, alignment and unwritten bytes
    "store behind shared memory": (
        "st.shared.u32 [memory+4096], %r0;",
        "writes 4 bytes of shared memory at byte 4096 of memory, which has 4096",
    ),
    "load before shared memory": (
        "mov.u32 %r3, memory; ld.shared.u32 %r4, [%r3+-4];",
        "reads 4 bytes of shared memory at byte -4 of memory, which has 4096",
    ),
    "misaligned shared load": ("ld.shared.u32 %r3, [memory+2];", "shared address 2 is not a multiple of 4"),
    "misaligned shared store": ("st.shared.u32 [memory+6], %r0;", "shared address 6 is not a multiple of 4"),
    "global atomic": ("atom.global.add.u32 %r3, [%d2], 1;", r"updates 4 bytes at \w+, outside of every tensor"),
    "shared atomic": ("atom.shared.add.u32 %r3, [memory], 1;", "updates shared bytes that were never written"),
    "no end": ("add.s32 %r3, %r0, 1;", "ran past the last instruction"),
    # undefined values
    "undefined guard": ("{garbage} setp.eq.s32 %p0, %r3, 0; @%p0 trap;", "a guard is undefined"),
    "undefined predicate": (
        "{garbage} setp.eq.s32 %p0, %r3, 0; bar.red.or.pred %p1, 0, %p0;",
        "the predicate of a bar.red is",
    ),
    "undefined address of a load": ("{garbage} ld.shared.u32 %r4, [%r3];", "an address is undefined"),
    "undefined address of a matrix": (
        "{garbage} ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r4}}, [%r3];",
        "an address is",
    ),
    "undefined address of a fragment": (
        "{garbage} stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r3], {{%r0}};",
        "an address is",
    ),
    "undefined target of a copy": ("{garbage} cp.async.ca.shared.global [%r3], [%d3], 4;", "an address is undefined"),
    "undefined source of a copy": (
        "{garbage} cvt.u64.u32 %d5, %r3; cp.async.ca.shared.global [memory], [%d5], 4;",
        "an address is undefined",
    ),
    "undefined size of a copy": (
        "{garbage} cp.async.ca.shared.global [memory], [%d3], 4, %r3;",
        "the number of bytes to copy is undefined",
    ),
    "undefined mbarrier": ("{garbage} mbarrier.init.shared::cta.b64 [%r3], 1;", "an operand of an mbarrier is"),
    "undefined mask": ("{garbage} vote.sync.any.pred %p1, %p0, %r3;", "the mask of a collective is undefined"),
    "undefined lane of a shuffle": (
        "{garbage} shfl.sync.idx.b32 %r4, %r0, %r3, 31, -1; st.global.u32 [%d3], %r4;",
        "a value that is stored is undefined",
    ),
    "undefined clamp of a shuffle": (
        "{garbage} shfl.sync.idx.b32 %r4|%p0, %r0, 0, %r3, -1; @%p0 trap;",
        "a guard is undefined",
    ),
    "undefined value": (
        "st.global.u32 [%d4], %r0; xor.b32 %r3, %r2, 4; cvt.u64.u32 %d5, %r3; add.s64 %d5, %d1, %d5; "
        "ld.global.u32 %r4, [%d5]; st.global.u32 [%d3], %r4;",
        "a value that is stored is undefined; .* from a read of global memory that another thread wrote, with no",
    ),
    # races in shared memory
    "warps that read each other's elements": (
        EXCHANGE.format(barrier="", other=32),
        r"(?s)writes shared byte \d+ that warp 0 reads, .*reads shared byte \d+ that warp 0 lane \d+ wrote, with no",
    ),
    "lanes that read each other's elements": (
        EXCHANGE.format(barrier="", other=1),
        r"reads shared byte \d+ that lane \d+ of its warp wrote, with no bar\.warp\.sync between",
    ),
    "lane that writes what another one read": (
        "{element} st.shared.u32 [%r6], %r0; bar.warp.sync -1; xor.b32 %r7, %r6, 4; ld.shared.u32 %r8, [%r7]; "
        "st.shared.u32 [%r6], %r8;",
        r"writes shared byte \d+ that another lane of its warp reads, with no bar\.warp\.sync between",
    ),
    "warps that write other values": (
        "st.shared.u32 [memory], %r0;",
        "writes shared byte 0 that warp 0 lane 31 wrote with another value, with no barrier between",
    ),
    # cp.async
    "read before the wait": (
        "{element} cp.async.ca.shared.global [%r6], [%d3], 4; ld.shared.u32 %r8, [%r6];",
        r"reads shared byte \d+, which a cp\.async may still be writing",
    ),
    "write before the wait": (
        "{element} cp.async.ca.shared.global [%r6], [%d3], 4; st.shared.u32 [%r6], %r0;",
        r"writes shared byte \d+, which a cp\.async may still be writing",
    ),
    "too many bytes": (
        "mov.u32 %r3, 8; cp.async.ca.shared.global [memory], [%d0], 4, %r3;",
        "reads 8 bytes for a copy of 4",
    ),
    "misaligned copy of no bytes": (
        "mov.u32 %r3, 0; add.s64 %d5, %d3, 2; cp.async.ca.shared.global [memory], [%d5], 4, %r3;",
        "is not a multiple of 4",
    ),
    "commit by some lanes": (
        "{few} @%p0 cp.async.commit_group;",
        "commit_group by lanes 0000001f of ffffffff: not modelled",
    ),
    "wait by some lanes": (
        "{few} @%p0 cp.async.wait_group 0;",
        "wait_group by lanes 0000001f of ffffffff: not modelled",
    ),
    # lanes of a warp, and warps of a block
    "absent lane": (
        "setp.ge.u32 %p0, %r1, 16; @%p0 bra OUT; shfl.sync.idx.b32 %r3, %r0, 31, 31, 65535; OUT:",
        "lanes 0000ffff shuffle from lanes that do not take part",
    ),
    "lanes that left": (
        "{few} @%p0 ret; shfl.sync.idx.b32 %r3, %r0, 31, 31, -1;",
        "the mask ffffffff has lanes 0000001f, which have left",
    ),
    "two barriers of a warp": (
        "{few} @%p0 bra FEW; bar.warp.sync -1; bra END; FEW: bar.warp.sync -1; END:",
        r"waits for lanes \w+, which wait elsewhere",
    ),
    "warps at two barriers": (
        "setp.lt.u32 %p0, %r0, 32; @%p0 bra FIRST; bar.sync 1; bra END; FIRST: bar.sync 2; END:",
        "waits at a barrier that the other warps never reach",
    ),
    "one warp": (
        "mov.b32 %f1, 0f00000000; wgmma.fence.sync.aligned; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
        "{{%f1, %f2, %f3, %f4}}, %d6, %d7, %p1, 1, 1, 0, 0;",
        "a wgmma by fewer than four warps of 32 lanes",
    ),
    # mbarriers
    "mbarriers of lanes": ("shl.b32 %r3, %r1, 3; {init} [%r3], 1;", "lanes have different addresses of an mbarrier"),
    "misaligned mbarrier": ("{init} [memory+4], 1;", "the mbarrier's address 4 is not a multiple of 8, or outside"),
    "many mbarriers": (
        " ".join(f"{{init}} [memory+{8 * k}], 1;" for k in range(17)),
        "more than 16 mbarriers in a block: not modelled",
    ),
    "store to an mbarrier": (
        "{init} [memory], 1; st.shared.u32 [memory+4], 0;",
        "writes shared byte 4 of an mbarrier in use",
    ),
    "fence by some lanes": (
        "{few} @%p0 fence.proxy.async.shared::cta;",
        "async by lanes 0000001f of ffffffff: not modelled",
    ),
}
PARTS = {
    "garbage": "ld.shared.u32 %r3, [memory+64];",
    "element": "mov.u32 %r5, memory; add.s32 %r6, %r5, %r2;",
    "few": "setp.lt.u32 %p0, %r1, 5;",
    "init": "mbarrier.init.shared::cta.b64",
}


# Accesses beyond one of two more variables. On a GPU the first one lands in the other variable.
TWO = ".shared .align 4 .b8 near[100]; .shared .align 128 .b8 far[256]; mov.u32 %r5, near; mov.u32 %r6, far;"
BEYOND = {
    "store": ("st.shared.u32 [near+128], %r0;", "writes 4 bytes of shared memory at byte 128 of near, which has 100"),
    "load before": ("ld.shared.u32 %r3, [%r6+-4];", "reads 4 bytes of shared memory at byte -4 of far, which has 256"),
    "vector over the end": ("st.shared.v2.u32 [near+96], {%r0, %r0};", "writes 8 bytes .* at byte 96 of near, which"),
    "lane": ("add.s32 %r3, %r5, %r2; ld.shared.u32 %r4, [%r3];", "reads 4 bytes .* at byte 100 of near, which has"),
    "atomic": ("atom.shared.add.u32 %r3, [near+100], 1;", "reads 4 bytes .* at byte 100 of near, which has 100"),
    "copy": ("cp.async.ca.shared.global [%r6+256], [%d0], 4;", "writes 4 bytes .* at byte 256 of far, which has 256"),
    "matrix": (
        "add.s32 %r3, %r6, 144; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r7, %r8, %r9, %r10}, [%r3+112];",
        "reads 16 bytes .* at byte 256 of far, which has 256",
    ),
    "fragment": ("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r6+256], {%r0};", "writes 16 bytes .* at byte 256 of far"),
    "mbarrier": ("mbarrier.init.shared::cta.b64 [%r6+-8], 1;", "writes 8 bytes .* at byte -8 of far, which has 256"),
}


@pytest.mark.parametrize("name", BEYOND)
def test_access_beyond_a_variable(name):
    body, message = BEYOND[name]
    with pytest.raises(PtxError, match=message):
        run(f"{TWO} {body}", ints())


def test_variables_are_apart_by_their_sizes_with_offsets_in_1024_bytes_as_without_gaps():
    sizes = {"a": (4, 100), "b": (128, 5000), "c": (16, 48), "d": (1024, 1024), "e": (2, 6), "rest": (16, 0)}
    declared = " ".join(f".shared .align {align} .b8 {name}[{size or ''}];" for name, (align, size) in sizes.items())
    (entry,) = parse(f".visible .entry probe() {{ {declared} ret; }}")
    packed, last = 0, None
    for name, (align, size) in sizes.items():
        packed = -(-packed // align) * align
        offset, size_there = entry.shared[name]
        assert size_there == size
        assert (offset - packed) % 1024 == 0
        if last:
            assert offset - sum(last) >= max(1024, last[1], size)
        packed, last = packed + size, (offset, size)
    assert entry.static_shared == packed
    assert entry.shared_gaps == entry.shared["rest"][0] - packed


def execute(name):
    threads = 64 if name.startswith("warps") else 32
    run(CASES[name][0].format(**PARTS), ints(threads), threads, end="" if name == "no end" else "ret;")


@pytest.mark.parametrize("name", CASES)
def test_error(name):
    with pytest.raises(PtxError, match=CASES[name][1]):
        execute(name)


def test_a_copy_of_no_bytes_reads_nothing():
    """With a source of 0 bytes cp.async writes zeros, and its address may be outside of every tensor."""
    body = """
    setp.lt.u32 %p0, %r1, 7; selp.b32 %r3, 4, 0, %p0; selp.b64 %d5, %d3, 4096, %p0;
    mov.u32 %r5, memory; add.s32 %r6, %r5, %r2; cp.async.ca.shared.global [%r6], [%d5], 4, %r3;
    cp.async.commit_group; cp.async.wait_group 0;
    ld.shared.u32 %r9, [%r6]; st.global.u32 [%d4], %r9;
    """
    assert torch.equal(run(body, ints() + 1), torch.where(ints() < 7, ints() + 1, 0))


def test_a_launch_ends_after_a_thousand_errors():
    with pytest.raises(PtxError, match=r"^10\d\d errors in probe"):
        run("LOOP: ld.shared.u32 %r3, [memory+2]; bra LOOP;", ints())


# Two warps copy 8 rows of 8 floats, with a swizzle of 32 bytes, and read one element per thread.
BULK = """
setp.eq.u32 %p0, %r0, 0; mov.u32 %r5, memory; add.s32 %r6, %r5, 2048; mov.b32 %r7, 0;
@%p0 mbarrier.init.shared::cta.b64 [%r6], 1;
{before}
bar.sync 0;
{arrive}
@%p0 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r5+{to}], [%d10, {{%r7, %r7}}], [%r6];
{issued}
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r6], 0; @!%p2 bra WAIT;
shr.u32 %r8, %r2, 3; and.b32 %r8, %r8, 16; xor.b32 %r8, %r8, %r2; add.s32 %r8, %r5, %r8;
READ: ld.shared.b32 %r9, [%r8]; st.global.b32 [%d4], %r9;
"""
ARRIVE = "@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r6], 256;"
# Warp 1 passes the wait, but long after warp 0 has waited.
LATE = """
setp.lt.u32 %p3, %r0, 32; @%p3 bra WAIT; mov.u32 %r10, 0; add.s32 %r8, %r5, %r2;
LOOP: add.s32 %r10, %r10, 1; setp.lt.u32 %p4, %r10, 20000; @%p4 bra LOOP;
"""


def bulk(before="", arrive=ARRIVE, to=0, issued="", offset=0, keep=True, seed=0):
    given = torch.randn(8, 8)
    described = tensor_map.encode(given.data_ptr() + offset, 4, (8, 8), (8, 1), (8, 8), 1)
    body = BULK.format(before=before, arrive=arrive, to=to, issued=issued)
    out = run(body, given, 64, seed, out=torch.zeros(8, 8), tensor_map=described if keep else b"\0" * tensor_map.BYTES)
    return out, given


def test_bulk_copy():
    assert torch.equal(*bulk())


BULK_CASES = {
    "undefined corner": ({"before": "ld.shared.b32 %r7, [memory+1000];"}, "an address or coordinate is undefined"),
    "no arrival": (
        {"arrive": ""},
        "waits at the mbarrier at 2048: 1 arrivals are missing, and 256 of 0 bytes have arrived",
    ),
    "too few bytes": ({"arrive": ARRIVE.replace("256", "128")}, "256 bytes arrive, but 128 are expected"),
    "no map": ({"keep": False}, "expected a tensor map of 2 dimensions"),
    "another tensor": ({"offset": 1 << 20}, r"reads 32 bytes at \w+, outside of every tensor"),
    "unaligned": ({"to": 16}, "shared address 16 is not a multiple of 128"),
    "source of another lane": (
        {"arrive": f"{ARRIVE} setp.eq.u32 %p1, %r0, 1; @%p1 st.global.b32 [%d3], %r0;"},
        "reads global memory that another thread wrote, with no synchronization",
    ),
    "no fence": (
        {"before": "st.shared.b32 [memory], 0;"},
        "writes shared byte 0 that warp . wrote, with no fence.proxy.async",
    ),
    "two arrivals": ({"issued": ARRIVE}, "arrives again before a wait found phase 0 complete"),
    "invalidated": (
        {"issued": "@%p0 mbarrier.inval.shared::cta.b64 [%r6];"},
        "the mbarrier is invalidated while 256 bytes for it may still be in flight",
    ),
    "no wait": ({"issued": "ret;"}, "the block ends while 256 bytes for the mbarrier at 2048 may still be in flight"),
    "read by another warp": (
        {"issued": f"{LATE} bra READ;", "seed": 1},
        r"reads shared byte \d+ that a bulk copy wrote, without a wait at its mbarrier",
    ),
    "write by another warp": (
        {"issued": f"{LATE} st.shared.b32 [%r8], %r10; ret;", "seed": 1},
        r"writes shared byte \d+ that a bulk copy wrote, without a wait at its mbarrier",
    ),
}


@pytest.mark.parametrize("name", BULK_CASES)
def test_misuse_of_a_bulk_copy(name):
    change, message = BULK_CASES[name]
    with pytest.raises(PtxError, match=message):
        bulk(**change)


_CALL = re.compile(r'(?:report|undefined_use|undefined_from|check_defined)\([^;"]*((?:"[^"]*"\s*)+)')


def messages():
    """Every message of the executor: formats of printf, and the parts that name an undefined value and its origin."""
    sources = [each.read_text() for each in sorted((build.HERE / "executor").iterdir())]
    literals = [found for text in sources for found in _CALL.findall(text)]
    return sorted({"".join(re.findall(r'"([^"]*)"', each)) for each in literals})


def error_of(call):
    try:
        call()
    except PtxError as error:
        return str(error)
    return ""


def test_every_message_has_a_program_that_causes_it():
    errors = [error_of(lambda name=name: execute(name)) for name in CASES]
    errors += [error_of(lambda body=body: run(body, ints())) for body, _ in ERRORS]
    errors += [error_of(lambda change=change: bulk(**change)) for change, _ in BULK_CASES.values()]
    errors += [error_of(lambda change=change: one_product(**change)) for change, _ in MISUSES]
    known = messages()
    assert len(known) > 50
    missing = []
    for each in known:
        pattern = re.escape(each.removesuffix(" (instruction %u)"))
        if not re.search(re.sub(r"%\w+", r".+", pattern), "\n".join(errors)):
            missing.append(each)
    assert not missing
