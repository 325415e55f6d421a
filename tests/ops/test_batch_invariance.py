"""The mode batch_invariant: the bits of operations in slices and in the whole, and what carries the mode."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

import moe_kernels as mk
from moe_kernels import backends
from moe_kernels.backends import cpu
from moe_kernels.backends.native import grouped_gemm_cpu, tree_gate_products_cpu
from moe_kernels.ops._define import operators
from moe_kernels.sizes import all_rows
from tests.helpers.invariance import T, rows_that_differ

pytestmark = pytest.mark.skipif(not mk.available_backends("combine")[1:], reason="no kernels run here")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
E, K = 8, 2
SMALL, LARGE = (
    (70, 96),
    (768, 512),
)  # (D, H); with 768 and 512 experts of few rows are too large for C++ outside the mode
FEW = (1, 2, 5, 48, 100)


def random(*shape, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def weights(size, dtype, transposed):
    dim, hidden = size
    found = []
    for rows, columns in ((dim, hidden), (hidden, dim)):
        weight = random(E, rows, columns, dtype=dtype, scale=rows**-0.5)
        weight = weight.mT.contiguous().mT if transposed else weight
        found.append(weight.requires_grad_())
    return found


def choices():
    first = torch.randint(0, E, (T, 1), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    return torch.cat([first, (first + 1) % E], 1)


def experts_of(size, dtype, transposed):
    """By name: calls of the operations with products."""
    w_in, w_out = weights(size, dtype, transposed)

    def grouped_gemm(x, experts):
        plan = mk.make_plan(experts, E)
        rows = mk.grouped_gemm(x, w_in, plan.expert_offsets, row_token=plan.row_token, activation="gelu")
        return [mk.combine(rows, plan)]

    def one_expert(x):
        return [mk.grouped_gemm(x, w_in[:1], torch.tensor([0, len(x)]))]

    def expert_mlp(x, experts, share):
        return [mk.expert_mlp(x, mk.make_plan(experts, E), w_in, w_out, weights=share, activation="silu")]

    def clamped(x, experts, share):
        plan = mk.make_plan(experts, E)
        return [mk.expert_mlp(x, plan, w_in, w_out[:, ::2], weights=share, activation="swiglu_clamped")]

    def norms(x):
        return [mk.expert_norms(x, w_in, w_out)]

    def some_norms(x, kept):
        """The slices have more pairs with a gradient than tokens, or fewer: backward then groups them in other ways."""
        return [mk.expert_norms(x, w_in, w_out) * kept]

    return {each.__name__: each for each in (grouped_gemm, one_expert, expert_mlp, clamped, norms, some_norms)}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [SMALL, LARGE], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products(dtype, size, transposed):
    x, share = random(T, size[0], dtype=dtype), random(T, K).abs()
    arguments = {"grouped_gemm": (x, choices()), "one_expert": (x,), "norms": (x,)}
    arguments["some_norms"] = x, random(T, E) > random(T, 1)
    for name, call in experts_of(size, dtype, transposed).items():
        given = arguments.get(name, (x, choices(), share))
        sizes = (1, 2, 3, 4, 5, 17, 33, 100) if size == SMALL else (1, 2, 5, 100)
        assert rows_that_differ(call, *given, sizes=sizes) == {}, name


@pytest.mark.parametrize("isa", cpu.module.isas)
def test_every_instruction_set(isa, monkeypatch):
    monkeypatch.setattr(cpu, "isa", cpu.module.isas.index(isa))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        calls = experts_of((72, 40), dtype, True)
        given = random(T, 72, dtype=dtype), choices(), random(T, K)
        assert rows_that_differ(calls["expert_mlp"], *given) == {}
        assert rows_that_differ(calls["norms"], given[0], sizes=FEW) == {}


def test_experts_without_gradients():
    w_in, w_out = (each.detach() for each in weights(SMALL, torch.float32, True))

    def call(x, experts, share):
        return [
            mk.ops.expert_mlp.expert_mlp_of_choices(
                x, experts, E, w_in, w_out, weights=share, b_in=None, b_out=None, activation="gelu"
            )
        ]

    given = random(T, SMALL[0]), choices(), random(T, K)
    assert rows_that_differ(call, *given, gradients=False) == {}
    assert rows_that_differ(call, *given, gradients=False, enabled=False) != {}


@pytest.mark.parametrize("scale", [0.05, 1.0])
@pytest.mark.parametrize(("experts", "trees"), [(3, 1), (8, 3), (64, 1), (130, 2)])
def test_tree_gate(experts, trees, scale):
    split, leaf = (random(trees, count, 64, scale=scale).requires_grad_() for count in (experts - 1, experts))
    for dtype in DTYPES:
        parameters = split.to(dtype), leaf.to(dtype)
        assert (
            rows_that_differ(lambda x, p=parameters: mk.tree_gate(x, *p, gamma=1.0), random(T, 64, dtype=dtype)) == {}
        )
    route = lambda x: mk.tree_route(x, split, leaf, gamma=1e-3)  # noqa: E731
    assert rows_that_differ(route, random(T, 64), gradients=False) == {}


def topk_gate(logits):
    return mk.topk_gate(logits, 3)


def softmax_first(logits):
    return mk.topk_gate(logits, 3, order="softmax_topk")


def kwta(x):
    return [mk.kwta(x, 7)]


def smooth_step(x):
    return [mk.smooth_step(x, 3.0)]


@pytest.mark.parametrize("call", [topk_gate, softmax_first, kwta, smooth_step], ids=lambda each: each.__name__)
@pytest.mark.parametrize("columns", [9, 64, 130])
def test_rows(call, columns):
    for dtype in DTYPES:
        assert rows_that_differ(call, random(T, columns, dtype=dtype)) == {}


@pytest.mark.parametrize("n", [4, 24, 70])
def test_sinkhorn(n):
    call = lambda scores: [mk.sinkhorn(scores, 5, tau=0.1)]  # noqa: E731
    for dtype in DTYPES:
        assert rows_that_differ(call, random(120, n, n, dtype=dtype), sizes=(1, 5, 16, 100)) == {}


# By name: what would make bits depend on the batch, if a kernel did it in the mode.
DEFECTS = {
    "dot products for few rows": (grouped_gemm_cpu, "expert_mlp"),
    "skipped branches of trees": (tree_gate_products_cpu, "tree"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_seen(defect, monkeypatch):
    module, kind = DEFECTS[defect]
    monkeypatch.setattr(module, "is_fixed", lambda: False)
    if kind == "expert_mlp":
        given = random(T, SMALL[0]), choices(), random(T, K)
        assert rows_that_differ(experts_of(SMALL, torch.float32, True)["expert_mlp"], *given) != {}
    else:
        split, leaf = random(2, 129, 64), random(2, 130, 64)
        assert rows_that_differ(lambda x: mk.tree_gate(x, split, leaf, gamma=1.0), random(T, 64)) != {}


def test_a_split_of_the_sum_is_seen(monkeypatch):
    """A product that splits its sum in two, if there are few rows, as split-K kernels do."""
    forward = grouped_gemm_cpu.grouped_gemm_fwd
    weight = random(1, 64, 32)

    def split(native, x, w, offsets, *rest):
        if len(x) > 16:
            return forward(native, x, w, offsets, *rest)
        halves = [forward(native, x[:, part], w[:, part], offsets, *rest)[0] for part in (slice(32), slice(32, 64))]
        return halves[0] + halves[1], halves[0]

    def call(x):
        return [mk.grouped_gemm(x, weight, torch.tensor([0, len(x)]), backend="cpu")]

    assert rows_that_differ(call, random(T, 64)) == {}
    monkeypatch.setattr(cpu, "grouped_gemm_fwd", lambda *args: split(cpu, *args))
    assert rows_that_differ(call, random(T, 64), sizes=(16,)) != {}
    assert rows_that_differ(call, random(T, 64), sizes=(17,)) == {}


# What carries the mode.

WEIGHT = random(1, 64, 48).mT.contiguous().mT  # transposed: up to 4 rows are multiplied by dot products outside


def product(x):
    return mk.grouped_gemm(x, WEIGHT, all_rows(x), backend="cpu")


def in_mode(call=product):
    """Whether call(x), for one row, has the bits of the mode."""
    x = random(T, 64)
    with mk.batch_invariant():
        whole = product(x)
    with mk.batch_invariant(False):
        outside = product(x[:1])
    found = call(x[:1])
    assert torch.equal(found, whole[:1]) != torch.equal(found, outside)
    return torch.equal(found, whole[:1])


def test_blocks_may_be_nested():
    assert not in_mode()
    with mk.batch_invariant():
        assert in_mode()
        with mk.batch_invariant(False):
            assert not in_mode()
            with mk.batch_invariant(enabled=True):
                assert in_mode()
        assert in_mode()
        with pytest.raises(ValueError, match="inside"), mk.batch_invariant(False):
            raise ValueError("inside")
        assert in_mode()
    assert not in_mode()
    assert backends.process.counts == {True: 0, False: 0}
    with pytest.raises(TypeError, match="batch_invariant: enabled must be a bool, got int"), mk.batch_invariant(1):
        pass


def test_the_environment(monkeypatch):
    monkeypatch.setenv("MOE_KERNELS_BATCH_INVARIANT", "1")
    assert in_mode()
    with mk.batch_invariant(False):
        assert not in_mode()
    monkeypatch.setenv("MOE_KERNELS_BATCH_INVARIANT", "0")
    assert not in_mode()


def test_a_block_applies_to_its_own_thread_and_task():
    found = []
    with mk.batch_invariant():
        thread = threading.Thread(target=lambda: found.append(in_mode()))
        thread.start()
        thread.join()
    assert found == [False]

    async def inside(enter, leave):
        with mk.batch_invariant():
            enter.set()
            await leave.wait()

    async def both():
        enter, leave = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(inside(enter, leave))
        await enter.wait()
        found.append(in_mode())
        leave.set()
        await task

    asyncio.run(both())
    assert found == [False, False]


def test_backward_has_the_mode_of_its_forward_in_any_thread():
    """The gradient's product has a transposed weight, which outside the mode multiplies few rows by dot products."""
    x, grad = random(T, 64), random(T, 48)

    def gradient(part, forward=True):
        leaf = x[part].clone().requires_grad_()
        with mk.batch_invariant(forward):
            y = mk.grouped_gemm(leaf, WEIGHT.contiguous(), torch.tensor([0, len(leaf)]), backend="cpu")
        found = []

        def backward():
            with mk.batch_invariant(not forward):
                found.extend(torch.autograd.grad(y, leaf, grad[part]))

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        return found[0]

    assert torch.equal(gradient(slice(2)), gradient(slice(None))[:2])
    assert not torch.equal(gradient(slice(2), forward=False), gradient(slice(None))[:2])


