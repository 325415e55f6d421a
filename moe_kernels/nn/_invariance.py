"""What layers compute otherwise in the mode batch_invariant, since the bits of torch's products depend on the batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_kernels.backends import is_batch_invariant, product_backend
from moe_kernels.ops._autocast import as_autocast
from moe_kernels.ops.combine import combine
from moe_kernels.ops.grouped_gemm import grouped_gemm
from moe_kernels.ops.plan import make_plan
from moe_kernels.sizes import all_rows, ordered_sum


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """F.linear; in the mode the grouped GEMM with one expert, which can apply one of its activations."""
    if not is_batch_invariant():
        assert activation is None
        return F.linear(x, weight, bias)
    x, weight, bias = as_autocast(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.new_zeros(x.shape[:-1].numel(), 0)
    named: dict[str, Any] = {"bias": None if bias is None else bias[None], "activation": activation}
    backend = product_backend(x)
    y = grouped_gemm(rows, weight.t()[None], all_rows(rows), backend=backend, **named)
    return y.view(*x.shape[:-1], weight.shape[0])


class _Linears(TorchFunctionMode):
    """Inside, F.linear is `linear`, also that of nn.Linear and of modules that wrap one, such as LoRA's."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (linear if function is F.linear else function)(*args, **(kwargs or {}))


def call_linear(module: nn.Module, x: Tensor) -> Tensor:
    """module(x), for a linear layer or a module that wraps one."""
    if not is_batch_invariant():
        return module(x)
    with _Linears():
        return module(x)


def total(x: Tensor, dim: int) -> Tensor:
    """x.sum(dim), in the mode in an order that depends on the size of this dimension alone."""
    return ordered_sum(x, dim) if is_batch_invariant() else x.sum(dim)


def spread(x: Tensor, dim: int, size: int) -> Tensor:
    """x with a new dimension of `size` equal parts: its gradient is a sum, which autograd's broadcasting would order by
    all sizes."""
    return _Spread.apply(x, dim, size) if is_batch_invariant() else x.unsqueeze(dim).expand(_inserted(x, dim, size))


def _inserted(x: Tensor, dim: int, size: int) -> list[int]:
    shape = list(x.shape)
    shape.insert(dim if dim >= 0 else x.dim() + 1 + dim, size)
    return shape


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int) -> Tensor:
        ctx.dim = dim
        return x.unsqueeze(dim).expand(_inserted(x, dim, size)).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ordered_sum(grad, ctx.dim), None, None


def softmax(x: Tensor) -> Tensor:
    """x.softmax(-1). torch's backward in float32 rounds a row otherwise if it is the only one."""
    return _Softmax.apply(x) if is_batch_invariant() else x.softmax(-1)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        wide = torch.promote_types(y.dtype, torch.float32)  # as in torch's, one rounding of 16-bit gradients
        probs, grad = y.to(wide), grad.to(wide)
        return (probs * (grad - ordered_sum(probs * grad, -1).unsqueeze(-1))).to(y.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """torch.sigmoid. On a CPU its vectorised loop rounds otherwise than the loop over the last elements, so in the mode
    it is the first of a softmax of two, of which torch computes each row alike."""
    if not is_batch_invariant():
        return x.sigmoid()
    return torch.stack([x, torch.zeros_like(x)], -1).softmax(-1)[..., 0]


def normalize(x: Tensor) -> Tensor:
    """F.normalize(x, dim=-1)."""
    if not is_batch_invariant():
        return F.normalize(x, dim=-1)
    norms = ordered_sum(x * x, -1).clamp(min=1e-24).sqrt()  # at least 1e-12, as in F.normalize
    return x / spread(norms, -1, x.shape[-1])


def add_share(y: Tensor, share: Tensor, x: Tensor) -> Tensor:
    """y + share x for share (T,): in the mode by combine, whose gradient of the share adds in a fixed order."""
    if not is_batch_invariant():
        return y + share[:, None].to(x.dtype) * x
    plan = make_plan(torch.zeros(x.shape[0], 1, dtype=torch.int32, device=x.device), 1)
    return y + combine(x, plan, share[:, None])


def refuse_random(name: str, what: str) -> None:
    """RuntimeError in the mode, for layers that draw random numbers."""
    if is_batch_invariant():
        raise RuntimeError(
            f"{name}: {what} draws random numbers, which depend on the other tokens of the call, so it cannot run "
            "inside batch_invariant(); turn it off, or call eval() if it is for training alone"
        )


def refuse_comparison(name: str, what: str) -> None:
    """RuntimeError in the mode, for policies in which tokens compete."""
    if is_batch_invariant():
        raise RuntimeError(
            f"{name}: {what} compares the tokens of a call, so a token's output would depend on the others; inside "
            "batch_invariant() expected a policy that drops nothing, such as TokenChoice()"
        )
