"""Triton's PTX for sm_90, executed on the CPU by tests/ptx: its results, and defects planted in it."""

from __future__ import annotations

import re

import pytest
import torch

from tests.helpers.grouped_gemm import DTYPES, check, judge, offsets_of, results
from tests.helpers.targets import TARGETS, reason_to_skip, running
from tests.ptx import plant, session, summary
from tests.ptx.machine import PtxError

triton = pytest.importorskip("triton", reason="Triton is not installed")

import moe_kernels as mk
from tests.helpers import expert_norms as norms
from tests.helpers.expert_mlp import leaves_of
from tests.helpers.ptx_programs import run
from tests.helpers.tree_gate import products_and_tree_in_one_kernel
from tests.helpers.wgmma import MISUSES, one_product
from tests.ptx import triton_launch
from tests.ptx.text import Unsupported

TARGET = next(each for each in TARGETS if each.backend == "triton")
REASON = reason_to_skip(TARGET) or ("the kernels run on a GPU or are interpreted" if not TARGET.executed else "")
pytestmark = pytest.mark.skipif(
    bool(REASON) or TARGET.interpreted, reason=REASON or "TRITON_INTERPRET=1: no PTX is compiled"
)
SHORT = DTYPES[1:]


@pytest.fixture(autouse=True)
def sm_90():
    with running(TARGET), triton_launch.capability(90):
        yield


def opcodes(launches) -> set[str]:
    """The executed opcodes, with types and without operands."""
    texts = [
        text for each in launches for text, runs in zip(each.kernel.texts, each.counters["runs"], strict=False) if runs
    ]
    return {re.sub(r"^@\S+ ", "", text).split(" ")[0] for text in texts}


# Name: ((rows, columns of x, columns of the weights, experts), (rows, columns) of a tile in forward).
SIZES = {
    "few rows": ((150, 208, 144, 5), (128, 256)),
    "narrow": ((600, 80, 112, 5), (128, 128)),
    "wide": ((600, 80, 272, 5), (128, 256)),
    "eights": ((150, 72, 120, 5), (128, 128)),
    "odd": ((150, 33, 70, 5), (64, 64)),  # no TMA: the strides are no multiples of 16 bytes
}


BF16, FP16 = SHORT