def test_the_definition_is_refused_where_it_sums():
    x = random(5, 64)
    calls = {
        "grouped_gemm": lambda: mk.grouped_gemm(x, WEIGHT, torch.tensor([0, 5]), backend="reference"),
        "topk_gate": lambda: mk.topk_gate(x, 2, backend="reference"),
        "combine": lambda: mk.combine(x, mk.make_plan(torch.zeros(5, 1).int(), 1), backend="reference"),
        "sinkhorn": lambda: mk.sinkhorn(x[:, :5], 2, backend="reference"),
    }
    for name, call in calls.items():
        call()
        with mk.batch_invariant():
            message = rf"{name}: backend 'reference' adds in an order that depends .* torch.float32 on cpu"
            with pytest.raises(mk.BackendError, match=message):
                call()
    with mk.batch_invariant():
        mk.kwta(x, 3, backend="reference")
        mk.make_plan(torch.zeros(5, 1).int(), 1, backend="reference")
        mk.grouped_gemm(x.to("meta"), WEIGHT.to("meta"), torch.tensor([0, 5], device="meta"))


def test_the_operator_with_a_marked_backend():
    x = random(5, 64).requires_grad_()
    given = x, WEIGHT, torch.tensor([0, 5], dtype=torch.int32), None, None, "gelu", True, "cpu:invariant"
    torch.library.opcheck(operators.grouped_gemm_fwd, given)
    with pytest.raises(ValueError, match="backend must be one of cpu, triton, cuda; got 'nothing'"):
        operators.grouped_gemm_fwd(*given[:-1], "nothing:invariant")


