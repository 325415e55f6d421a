"""Calls recognised by what their tensors look like: nothing that a check or a launch depends on may be missed; and what
a kernel of C++ takes."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import combinations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

import moe_kernels as mk
from moe_kernels import backends
from moe_kernels.backends import _look, cpu
from moe_kernels.backends.native import grouped_gemm_cpu
from moe_kernels.backends.native.activation import ACTIVATIONS
from moe_kernels.ops.kwta import pack_bits

LOOKS = [_look.by_attributes] if _look.look is _look.by_attributes else [_look.by_attributes, _look.look]


@pytest.mark.parametrize("look", LOOKS)
def test_what_differs_looks_different(look):
    x = torch.randn(4, 6)
    tensors = {
        "itself": x,
        "its dtype": x.to(torch.int32),
        "a dtype of the same size": x.view(torch.float32).half(),
        "another half": x.bfloat16(),
        "its shape": x[:3],
        "its rank": x.flatten(),
        "its strides": x.t().contiguous().t(),
        "a step": torch.randn(4, 12)[:, ::2],
        "nothing": None,
    }
    seen = {name: look(each) for name, each in tensors.items()}
    assert all(each is not None for each in seen.values())
    for (name, one), (other_name, other) in combinations(seen.items(), 2):
        assert one != other, (name, other_name)
    assert look(torch.randn(4, 6)) == look(x.clone().requires_grad_()) == seen["itself"]
    assert len({look(x, None), look(None, x), look(x), look(x, x), look()}) == 5


@pytest.mark.parametrize("look", LOOKS)
def test_what_is_no_strided_tensor_has_no_look(look):
    for each in ([1.0], "words", torch.eye(3).to_sparse()):
        assert look(each) is None
        assert look(torch.ones(1), each) is None
    assert look(torch.ones(2)) == look(torch.ones(2))  # no error is left behind


def test_a_look_of_many_dimensions_is_not_cut_short():
    many = [torch.ones([1] * 60), torch.ones([*[1] * 59, 2])]
    seen = [_look.look(*many), _look.look(many[0], many[0])]
    assert seen[0] is None or seen[0] != seen[1]


def test_a_call_of_another_look_is_checked_again():
    x, weight, offsets = torch.randn(6, 4), torch.randn(2, 4, 3), torch.tensor([0, 3, 6], dtype=torch.int32)
    for _ in range(2):
        expected = mk.grouped_gemm(x, weight, offsets, backend="reference")
        torch.testing.assert_close(mk.grouped_gemm(x, weight, offsets, backend="cpu"), expected)
        torch.testing.assert_close(mk.grouped_gemm(x, weight, offsets.long(), backend="cpu"), expected)
        for strided in (
            weight.transpose(1, 2).contiguous().transpose(1, 2),
            torch.randn(2, 4, 6)[..., ::2].copy_(weight),
        ):
            torch.testing.assert_close(mk.grouped_gemm(x, strided, offsets, backend="cpu"), expected)
        wide = torch.randn(6, 9)[:, 2:6].copy_(x)
        torch.testing.assert_close(mk.grouped_gemm(wide, weight, offsets, backend="cpu"), expected)
        with pytest.raises(ValueError, match=r"weight must be \(E, Din, Dout\)"):
            mk.grouped_gemm(x, weight[:, :3], offsets)
        with pytest.raises(TypeError, match="weight must have dtype float32"):
            mk.grouped_gemm(x, weight.double(), offsets)
        with pytest.raises(TypeError, match="rows must be a Tensor, got list"):
            mk.grouped_gemm([x], weight, offsets)
        with pytest.raises(TypeError, match="strided tensor"):
            mk.grouped_gemm(x.to_sparse(), weight, offsets)
        with pytest.raises(ValueError, match="must rise"):
            mk.grouped_gemm(x, weight, offsets.flip(0))


@pytest.mark.parametrize("look", LOOKS)
def test_both_looks_lead_to_the_same_gradients(look, monkeypatch):
    monkeypatch.setattr("moe_kernels.ops._checks.look", look)
    monkeypatch.setattr(backends, "remembered", {})
    offsets = torch.tensor([0, 3, 6], dtype=torch.int32)
    for _ in range(3):
        x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(2, 4, 3, requires_grad=True)
        bias, grad = torch.randn(2, 3, requires_grad=True), torch.randn(3, 6).t()  # not as the first call's
        for leaves in ((x, weight), (x, weight, bias)):
            made = [
                torch.autograd.grad(mk.grouped_gemm(*leaves[:2], offsets, bias=each, backend=name), leaves, grad)
                for name in ("cpu", "reference")
                for each in [bias if len(leaves) == 3 else None]
            ]
            for got, expected in zip(*made, strict=True):
                torch.testing.assert_close(got, expected)
    assert len(backends.remembered) == 4


def test_saved_tensors_that_come_back_with_other_strides():
    torch.manual_seed(0)
    x = torch.randn(6, 8)[:, :4].requires_grad_()
    weight = torch.randn(2, 3, 4).transpose(1, 2).requires_grad_()
    offsets, grad = torch.tensor([0, 3, 6], dtype=torch.int32), torch.randn(6, 3)

    def gradients(backend="cpu"):
        return torch.autograd.grad(mk.grouped_gemm(x, weight, offsets, backend=backend), (x, weight), grad)

    def packed(each):
        return each.clone(memory_format=torch.contiguous_format)

    expected = gradients("reference")
    for order in ((True, False), (False, True)):
        backends.remembered.clear()
        for hooked in order:
            with torch.autograd.graph.saved_tensors_hooks(packed, lambda each: each) if hooked else nullcontext():
                torch.testing.assert_close(gradients(), expected)


class _Wrapped(torch.Tensor):
    """Whose memory is elsewhere."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda each: each.inner, (args, kwargs or {}))
        return function(*args, **kwargs)