@pytest.mark.parametrize(("kind", "dtype", "gathered"), [
    *((kind, BF16, i % 2 == 1) for i, kind in enumerate(SIZES)), ("narrow", FP16, True)
], ids=str)  # fmt: skip
def test_grouped_gemm(kind, dtype, gathered):
    sizes, tile = SIZES[kind]
    with session.recorded() as launches:
        check(TARGET, dtype, "adversarial" if gathered else "zipf", sizes, "gelu", gathered)
    used = opcodes(launches)
    assert any(name.startswith("wgmma.mma_async") for name in used)
    copies = [name for name in used if name.startswith("cp.async.bulk.tensor")]
    assert bool(copies) == (kind != "odd")
    forward = next(each for each in launches if each.kernel.title == "_grouped_gemm_fwd")
    rows, _, columns, experts = sizes
    assert forward.grid[0] == (rows // tile[0] + experts + 1) * -(-columns // tile[1])


def test_few_rows_without_gradients():
    x, weight, bias = (torch.randn(shape).to(BF16) for shape in ((150, 208), (5, 208, 144), (5, 144)))
    given = x, weight.div_(208**0.5), offsets_of("zipf", 150)
    with session.recorded() as launches:
        got = mk.grouped_gemm(*given, bias=bias, activation="gelu", backend="triton")
    expected = mk.grouped_gemm(*given, bias=bias, activation="gelu", backend="reference")
    torch.testing.assert_close(got, expected, rtol=2.0**-7, atol=2.0**-7)
    assert launches[0].grid[0] == (150 // 64 + 5 + 1) * 2  # tiles of 64 x 128


def test_gated():
    check(TARGET, BF16, "zipf", (150, 48, 128, 5), "swiglu", gathered=True)  # narrow tiles
    check(TARGET, BF16, "adversarial", (600, 32, 288, 5), "geglu", gathered=False)


@pytest.mark.parametrize("kind", ["few rows", "odd"])
def test_float32(kind):
    with session.recorded() as launches:
        check(TARGET, torch.float32, "zipf", SIZES[kind][0], "gelu", gathered=True)
    assert "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32" in opcodes(launches)  # three TF32 products


@pytest.mark.parametrize("width", [(40, 72), (33, 70)])
def test_tf32(width, tf32):
    """TF32 products are float32 products of operands without their lower 13 bits."""
    offsets = offsets_of("zipf", 150)
    x, weight, grad = torch.randn(150, width[0]), torch.randn(5, *width), torch.randn(150, width[1])

    def call(backend):
        return lambda x, weight: mk.grouped_gemm(x, weight, offsets, backend=backend)

    def cut(value):
        return (value.view(torch.int32) & ~0x1FFF).view(torch.float32)

    with session.recorded() as launches:
        got = results(call("triton"), {"x": x, "weight": weight}, grad)
    assert "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32" in opcodes(launches)
    short = {"x": cut(x), "weight": cut(weight)}
    reference = results(call("reference"), short, cut(grad))
    truth = results(call("reference"), {name: each.double() for name, each in short.items()}, cut(grad).double())
    judge(TARGET, torch.float32, got, reference, truth)


def many_rows():
    return mk.make_plan(torch.randint(0, 5, (300, 2)), 5, backend="reference")


def some_dropped():
    experts = torch.randint(-1, 3, (40, 3))  # two of five experts have no rows
    return mk.make_plan(experts, 5, capacity=7, priority=torch.rand(40), backend="reference")


@pytest.mark.parametrize(("activation", "plan_of", "sizes", "dtype"), [
    ("swiglu", some_dropped, (48, 64, 32), BF16),
    ("gelu", many_rows, (64, 144, 48), BF16),
    ("swiglu", many_rows, (64, 144, 48), BF16),
    ("relu", some_dropped, (20, 36, 28), FP16),
])  # fmt: skip
def test_expert_mlp(activation, plan_of, sizes, dtype):
    plan = plan_of()
    dim, hidden, dout = sizes
    leaves = leaves_of(plan, dtype, "cpu", activation, dim=dim, hidden=hidden, dout=dout)
    grad = torch.randn(plan.num_tokens, dout).to(dtype)

    def call(backend):
        return lambda **given: mk.expert_mlp(plan=plan, activation=activation, backend=backend, **given)

    with session.recorded() as launches:
        got = results(call("triton"), leaves, grad)
    hidden_products = [each for each in launches if each.kernel.title == "_expert_mlp_bwd_hidden"]
    assert any(name.startswith("wgmma.mma_async") for name in opcodes(hidden_products))
    reference = results(call("reference"), leaves, grad)
    truth = results(call("reference"), {name: each.double() for name, each in leaves.items()}, grad)
    judge(TARGET, dtype, got, reference, truth, floor=2.0)


@pytest.mark.parametrize(("sizes", "dtype"), [
    ((70, 5, 48, 64, 48), BF16), ((70, 5, 33, 50, 41), torch.float32),
], ids=str)  # fmt: skip
def test_expert_norms_(sizes, dtype):
    leaves = norms.leaves_of(dtype, "cpu", "gelu", *sizes)
    grad = torch.randn(sizes[:2]).to(dtype)

    def call(backend):
        return lambda **given: mk.expert_norms(activation="gelu", backend=backend, **given)

    got, reference = (results(call(backend), leaves, grad) for backend in ("triton", "reference"))
    wide = {name: each.double() for name, each in leaves.items()}
    truth = results(lambda **given: norms.dense(activation="gelu", **given), wide, grad)
    judge(TARGET, dtype, got, reference, truth, floor=2.0)


def test_tree_gate_with_its_products():
    with session.recorded() as launches:
        products_and_tree_in_one_kernel(BF16, few=True)
    assert any(name.startswith("wgmma.mma_async") for name in opcodes(launches))


def everything_else():
    x = torch.randn(40, 64).requires_grad_()
    logits = torch.randn(40, 33).requires_grad_()
    weights, experts = mk.topk_gate(logits, 3, backend="triton")
    plan = mk.make_plan(experts, 33, capacity=8, priority=weights.detach()[:, 0], backend="triton")
    y = mk.combine(mk.dispatch(x, plan, backend="triton"), plan, weights, backend="triton")
    found = [weights, plan.row_token, y, mk.kwta(x, 17, backend="triton")]
    # Kernels solve the second matrix with logarithms.
    scores = torch.randn(3, 12, 12) * torch.tensor([1.0, 1e4, 1.0])[:, None, None]
    found.append(mk.sinkhorn(scores.requires_grad_(), 5, backend="triton"))
    sum((each * torch.linspace(-1, 1, each.shape[-1])).sum() for each in found if each.is_floating_point()).backward()
    return [each.detach() for each in found] + [x.grad, logits.grad]


def test_the_other_kernels_give_the_bits_of_sm_80():
    state = torch.random.get_rng_state()
    got = everything_else()
    torch.random.set_rng_state(state)
    with triton_launch.capability(80):
        expected = everything_else()
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


def test_launches_are_counted_apart():
    product()
    assert "triton sm_90" in {each.backend for each in session.session.ran.values()}
    assert {"triton sm_90 _grouped_gemm_fwd", "triton _grouped_gemm_fwd"} <= set(summary.known_kernels())


def product(rows=150, dim=208, columns=144):
    """The product of x and the weights of four experts, two of them without rows, and its gradients, as one vector."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(rows, dim, generator=generator), torch.randn(4, dim, columns, generator=generator)
    offsets = torch.tensor([0, rows - 20, rows - 20, rows, rows], dtype=torch.int32)
    given = {"x": x.bfloat16(), "weight": weight.bfloat16()}

    def call(x, weight):
        return mk.grouped_gemm(x, weight, offsets, backend="triton")

    found = results(call, given, torch.ones(rows, columns))
    return torch.cat([each.flatten() for each in found.values()])


SWIZZLE = str(1 << 62 | 64 << 32)  # constant bits of a wgmma descriptor: swizzle of 128 bytes, stride of 1024 bytes

# Name: (pattern, replacement of every match in the PTX, pattern of the expected error). If the last one is empty, wrong
# values or any error show the defect.
DEFECTS = {
    "no wait for a product": (r"wgmma\.wait_group[^;]*;", "", "a wgmma may still be reading|is undefined"),
    "a raised wait": (
        r"(wgmma\.wait_group\.sync\.aligned\s+)\d+",
        r"\g<1>7",
        "a wgmma may still be reading|is undefined",
    ),
    "no group": (r"wgmma\.commit_group[^;]*;", "", "a wgmma may still be reading|is undefined"),
    "no fence of registers": (r"wgmma\.fence[^;]*;", "", r"no wgmma\.fence follows the last access"),
    "no fence of memory": (r"fence\.proxy\.async[^;]*;", "", r"with no fence\.proxy\.async between"),
    "no wait for a copy": (r"cp\.async\.wait_group[^;]*;", "", r"a cp\.async may still be writing"),
    "64 bytes swizzled": (SWIZZLE, str(2 << 62 | 64 << 32), ""),
    "32 bytes swizzled": (SWIZZLE, str(3 << 62 | 64 << 32), ""),
    "another stride": (SWIZZLE, str(1 << 62 | 32 << 32), ""),
    "not transposed": (r"1, 1, 0, 1;", "1, 1, 0, 0;", ""),
    "no wait at an mbarrier": (
        r"mbarrier\.try_wait[^;]*;",
        "mov.pred complete, -1;",
        r"a cp\.async may still be writing",
    ),
    "one try": (r"@!complete bra\.uni waitLoop;", "", r"a cp\.async may still be writing"),
    "another phase": (r"(try_wait\S+ complete, \[%r\d+\]), %r\d+", r"\1, 1", r"a cp\.async may still be writing"),
    "no arrival": (r"@%p\d+ mbarrier\.arrive[^;]*;", "", "1 arrivals are missing"),
    "too many bytes": (r"(expect_tx[^;]*), \d+;", r"\1, 65536;", r"0 arrivals are missing"),
    "too few bytes": (r"(expect_tx[^;]*), \d+;", r"\1, 1024;", "bytes arrive, but 1024 are expected"),
    "no mbarrier": (r"@%p\d+ mbarrier\.init[^;]*;", "", "no mbarrier is initialised"),
    "no barrier": (r"bar\.sync\s+0;", "", "no barrier between|no mbarrier is initialised"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_defect(defect):
    pattern, by, message = DEFECTS[defect]
    expected = product()
    planted = []

    def edit(text):
        edited = re.sub(pattern, by, text)
        planted.append(edited != text)
        return edited

    try:
        with session.planted(edit):
            got, error = product(), ""
    except PtxError as raised:
        got, error = None, str(raised)
    assert any(planted)
    if message:
        assert re.search(message, error)
        assert re.search(r"PTX line \d+, \S+\.py:\d+.*\n +block \(\d+,\d+,\d+\) warp \d+", error)
    else:
        assert got is None or not torch.equal(got, expected)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_bits_stay_in_any_order(seed):
    expected = product()
    with session.seed(seed):
        assert torch.equal(product(), expected)


ORDERS = r"wgmma\.(wait_group|fence|commit)|fence\.proxy|cp\.async\.wait|mbarrier\.(arrive|init|try_wait)"


def test_every_wait_and_fence_matters():
    """Deletes one executed instruction that matches ORDERS at a time, or lets one try_wait always succeed: each time an
    error is raised or values are wrong."""
    long = (350, 336, 336)
    with session.recorded() as launches:
        expected = product(*long)
    missed = []
    for launch in launches:
        kernel = launch.kernel
        for pc, line in enumerate(kernel.lines):
            if not launch.counters["lanes"][pc] or not re.search(ORDERS, kernel.texts[pc]):
                continue
            if triton_launch.release() < (3, 8) and kernel.texts[pc].startswith("fence.proxy"):
                continue  # added, more than are needed
            delete = plant.on_line(line, r"(@\S+\s+)?(wgmma|fence|cp|mbarrier)\.[^;]*;", "")
            if "try_wait" in kernel.texts[pc]:
                delete = plant.on_line(line, r"mbarrier\.[^;]*;", "mov.pred complete, -1;")

            def edit(text, delete=delete, key=kernel.key):
                return delete(text) if triton_launch.decoded(text).key == key else text

            with session.planted(edit):
                try:
                    same = torch.equal(product(*long), expected)
                except PtxError:
                    same = False
            if same:
                missed.append(kernel.where(pc))
    assert not missed


def test_one_product():
    torch.testing.assert_close(*one_product(), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(*one_product(descriptor=3 << 62 | 8 << 32))


@pytest.mark.parametrize(("change", "message"), MISUSES)
def test_misuse_of_a_product(change, message):
    with pytest.raises(PtxError, match=message):
        one_product(**change)


@pytest.mark.parametrize("bit", [*range(14, 16), *range(30, 32), *range(46, 62)])
def test_a_descriptor_with_a_bit_that_is_not_modelled(bit):
    """Bits 49 to 51 are the base offset; the PTX ISA does not list the others."""
    with pytest.raises(PtxError, match="a descriptor or scale that is not modelled"):
        one_product(descriptor=3 << 62 | 16 << 32 | 1 << bit)


@pytest.mark.parametrize("transposed", ["", ".trans"])
def test_stmatrix_is_undone_by_ldmatrix(transposed):
    """Lane i gives the address of row i % 8 of matrix i // 8, a row of 16 bytes."""
    body = f"""
    mul.wide.u32 %d5, %r0, 16; add.s64 %d6, %d1, %d5; add.s64 %d5, %d0, %d5; mov.u32 %r5, memory;
    shl.b32 %r6, %r0, 4; add.s32 %r6, %r5, %r6; ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%d5];
    stmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 [%r6], {{%r10, %r11, %r12, %r13}};
    ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 {{%r14, %r15, %r16, %r17}}, [%r6];
    ld.shared.b32 %r18, [%r6];
    st.global.v4.b32 [%d6], {{%r14, %r15, %r16, %r17}}; add.s64 %d7, %d4, 512; st.global.b32 [%d7], %r18;
    """
    given = torch.randint(-(2**31), 2**31 - 1, (128,), dtype=torch.int32)
    out = run(body, given, out=torch.zeros(160, dtype=torch.int32))
    assert torch.equal(out[:128], given)
    matrix, row = torch.arange(32) // 8, torch.arange(32) % 8  # of the row whose address each lane gives
    halves = given.view(torch.int16).view(32, 4, 2)  # lane, matrix, half
    if transposed:  # row i, column j: lane 4 j + i // 2, half i % 2
        first = halves[row // 2, matrix, row % 2], halves[4 + row // 2, matrix, row % 2]
    else:  # row i, column j: lane 4 i + j // 2, half j % 2
        first = halves[4 * row, matrix, 0], halves[4 * row, matrix, 1]
    assert torch.equal(out[128:].view(torch.int16).view(32, 2), torch.stack(first, 1))


@pytest.mark.parametrize(("opcode", "arguments"), [
    ("wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8", "{%r1,%r2,%r3,%r4}, %d6, %d7, %p1"),
    ("mbarrier.test_wait.shared::cta.b64", "%p1, [%r1], %d1"),
    ("cp.async.bulk.shared::cta.global", "[%r1], [%d1], 16, [%r2]"),
    ("fence.proxy.alias", ""),
])  # fmt: skip
def test_what_is_not_emitted_is_named(opcode, arguments):
    with pytest.raises(Unsupported, match=re.escape(opcode)):
        run(f"{opcode} {arguments};", torch.zeros(32))
