"""grouped_gemm by a loop over experts in float64, and comparisons with it."""

from __future__ import annotations

import math
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch

import moe_kernels as mk
from moe_kernels import backends
from moe_kernels.verify import relative_error

OP = "grouped_gemm"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


ACTS = {
    "relu": lambda pre: pre.clamp(min=0),
    "gelu": lambda pre: pre * (1 + torch.erf(pre / math.sqrt(2))) / 2,
    "silu": lambda pre: pre / (1 + torch.exp(-pre)),
    "tanh": torch.tanh,
    None: lambda pre: pre,
}
ACTS["swiglu"] = lambda pre: ACTS["silu"](pre.chunk(2, -1)[0]) * pre.chunk(2, -1)[1]
ACTS["geglu"] = lambda pre: ACTS["gelu"](pre.chunk(2, -1)[0]) * pre.chunk(2, -1)[1]


# Relative shares of five experts in the used rows. At least the last tenth of the rows is unused (`offsets_of`).
ROUTINGS = {
    "uniform": (1, 1, 1, 1, 1),
    "zipf": (100, 44, 27, 19, 14),
    "adversarial": (12, 6, 0, 6, 0),
    "empty": (0, 0, 0, 0, 0),
    "single": (0, 0, 1e-9, 0, 0),  # expert 2 has one row
}


def offsets_of(kind, rows, device="cpu"):
    share = torch.tensor(ROUTINGS[kind], dtype=torch.float64)
    counts = (share / share.sum().clamp(min=1e-9) * rows * 0.9).floor().long()
    if kind == "single":
        counts = (share > 0).long()
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32).to(device)


def loop(x, weight, offsets, bias, activation, token):
    """grouped_gemm by a loop over experts, in float64 on the CPU."""
    x, weight = x.cpu().double(), weight.cpu().double()
    rows = x if token is None else torch.where((token >= 0).cpu()[:, None], x[token.cpu().clamp(min=0)], 0)
    outs, bounds = [], offsets.tolist()
    for e, (first, last) in enumerate(pairwise(bounds)):
        pre = rows[first:last] @ weight[e]
        outs.append(ACTS[activation](pre if bias is None else pre + bias[e].cpu().double()))
    width = weight.shape[2] // 2 if activation in ("swiglu", "geglu") else weight.shape[2]
    return torch.cat([*outs, torch.zeros(len(rows) - bounds[-1], width, dtype=torch.float64)])


def skip_unsupported(target, dtype, op=OP):
    reason = backends.unsupported(target.backend, op, target.device, dtype)
    if reason:
        pytest.skip(reason)


def finest(target, op=OP):
    """float32, or bfloat16 where the backend has no float32."""
    return torch.bfloat16 if backends.unsupported(target.backend, op, target.device, torch.float32) else torch.float32


def judge(target, dtype, got, reference, truth, floor=1.0):
    """Asserts that an error, relative to the largest value, is at most twice the error of the reference in the same
    dtype plus `floor` epsilons (float32: at least 4; float64: twice as many)."""
    floor = max(floor, 4.0) if dtype == torch.float32 else 2 * floor if dtype == torch.float64 else floor
    eps = torch.finfo(dtype).eps * (2 if target.interpreted and dtype == torch.bfloat16 else 1)
    assert got.keys() == reference.keys() == truth.keys()
    for name in got:
        assert got[name].dtype == dtype, name
        allowed = 2 * relative_error(reference[name].cpu(), truth[name]) + floor * eps
        error = relative_error(got[name].cpu(), truth[name])
        assert error <= allowed, f"{name}: off by {error:.3g}, allowed {allowed:.3g}"


def results(call, leaves, grad):
    """Output and gradients of call(**leaves) by name."""
    leaves = {name: each.detach().requires_grad_() for name, each in leaves.items()}
    out = call(**leaves)
    gradients = torch.autograd.grad(out, list(leaves.values()), grad.to(out.device, out.dtype))
    return {"out": out.detach()} | dict(zip(leaves, gradients, strict=True))


def judged(target, dtype, call, exact, leaves, grad, floor=1.0):
    """Output and gradients of call(backend=..., **leaves) on the target, after `judge` has checked them against
    those of exact(**leaves) in float64 on the CPU."""
    got, reference = (
        results(lambda name=name, **given: call(backend=name, **given), leaves, grad)
        for name in (target.backend, "reference")
    )
    truth = results(exact, {name: each.cpu().double() for name, each in leaves.items()}, grad.cpu())
    judge(target, dtype, got, reference, truth, floor)
    return got


def check(target, dtype, kind, sizes, activation, gathered, with_bias=True):
    rows, din, dout, experts = sizes
    device, tokens = target.device, rows if kind == "adversarial" else max(1, rows // 2)
    offsets = offsets_of(kind, rows, device)
    token = torch.randint(-1, tokens, (rows,), device=device) if gathered else None
    leaves = {
        "x": torch.randn(tokens if gathered else rows, din, device=device).to(dtype),
        "weight": (torch.randn(experts, din, dout, device=device) / math.sqrt(din)).to(dtype),
    }
    if with_bias:
        leaves["bias"] = torch.randn(experts, dout, device=device).to(dtype)
    grad = torch.randn(rows, dout // 2 if activation in ("swiglu", "geglu") else dout).to(dtype)
    used = int(offsets[-1])
    grad[used:] = math.nan  # unused rows must not affect results
    if not gathered:
        leaves["x"][used:] = math.nan

    def call(x, weight, bias=None, backend=None):
        return mk.grouped_gemm(x, weight, offsets, bias=bias, activation=activation, row_token=token, backend=backend)

    def exact(x, weight, bias=None):
        return loop(x, weight, offsets, bias, activation, token)

    got = judged(target, dtype, call, exact, leaves, grad)
    assert not got["out"][used:].any()
    empty = (offsets.diff() == 0).cpu()
    assert all(not got[name][empty].any() for name in got if name in ("weight", "bias"))


@contextmanager
def fenced():
    """Inside the block, torch.empty and new_empty return NaN (integers: 7) between two guard areas. At the end the
    guard areas must be unchanged."""
    plain, fences = torch.empty, []

    def empty(*size, dtype, device="cpu"):
        size = torch.Size(size[0]) if len(size) == 1 and not isinstance(size[0], int) else torch.Size(size)
        margin = 256
        flat = plain(size.numel() + 2 * margin, dtype=dtype, device=device).fill_(7)
        middle = flat[margin : margin + size.numel()].view(size)
        fences.append((flat, margin))
        return middle.fill_(math.nan) if dtype.is_floating_point else middle

    def new_empty(self, *size, dtype=None, device=None):
        return empty(*size, dtype=dtype or self.dtype, device=device or self.device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", new_empty)
        patch.setattr(torch, "empty", empty)
        yield
    assert fences
    assert all((flat[:margin] == 7).all() and (flat[-margin:] == 7).all() for flat, margin in fences)
