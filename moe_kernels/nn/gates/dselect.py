"""DSelect-k (Hazimeh et al. 2021), a baseline of COMET trees: k selectors that choose the bits of an expert's index."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor, nn

from moe_kernels.nn._invariance import softmax, spread, total
from moe_kernels.nn._mask import real_rows
from moe_kernels.nn._parameters import RouterLinear, router_dtype
from moe_kernels.nn.gates.gate import Gate, GateOutput
from moe_kernels.nn.losses import tree_entropy
from moe_kernels.ops._checks import check_int, check_number, check_positive
from moe_kernels.ops.tree_gate import smooth_step


class DSelectKGate(Gate):
    """gates_i = sum over j of w_j r_ji,  r_ji = product over bits b of i: h(z_jb) if bit b is set, else 1 - h(z_jb).

        z = Z x + c  (T, k, m),  w = softmax(A x + a)  (T, k),  m = ceil(log2 E), highest bit first;  h: smooth step

    Args:
        dim, num_experts: D, E >= 2.
        k: number of selectors.
        gamma: width of the smooth step.
        entropy: coefficient of mean over t of -sum over j, i of r_ji log(r_ji + 1e-6).
        reciprocal: coefficient of sum over t, j of 1 / (1e-6 + sum over i of r_ji), used if E is no power of two. The
            2^m - E codes from E on then have no expert; their share of a selector is lost, so gates can sum to
            less than one.
        generator: draws Z ~ U(-gamma/100, gamma/100); None is torch's own generator, which always draws A and a. c
            starts at 0.

    Output: dense. losses: "entropy" and "reciprocal" in training, if their coefficients are not 0. statistics:
    "experts_per_sample", the mean over tokens of the number of gates of at least 1e-5. Gradient: to x and the
    parameters of `code` (Z, c) and `mix` (A, a).

    Source: Hazimeh et al. 2021, with the entropy averaged over the batch as in COMET trees' code.

    Example:
        >>> DSelectKGate(16, 8, 2)(torch.randn(4, 16)).gates.shape
        torch.Size([4, 8])
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        k: int,
        *,
        gamma: float = 1.0,
        entropy: float = 0.0,
        reciprocal: float = 1.0,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dtype = router_dtype(dtype)
        super().__init__(num_experts, fewest=2, dim=dim)
        self.k = check_int("DSelectKGate", "k", k, 1, 2**31 - 1, "selectors")
        self.gamma = check_positive("DSelectKGate", "gamma", gamma)
        self.entropy = check_number("DSelectKGate", "entropy", entropy)
        self.reciprocal = check_number("DSelectKGate", "reciprocal", reciprocal)
        bits, bound = self.k * self._code_length, self.gamma / 100
        self.code = RouterLinear(
            dim, bits, bound=bound, zero_bias=True, generator=generator, device=device, dtype=dtype
        )
        self.mix = nn.Linear(dim, self.k, device=device, dtype=dtype)

    @property
    def _code_length(self) -> int:
        """m, the number of bits of a code."""
        return (self.num_experts - 1).bit_length()

    @property
    def bits(self) -> Tensor:
        """(E, m) bool: the code of every expert. It is no buffer, since to_empty would leave a buffer undefined."""
        return self._bits(self.code.weight.device)

    def _bits(self, device: torch.device) -> Tensor:
        m = self._code_length
        shifts = torch.arange(m - 1, -1, -1, device=device)
        return (torch.arange(self.num_experts, device=device)[:, None] >> shifts) & 1 == 1

    def forward(self, x: Tensor, ids: Tensor | None = None, mask: Tensor | None = None) -> GateOutput:
        x, ids = self.real(x, ids, mask)
        z = self.project(self.code, x).view(x.shape[0], self.k, self._code_length)
        set_, clear = smooth_step(z, self.gamma), smooth_step(-z, self.gamma)
        # Not prod(-1): its backward pass makes the host wait for a GPU, to learn whether a factor is 0.
        set_, clear = (spread(each, 2, self.num_experts) for each in (set_, clear))
        selectors = reduce(torch.mul, torch.where(self._bits(z.device), set_, clear).unbind(-1))
        gates = total(spread(softmax(self.project(self.mix, x)), 2, self.num_experts) * selectors, 1)
        losses = {}
        if self.training and self.entropy:
            losses["entropy"] = self.entropy * tree_entropy(selectors, mask=mask)
        if self.training and self.reciprocal and self.num_experts & (self.num_experts - 1):
            losses["reciprocal"] = self.reciprocal * real_rows(1 / (selectors.sum(-1) + 1e-6), mask).sum()
        return GateOutput.of_gates(gates, losses, {"experts_per_sample": gates.detach()}, mask)

    def extra_repr(self) -> str:
        return f"k={self.k}, gamma={self.gamma:g}, entropy={self.entropy:g}, reciprocal={self.reciprocal:g}"