def compiled(call, mode="eager"):
    torch._dynamo.reset()
    return torch.compile(call, backend=mode, fullgraph=True, dynamic=False)


def test_compiled_code_is_compiled_again_where_the_mode_changes():
    call = compiled(product)
    assert not in_mode(call)
    with mk.batch_invariant():
        assert in_mode(call)
        with mk.batch_invariant(False):
            assert not in_mode(call)
    assert not in_mode(call)


def test_a_block_inside_compiled_code():
    def call(x):
        with mk.batch_invariant():
            return product(x)

    assert in_mode(compiled(call))
    assert not in_mode()
    assert (backends.process.on, backends.process.off) == (False, False)


def test_compiled_backward():
    x = random(T, 64)
    call = compiled(lambda x: product(x).square(), "aot_eager")

    def gradient(part):
        leaf = x[part].clone().requires_grad_()
        with mk.batch_invariant():
            y = call(leaf)
        return torch.autograd.grad(y.sum(), leaf)[0]

    assert torch.equal(gradient(slice(2)), gradient(slice(None))[:2])


def test_an_exported_program_keeps_the_mode():
    class Product(torch.nn.Module):
        def forward(self, x):
            return product(x)

    with mk.batch_invariant():
        program = torch.export.export(Product(), (random(5, 64),), dynamic_shapes=({0: torch.export.Dim("rows")},))
    assert in_mode(program.module())