def test_tensors_of_a_class_of_their_own_are_dispatched():
    x, weight, offsets = torch.randn(6, 4), torch.randn(2, 4, 3), torch.tensor([0, 3, 6], dtype=torch.int32)
    expected, winners = mk.grouped_gemm(x, weight, offsets), mk.kwta(x, 2)
    for own in (_Wrapped, FakeTensorMode().from_tensor):
        found = mk.grouped_gemm(own(x), own(weight), own(offsets)), mk.kwta(own(x), 2)
        for one, other in zip(found, (expected, winners), strict=True):
            assert one.shape == other.shape
            assert isinstance(one, FakeTensor) or torch.equal(one, other)
    assert backends.remembered  # of the plain ones
    assert torch.equal(mk.grouped_gemm(x, weight, offsets), expected)


def test_a_choice_is_not_remembered_beyond_its_reason(monkeypatch):
    x, weight, offsets = torch.randn(6, 4), torch.randn(2, 4, 3), torch.tensor([0, 3, 6], dtype=torch.int32)
    chosen = []
    monkeypatch.setattr(backends, "remembered", {})
    real = backends.choose
    monkeypatch.setattr(backends, "choose", lambda *args: chosen.append(real(*args)) or chosen[-1])
    mk.grouped_gemm(x, weight, offsets)
    with mk.use_backend("reference"):
        mk.grouped_gemm(x, weight, offsets)
    monkeypatch.setenv("MOE_KERNELS_BACKEND", "reference")
    mk.grouped_gemm(x, weight, offsets)
    mk.grouped_gemm(x, weight, offsets, backend="cpu")
    mk.grouped_gemm(x, weight, offsets)
    assert chosen == ["cpu", "reference", "cpu"]  # once each


def test_no_tensor_is_held():
    x, weight, offsets = torch.randn(6, 4), torch.randn(2, 4, 3), torch.tensor([0, 3, 6], dtype=torch.int32)
    mk.grouped_gemm(x.requires_grad_(), weight, offsets).sum().backward()
    places = {x.data_ptr(), weight.data_ptr()}
    held = [each for value in backends.remembered.values() for run in (value[1] or {}).values() for each in _cells(run)]
    assert not any(isinstance(each, torch.Tensor) and each.data_ptr() in places for each in held)


def _cells(run):
    return [cell.cell_contents for cell in getattr(run, "__closure__", None) or ()]


def test_inference_first_and_training_then():
    x, weight, offsets = torch.randn(6, 4), torch.randn(2, 4, 31), torch.tensor([0, 3, 6], dtype=torch.int32)
    grouped_gemm_cpu._nothing.cache_clear()
    with torch.inference_mode():
        mk.grouped_gemm(x, weight, offsets)
    mk.grouped_gemm(x.requires_grad_(), weight, offsets).sum().backward()
    torch.testing.assert_close(x.grad[0], weight[0].sum(1))


def test_an_error_stands_alone():
    with pytest.raises(ValueError, match="rows must be") as caught:
        mk.grouped_gemm(torch.randn(6), torch.randn(2, 4, 3), torch.tensor([0, 3, 6]))
    assert caught.value.__context__ is None


class Unknown(torch.Tensor):
    """A type that DLPack's interface is not asked about."""


@pytest.mark.parametrize("given", [lambda x: x, torch.Tensor.data_ptr, lambda x: x.as_subclass(Unknown)])
def test_a_kernel_takes_tensors_of_any_type_and_addresses(given):
    grad, mask = torch.randn(3, 80)[1:, 7:47], torch.rand(2, 40) < 0.5
    bits, dx = pack_bits(mask), torch.full((2, 40), torch.nan)
    cpu.module.kwta_bwd(cpu.isa, 4, given(grad), 80, given(bits), given(dx), 2, 40, 1)
    assert torch.equal(dx, grad * mask)


def test_a_kernel_has_the_name_of_its_launcher():
    assert cpu.module.kwta_bwd.__name__ == "kwta_bwd"


def test_a_kernel_takes_none_for_nothing():
    values = torch.randn(2, 40)
    bits = torch.full((2, 2), -1, dtype=torch.int32)
    expected = values.tanh()
    assert cpu.module.masked_mlp_fwd(cpu.isa, 0, values, None, bits, None, 0, ACTIVATIONS["tanh"], 2, 40, 1) == 0
    torch.testing.assert_close(values, expected)


def test_a_kernel_refuses_what_it_cannot_take():
    x = torch.randn(2, 40)
    with pytest.raises(TypeError, match="kwta_bwd: expected 8 arguments, got 3"):
        cpu.module.kwta_bwd(cpu.isa, 4, x, 80)
    with pytest.raises(TypeError, match="index of an instruction set"):
        cpu.module.kwta_bwd()
    with pytest.raises(TypeError, match="argument 0 is no 32-bit integer"):
        cpu.module.kwta_bwd(cpu.isa, 2**40, x, 40, x, x, 2, 40, 1)
    with pytest.raises(TypeError):
        cpu.module.kwta_bwd(cpu.isa, x, x, 40, x, x, 2, 40, 1)
    with pytest.raises(AttributeError, match="data_ptr"):
        cpu.module.kwta_bwd(cpu.isa, 4, "words", 40, x, x, 2, 40, 1)
    with pytest.raises(RuntimeError):
        cpu.module.kwta_bwd(len(cpu.module.isas), 4, x, 40, x, x, 2, 40, 1)
