"""The package with tools of torch, such as torch.export, torch.vmap and torch.compile."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import moe_kernels as mk
import moe_kernels.nn as mnn
from moe_kernels.backends import cpu
from moe_kernels.ops.kwta import kwta_apply, pack_bits
from tests.helpers import forked
from tests.helpers.layers import LAYERS

D, E, H = 8, 4, 16
SQUARE, OFFSETS = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 2, 4])
PLAN = mk.make_plan(torch.tensor([[0, 1], [1, 0], [0, 1], [1, 1]]), 2)
BITS = pack_bits(torch.tensor([[True, False, True, False], [False, True, True, False]] * 2))

# Calls on x (4, 4). torch.vmap supports those of ROWS.
ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "kwta": lambda x: mk.kwta(x, 2),
    "kwta of ties": lambda x: 1 + mk.kwta(x.detach().round(), 2, values=x, ties="strict"),
    "kwta_apply": lambda x: kwta_apply(x, BITS),
    "topk_softmax": lambda x: mk.topk_gate(x, 2)[0],
    "softmax_topk": lambda x: mk.topk_gate(x, 2, order="softmax_topk")[0],
    "sinkhorn": lambda x: mk.sinkhorn(x, 5),
    "sinkhorn tolerance": lambda x: mk.sinkhorn(x, 5, tolerance=1e-3),
    "sinkhorn sums": lambda x: mk.sinkhorn(x, 5, rows=(r := x.abs().sum(-1) + 1), columns=r.flip(-1)),
    "sinkhorn implicit": lambda x: mk.sinkhorn(x / 4, 8, gradient="implicit"),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "grouped_gemm": lambda x: mk.grouped_gemm(x, SQUARE, OFFSETS, bias=SQUARE[0, :2], activation="gelu"),
    "gathered": lambda x: mk.grouped_gemm(x, SQUARE, OFFSETS, row_token=torch.tensor([0, 1, 3, 2]), activation="silu"),
    "dispatch": lambda x: mk.dispatch(x, PLAN),
    "combine": lambda x: mk.combine(mk.dispatch(x, PLAN), PLAN, x[:, :2]),
    "expert_mlp": lambda x: mk.expert_mlp(x, PLAN, SQUARE, SQUARE, weights=x[:, :2], b_in=SQUARE[0, :2]),
    "expert_norms": lambda x: mk.expert_norms(x, SQUARE, SQUARE),
    "tree_gate": lambda x: mk.tree_gate(x, SQUARE[:, :1], SQUARE[:, :2], gamma=1.0)[0],
}


def gradient(f: Callable[[Tensor], Tensor], x: Tensor, hook: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    x = x.detach().requires_grad_()
    if hook is None:
        return torch.autograd.grad(f(x).square().sum(), x)[0]
    with torch.autograd.graph.saved_tensors_hooks(hook, lambda saved: saved):
        y = f(x)
    return torch.autograd.grad(y.square().sum(), x)[0]


def test_flops_are_counted_whichever_is_imported_first():
    count = "import moe_kernels as mk; from torch.utils.flop_counter import FlopCounterMode\n"
    count += "with FlopCounterMode(display=False) as counter: mk.kwta(torch.randn(4, 50), 5, backend='cpu')\n"
    count += "print(counter.get_total_flops())"
    looked_for = "import moe_kernels; importlib.util.find_spec('torch.utils.flop_counter')"
    firsts = ("import moe_kernels", "import torch.utils.flop_counter", looked_for)
    programs = [f"import importlib.util, sys, torch\n{first}\n{count}" for first in firsts]
    # FlopCounterMode imports torch._dynamo, for 1.1 s.
    neither = "import torch._dynamo, sys; assert not {'moe_kernels', 'torch.utils.flop_counter'} & set(sys.modules)"
    assert forked.outputs(neither, programs) == ["200\n"] * 3


def test_a_profiler_sees_the_operators():
    layer, x = mnn.MoE(mnn.TopKGate(D, E, 2), mnn.ExpertMLP(E, D, H)), torch.randn(6, D)
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(x)
    names = {event.key for event in profile.key_averages()}
    wanted = {"moe_kernels::topk_gate_fwd", "moe_kernels::make_plan_fwd", "moe_kernels::expert_mlp_fwd"}
    assert wanted <= names


def test_flops_of_a_layer_are_counted_once():
    layer, x = mnn.MoE(mnn.TopKGate(D, E, 2), mnn.ExpertMLP(E, D, H)), torch.randn(6, D)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 2 * 6 * D * E + 2 * 12 * (D * H + H * D) + 2 * 12 * D


@pytest.mark.parametrize("call", [*ROWS, *OTHERS])
def test_what_was_exported_without_gradients_has_them(call):
    """An operator exported under no_grad computes nothing that only backward needs, so backward must compute it."""
    f = (ROWS | OTHERS)[call]

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return f(x)

    x = torch.randn(4, 4)
    with torch.no_grad():
        exported = torch.export.export(Module(), (x,), strict=False).module()
    torch.testing.assert_close(gradient(exported, x), gradient(f, x))


@pytest.mark.parametrize("call", [*ROWS, *OTHERS])
def test_a_trace_computes_the_same(call):
    f = (ROWS | OTHERS)[call]
    traced, x = torch.jit.trace(f, (torch.randn(4, 4),), check_trace=False), torch.randn(4, 4)
    torch.testing.assert_close(traced(x), f(x))


@pytest.mark.parametrize(("policy", "words"), [("capacity", "make_plan: capacity"), ("expert choice", "T")])
def test_a_trace_of_a_layer_is_refused_by_name(policy, words):
    """The trace would hold the capacity, which depends on the number of tokens, as a constant."""
    with pytest.raises(TypeError, match=f"{words} must be an int, got Tensor"):
        torch.jit.trace(LAYERS[policy](), (torch.randn(5, 6),), check_trace=False)


@pytest.mark.parametrize("call", ROWS)
@pytest.mark.parametrize("dim", [0, 2])
def test_vmap(call, dim):
    f, x = ROWS[call], torch.randn(3, 4, 4).movedim(0, dim).contiguous().requires_grad_()
    each = x.movedim(dim, 0)
    torch.testing.assert_close(torch.vmap(f, in_dims=dim)(x), torch.stack([f(one) for one in each]))
    got = gradient(torch.vmap(f, in_dims=dim), x)
    torch.testing.assert_close(got, gradient(lambda x: torch.stack([f(one) for one in x.movedim(dim, 0)]), x))


@pytest.mark.parametrize("call", [*ROWS, *OTHERS])
def test_batched_gradients(call):
    f, x = (ROWS | OTHERS)[call], torch.randn(4, 4, requires_grad=True)
    y = f(x)
    grads = torch.randn(3, *y.shape)
    (got,) = torch.autograd.grad(y, x, grads, is_grads_batched=True, retain_graph=True)
    expected = [torch.autograd.grad(y, x, grad, retain_graph=True)[0] for grad in grads]
    torch.testing.assert_close(got, torch.stack(expected))
    jacobian = torch.autograd.functional.jacobian
    torch.testing.assert_close(jacobian(f, x, vectorize=True), jacobian(f, x))


@pytest.mark.parametrize("call", [*ROWS, *OTHERS])
def test_a_second_derivative_is_refused_by_name(call):
    """But kwta, dispatch and combine are linear in their rows, and have any derivative of these."""
    f, x = (ROWS | OTHERS)[call], torch.randn(4, 4, requires_grad=True)
    (dx,) = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
    op = {"gathered": "grouped_gemm", "topk_softmax": "topk_gate", "softmax_topk": "topk_gate"}.get(call, call)
    if call.startswith(("kwta", "dispatch", "combine")):
        (found,) = torch.autograd.grad(dx.sum(), x)
        assert found.shape == x.shape
        return
    with pytest.raises(RuntimeError, match=f"^{op.split()[0]}: kernels are once_differentiable; backend='reference'"):
        dx.sum().backward()


TRANSFORMS: dict[str, Callable[..., object]] = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(lambda x: f(x).sum()))(x[None]),
    "grad of vmap": lambda f, x: torch.func.grad(lambda x: torch.vmap(f)(x).sum())(x[None]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("call", [*ROWS, *OTHERS])
def test_other_transforms_are_refused_by_name(call, transform):
    op = call.split()[0].replace("gathered", "grouped_gemm")
    op = op.replace("kwta_apply", "kwta")
    op = "topk_gate" if op in ("topk_softmax", "softmax_topk") else "dispatch" if op == "combine" else op
    with pytest.raises(TypeError, match=f"^{op}.*(torch.func transforms|forward-mode)"):
        TRANSFORMS[transform]((ROWS | OTHERS)[call], torch.randn(4, 4))


@pytest.mark.parametrize("call", OTHERS)
def test_vmap_of_the_others_is_refused_by_name(call):
    with pytest.raises(TypeError, match=r"torch.func transforms of this kind are not supported"):
        torch.vmap(OTHERS[call])(torch.randn(3, 4, 4))


def test_vmap_of_a_backward_is_refused_by_name():
    x = torch.randn(4, 4, requires_grad=True)
    y = OTHERS["expert_mlp"](x)
    with pytest.raises(TypeError, match=r"expert_mlp_bwd: torch\.func transforms are not supported here, got vmap"):
        torch.vmap(lambda grad: torch.autograd.grad(y, x, grad)[0])(torch.randn(3, *y.shape))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("call", [*ROWS, "expert_norms"])
def test_outputs_have_their_gradient_compiled(call, backend):
    """torch 2.11 lost the gradient of a compiled gate if its forward ended with a conversion to the same dtype."""
    torch._dynamo.reset()
    f, x = (ROWS | OTHERS)[call], torch.randn(4, 4)
    with mk.use_backend(backend):
        expected = gradient(f, x)
        got = gradient(torch.compile(f, backend="aot_eager"), x)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_harden_compiles_whole():
    x = torch.rand(2, 4, 4)
    compiled = torch.compile(lambda x: mk.harden(x), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), mk.harden(x))


@pytest.mark.parametrize("anneal_from", [None, 1.0])
def test_a_new_temperature_is_no_new_graph(anneal_from):
    torch._dynamo.reset()

    def soft(x: Tensor, tau: float) -> Tensor:
        return mk.sinkhorn(x, 5, tau=tau, anneal_from=anneal_from)

    x, compiled = torch.rand(4, 4), torch.compile(soft, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(recompile_limit=3, fail_on_recompile_limit_hit=True):
        for step in range(8):
            tau = 1 / (step + 1.5)
            torch.testing.assert_close(compiled(x, tau), soft(x, tau))


@pytest.mark.parametrize("call", [*ROWS, *OTHERS])
def test_saved_tensors_that_come_back_with_other_strides(call):
    def other(x: Tensor) -> Tensor:
        if x.dim() == 1:
            return torch.stack([x, x], -1)[:, 0]
        return x.transpose(-1, -2).clone(memory_format=torch.contiguous_format).transpose(-1, -2) if x.dim() else x

    f, x = (ROWS | OTHERS)[call], torch.randn(4, 4)
    torch.testing.assert_close(gradient(f, x, other), gradient(f, x))


@pytest.mark.parametrize("call", [*ROWS, *OTHERS])
def test_what_is_changed_before_backward_is_noticed(call):
    """If backward reads x itself, a change of x in place is an error. Otherwise the gradient is that of the old x."""
    f, x = (ROWS | OTHERS)[call], torch.randn(4, 4)
    leaf = x.clone().requires_grad_()
    given = leaf.clone()
    y = f(given).square().sum()
    with torch.no_grad():
        given.add_(1)
    try:
        (found,) = torch.autograd.grad(y, leaf)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
    else:
        torch.testing.assert_close(found, gradient(f, x))


@pytest.mark.parametrize("call", [*ROWS, "grouped_gemm", "dispatch", "combine", "expert_mlp", "expert_norms"])
def test_tensors_of_the_cpu_beside_another_default_device(call):
    x, f = torch.randn(4, 4), (ROWS | OTHERS)[call]
    expected = gradient(f, x)
    with torch.device("meta"):
        got = gradient(f, x)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_plans_trees_and_harden_beside_another_default_device(backend):
    x, experts, scores = torch.randn(600, 64), torch.arange(600)[:, None] % E, torch.rand(600, E)
    split, leaves = 30 * torch.randn(2, 511, 64), torch.randn(2, 512, 64)

    def results():
        with mk.use_backend(backend):
            plans = [mk.make_plan(experts, E, capacity=9), mk.plan_expert_choice(scores, 3)[0]]
            plans.append(mk.plan_priority(scores, 200)[0])
            found = [each for plan in plans for each in (plan.row_token, plan.slot_row, plan.kept)]
            found += [*mk.tree_gate(x, split[:, :63], leaves[:, :64], gamma=0.1)]
        found += [*mk.tree_route(x, split, leaves, gamma=0.1), *mk.tree_gate(x, split, leaves, gamma=0.1)]
        return [*found, mk.harden(scores[:E]), mk.harden(scores[:E], backend="reference")]

    expected = results()
    with torch.device("meta"):
        got = results()
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("shape", [(1, 0, 0), (0, 3, 3), (0, 0, 0), (0, 0)])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_sinkhorn_of_nothing(shape, backend):
    for options in ({}, {"tau": 0.05, "anneal_from": 1.0}, {"tolerance": 0.1}, {"rows": torch.ones(shape[-1])}):
        scores = torch.empty(shape, requires_grad=True)
        p = mk.sinkhorn(scores, 2, backend=backend, **options)
        assert p.shape == shape
        assert torch.autograd.grad(p.sum(), scores)[0].shape == shape


@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (2, 3, 0), (0,)])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_kwta_of_nothing(shape, backend):
    x = torch.randn(shape, requires_grad=True)
    assert mk.kwta(x, 0, backend=backend).shape == mk.kwta_mask(x, 0, backend=backend).shape == shape
    kept = kwta_apply(x, pack_bits(torch.zeros(shape, dtype=torch.bool)), backend=backend)
    assert torch.autograd.grad(kept.sum(), x)[0].shape == shape


@pytest.mark.parametrize("shape", [(5, 0), (2, 3, 0), (0, 0)])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_layer_of_no_features(shape, backend):
    with mk.use_backend(backend):
        for policy in (None, mnn.TokenChoice(1.0)):
            layer = mnn.MoE(mnn.TopKGate(0, E, 2), mnn.ExpertMLP(E, 0, H), policy)
            x = torch.randn(shape, requires_grad=True)
            y = layer(x).y
            y.sum().backward()
            assert y.shape == x.grad.shape == shape


def test_an_unknown_instruction_set_is_named():
    done = subprocess.run(
        [sys.executable, "-c", "import moe_kernels as mk, torch; mk.kwta(torch.randn(3), 1, backend='cpu')"],
        capture_output=True,
        text=True,
        env={**os.environ, "MOE_KERNELS_CPU_ISA": "sse"},
    )
    assert done.returncode != 0
    assert "MOE_KERNELS_CPU_ISA must be one of base" in done.stderr
    assert "got 'sse'" in done.stderr


@pytest.mark.parametrize("call", [*ROWS, *OTHERS])
def test_a_negative_view_is_read_negated(call):
    f, x = (ROWS | OTHERS)[call], torch.randn(4, 4)
    torch.testing.assert_close(f(torch._neg_view(x)), f(-x))


def test_short_kernels_keep_the_gil(monkeypatch):
    """Releasing and retaking the GIL can take longer than a short kernel."""
    released = {}

    class Recorded:
        def __getattr__(self, name: str) -> Callable[..., int]:
            def call(isa: int, release: bool, *args: float) -> int:
                released.setdefault(name, []).append(release)
                return getattr(module, name)(isa, release, *args)

            return call

    module = cpu.module
    monkeypatch.setattr(cpu, "module", Recorded())
    for rows in (2, 4096):
        x = torch.randn(rows, 64)
        mk.kwta(x, 5)
        mk.topk_gate(x, 2)
        mk.grouped_gemm(x, torch.randn(1, 64, 32), torch.tensor([0, rows]))
        mk.sinkhorn(x[: min(rows, 64), : min(rows, 64)], 20)
    mk.sinkhorn(torch.randn(8, 8), 1000)  # few elements, but many iterations
    assert released == {
        "kwta_fwd": [False, True],
        "topk_gate_fwd": [False, True],
        "grouped_gemm_fwd": [False, True],
        "sinkhorn_fwd": [False, True, True],
    }
