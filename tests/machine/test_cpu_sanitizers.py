"""The CPU kernels under the address and undefined-behaviour sanitizers (tests/sanitizers)."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch

import moe_kernels as mk
from moe_kernels import verify
from moe_kernels.backends import cpu
from moe_kernels.backends.native import grouped_gemm_cpu, tree_gate_products_cpu
from moe_kernels.ops.expert_mlp import expert_mlp_of_choices
from moe_kernels.verify import relative_error
from tests import sanitizers
from tests.helpers.tree_gate import drawn

pytestmark = [
    pytest.mark.skipif(sanitizers.unavailable() is not None, reason=str(sanitizers.unavailable())),
    pytest.mark.timeout(900),  # for a build of the CPU kernels with the sanitizers
]


# Not AVX-512, because the sanitizers do not check its masked loads and stores.
ISA = "avx2" if "avx2" in cpu.module.isas else "base"


@pytest.fixture
def sanitized():
    with sanitizers.use(ISA):
        yield


ROUTING = ("topk_gate", "make_plan", "plan_expert_choice", "plan_priority", "dispatch", "combine")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("op", ["kwta", *ROUTING])
def test_small_cases(sanitized, op, dtype):
    row = verify.check(op, "cpu", dtype, "cpu", small=True)
    assert row.verdict == "ok", row.note


@pytest.mark.parametrize("n", [16384, 16385])
def test_long_rows_of_kwta(sanitized, n):
    x = torch.randint(-4, 4, (1, n + 3)).float()[:, :n]
    for ties in ("index", "strict", "all"):
        assert torch.equal(mk.kwta(x, 8000, ties=ties, backend="cpu"), mk.kwta(x, 8000, ties=ties, backend="reference"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_more_choices_of_a_gate_than_passes(sanitized, dtype):
    logits = torch.randn(2, 512, dtype=dtype)  # for k > kPasses = 256 the kernel sorts
    _, experts = mk.topk_gate(logits, 300, backend="cpu")
    assert torch.equal(experts, mk.topk_gate(logits, 300, backend="reference")[1])


def test_indices_out_of_range_are_refused_before_anything_is_read_by_them(sanitized):
    x, weights = torch.randn(6, 3), torch.rand(6, 2)
    plan = mk.make_plan(torch.tensor([[0, 1]] * 6), 2, backend="reference")
    rows = torch.randn(plan.num_rows, 3, requires_grad=True)
    refused = "the launcher returned 1$"
    for index in (2, -2, 2**31 - 1):
        with pytest.raises(RuntimeError, match=f"make_plan_fwd: {refused}"):
            mk.make_plan(torch.tensor([[0, index]]), 2, backend="cpu")
    for name, index in (("slot_row", 12), ("slot_row", 10**8), ("row_token", 6), ("expert_offsets", -1)):
        wrong = dataclasses.replace(plan, **{name: torch.full_like(getattr(plan, name), index)})
        with pytest.raises(RuntimeError, match=f"dispatch_fwd: {refused}"):
            mk.dispatch(x, wrong, backend="cpu")
        if name == "slot_row":
            for each in (None, weights):
                with pytest.raises(RuntimeError, match=f"combine_fwd: {refused}"):
                    mk.combine(rows, wrong, each, backend="cpu")
        elif name == "expert_offsets":
            y = mk.combine(rows, wrong, weights, backend="cpu")
            with pytest.raises(RuntimeError, match=f"combine_bwd: {refused}"):
                y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_tree_gate(sanitized, dtype):
    for tokens, dim, trees, experts in ((1, 1, 1, 2), (3, 33, 3, 7), (130, 17, 2, 64), (2, 40, 1, 100)):
        size = {"x": (tokens, dim), "split_weight": (trees, experts - 1, dim), "leaf_weight": (trees, experts, dim)}
        arguments = {name: torch.randn(each).to(dtype).requires_grad_() for name, each in size.items()}
        for parity in (None, "bert"):
            gates, probs = mk.tree_gate(**arguments, gamma=2.0, parity=parity, backend="cpu")
            expected, _ = mk.tree_gate(**arguments, gamma=2.0, parity=parity, backend="reference")
            torch.testing.assert_close(gates, expected)
            (gates.float().square().sum() + probs.float().square().sum()).backward()
        assert all(each.grad.isfinite().all() for each in arguments.values())
        if dtype != torch.bfloat16:  # rounding to bfloat16 can change which of two almost equally likely leaves wins
            for gamma in (1e-6, 4.0):
                got = mk.tree_route(**arguments, gamma=gamma, backend="cpu")
                assert torch.equal(got[1], mk.tree_route(**arguments, gamma=gamma, backend="reference")[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_tree_products(sanitized, dtype, monkeypatch):
    for name in ("OVERHEAD", "PACKING"):  # with these costs at 0, few tokens suffice to skip products
        monkeypatch.setattr(tree_gate_products_cpu, name, 0)
    for tokens, dim, trees, experts in ((300, 33, 2, 48), (600, 16, 1, 100)):
        arguments = {name: each.to(dtype).requires_grad_() for name, each in drawn(tokens, dim, trees, experts).items()}
        gates, _ = mk.tree_gate(**arguments, gamma=0.1, backend="cpu")
        expected, _ = mk.tree_gate(**arguments, gamma=0.1, backend="reference")
        torch.testing.assert_close(gates, expected)
        gates.float().square().sum().backward()
        assert all(each.grad.isfinite().all() for each in arguments.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_sinkhorn(sanitized, dtype):
    for batch, n in ((1, 1), (35, 4), (3, 5), (33, 16), (2, 17)):
        # The kernel has several forms; which one computes a matrix depends on the range of its scores.
        scales = torch.tensor([1.0, 100.0, 3000.0]).repeat(batch)[:batch, None, None]
        scores = (scales * torch.randn(batch, n, n + 1)).to(dtype)[..., :n].requires_grad_()
        p = mk.sinkhorn(scores, 3, backend="cpu")
        expected = mk.sinkhorn(scores, 3, backend="reference")
        torch.testing.assert_close(p, expected)
        grad = torch.randn(batch, n, n).to(dtype)
        (got,) = torch.autograd.grad(p, scores, grad)
        torch.testing.assert_close(got, torch.autograd.grad(expected, scores, grad)[0])
        sums = {"rows": torch.rand(batch, n) + 0.5, "columns": torch.rand(n) + 0.5, "tolerance": 0.3}
        p = mk.sinkhorn(scores, 3, **sums, backend="cpu")
        torch.testing.assert_close(p, mk.sinkhorn(scores, 3, **sums, backend="reference"))
        p.backward(grad)
        assert scores.grad.isfinite().all()


def test_what_is_announced_lives_until_the_next_launch(sanitized):
    x = torch.randn(8)
    alive = weakref.ref(x)
    cpu.pointer("test", x, x.dtype)
    del x
    assert alive() is not None
    mk.kwta(torch.randn(2, 5), 2, backend="cpu")
    assert alive() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("small", [True, False])
def test_experts(sanitized, dtype, small, monkeypatch):
    monkeypatch.setattr(grouped_gemm_cpu, "in_cpp", lambda *args: small)
    for tokens, experts, dim, hidden, dout in ((1, 1, 1, 1, 1), (37, 3, 33, 19, 9), (300, 2, 17, 100, 33)):
        plan = mk.make_plan(torch.randint(-1, experts, (tokens, 2)), experts, capacity=tokens, backend="reference")
        for activation, width in (("gelu", hidden), ("swiglu", 2 * hidden)):
            sizes = {"x": (tokens, dim), "w_in": (experts, dim, width), "w_out": (experts, hidden, dout)}
            sizes |= {"weights": (tokens, 2), "b_in": (experts, width), "b_out": (experts, dout)}
            leaves = {name: torch.randn(size).to(dtype).requires_grad_() for name, size in sizes.items()}
            mk.expert_mlp(plan=plan, activation=activation, backend="cpu", **leaves).float().sum().backward()
            with torch.no_grad():  # -1 is no choice, and in expert_mlp_of_choices neither is a number >= experts
                choices = torch.randint(-1, experts + 1, (tokens, 2))
                choices[choices == experts] += 2**32 - experts if small else 0  # in 32 bits 2**32 would be expert 0
                given = mk.make_plan(torch.where(choices < experts, choices, -1), experts, backend="cpu")
                y = expert_mlp_of_choices(experts=choices, num_experts=experts, activation=activation, **leaves)
                assert torch.equal(y, mk.expert_mlp(plan=given, activation=activation, backend="cpu", **leaves))
            del leaves["weights"]
            mk.expert_norms(activation=activation, backend="cpu", **leaves).float().sum().backward()
            assert all(each.grad.isfinite().all() for each in leaves.values())
            rows = torch.randn(plan.num_rows, dim).to(dtype).requires_grad_()
            leaf = leaves["x"].detach().requires_grad_()
            weight = leaves["w_in"].detach().transpose(1, 2).contiguous().transpose(1, 2)
            out = mk.grouped_gemm(rows, weight, plan.expert_offsets, activation=activation, backend="cpu")
            out.float().sum().backward()
            expected = mk.grouped_gemm(rows, weight, plan.expert_offsets, activation=activation, backend="reference")
            # If torch multiplies, a 16-bit product may be rounded before the activation, and the result again.
            allowed = (2 if dtype == torch.bfloat16 else 16) * torch.finfo(dtype).eps
            assert relative_error(out, expected) <= allowed
            mk.grouped_gemm(leaf, weight, plan.expert_offsets, row_token=plan.row_token, backend="cpu").sum().backward()
            assert leaf.grad.isfinite().all()


def test_an_overrun_is_caught():
    x, y = torch.randn(1, 40), torch.empty(1, 39)
    module = sanitizers.Module(ISA)
    module.announce(x, y)
    with pytest.raises(RuntimeError, match="heap-buffer-overflow"):
        module.kwta_fwd(0, x.data_ptr(), 40, 0, 0, y.data_ptr(), 0, 0, 1, 40, 20, 0, 0.0, 1)


def test_a_call_sees_announced_buffers_only():
    x, y = torch.randn(1, 40), torch.empty(1, 40)
    module = sanitizers.Module(ISA)

    def kwta(given):
        module.kwta_fwd(0, given, 40, 0, 0, y.data_ptr(), 0, 0, 1, 40, 20, 0, 0.0, 1)

    module.announce(x)
    with pytest.raises(RuntimeError, match="a pointer into none of the announced buffers"):
        kwta(x.data_ptr())
    wide = torch.randn(2, 200)[:, :40]  # a strided view: its last row ends before element 240
    module.announce(wide, y)
    kwta(wide.data_ptr() + 4 * 200)
    assert torch.equal(y, mk.kwta(wide[1:], 20, backend="reference"))
    module.announce(wide, y)
    with pytest.raises(RuntimeError, match="heap-buffer-overflow"):
        kwta(wide.data_ptr() + 4 * 204)
    with pytest.raises(RuntimeError, match="kwta_fwd: 5 arguments, 14 expected"):
        module.kwta_fwd(0, 0, 0, 1, 40)
