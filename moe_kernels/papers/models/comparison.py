"""The models that COMET fixed routing compares with its MLP, as section 4.2.1 describes them."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_kernels.nn.comet import ACTIVATIONS, CometMLP, MaskedLinear
from moe_kernels.ops._autocast import as_autocast
from moe_kernels.ops._checks import check_choice, check_int
from moe_kernels.ops.combine import combine
from moe_kernels.ops.dispatch import dispatch
from moe_kernels.ops.grouped_gemm import ACTIVATIONS as FUSED
from moe_kernels.ops.grouped_gemm import grouped_gemm
from moe_kernels.ops.kwta import k_from_fraction, kwta, kwta_mask, pack_bits
from moe_kernels.ops.plan import make_plan
from moe_kernels.ops.topk_gate import topk_gate
from moe_kernels.papers.models.mlp import comet_mlp


class ScoredMLP(CometMLP):
    """A CometMLP whose masks m_l are computed from the backbone x_l = m_l * f(a_l), a_l = W_l x_{l-1} + b_l.

        by = "activations"   m_l = C_k(a_l)            the model "topk"
        by = "inputs"        m_l = C_k(V_l x_{l-1})    the model "layerwise"; V_l is random and frozen

    C_k(v) is the mask of kwta: 1 for the k largest elements of v, else 0. Masks have no gradient.
    """

    by = "activations"

    def forward(self, x: Tensor, bits: Sequence[Tensor] | None = None, samples: Tensor | None = None) -> Tensor:
        _refuse_bits(self, bits, samples)
        return self.output(self._hidden(x))

    def masks(self, x: Tensor) -> list[Tensor]:
        return self.with_masks(x)[1]

    def with_masks(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """x (..., N_0) -> the output (..., N_L) and the masks m_1 .. m_{L-1}, bool, from one forward pass."""
        masks: list[Tensor] = []
        return self.output(self._hidden(x, masks)), masks

    def _hidden(self, x: Tensor, masks: list[Tensor] | None = None) -> Tensor:
        """Returns x_{L-1}; appends m_1 .. m_{L-1} to `masks`, if given."""
        for layer, v in zip(self.hidden, self.router.buffers(), strict=True):
            assert isinstance(layer, MaskedLinear)
            a = F.linear(x, layer.weight, layer.bias)
            c = (a if self.by == "activations" else F.linear(x, v)).detach()
            x = kwta(c, layer.k, values=ACTIVATIONS[self.activation](a), ties=self.ties, backend=self.backend)
            if masks is not None:
                masks.append(kwta_mask(c, layer.k, ties=self.ties, backend=self.backend))
        return x


class LayerwiseMLP(ScoredMLP):
    """ScoredMLP with masks from a frozen random projection of each layer's input."""

    by = "inputs"


class DropoutMLP(CometMLP):
    """The dense MLP with dropout after every hidden layer; `comparison_mlp` sets the dropout rate to 1 - p."""

    rate = 0.5

    def forward(self, x: Tensor, bits: Sequence[Tensor] | None = None, samples: Tensor | None = None) -> Tensor:
        _refuse_bits(self, bits, samples)
        for layer in self.hidden:
            x = F.dropout(layer(x), self.rate, self.training)
        return self.output(x)


def _refuse_bits(model: nn.Module, bits: object, samples: object) -> None:
    if bits is not None or samples is not None:
        raise ValueError(f"{type(model).__name__}: takes no bits and no samples, since it makes its own masks")


class MoEMLP(nn.Module):
    """floor(1 / p) MLPs (experts) with hidden layers of k_from_fraction(p, width) neurons, and a router r.

        y = softmax(r(x))_e expert_e(x),  e = argmax r(x)

    r is an MLP with one hidden layer, as wide as an expert's first one. The paper does not say whether the router's
    probability multiplies the expert's output. Here it does, so that the router gets a gradient.
    frozen: the router does not train.
    """

    def __init__(self, widths: Sequence[int], p: float, *, activation: str, frozen: bool) -> None:
        super().__init__()
        inner = [k_from_fraction(p, n) for n in widths[1:-1]]
        self.num_experts, self.activation = int(1 / Fraction(str(p))), activation
        sizes = list(pairwise((widths[0], *inner, widths[-1])))
        self.weights = nn.ParameterList(torch.empty(self.num_experts, n_in, n_out) for n_in, n_out in sizes)
        self.biases = nn.ParameterList(torch.empty(self.num_experts, n_out) for _, n_out in sizes)
        self.router_in = nn.Linear(widths[0], inner[0])
        self.router_out = nn.Linear(inner[0], self.num_experts)
        with torch.no_grad():
            for weight, bias in zip(self.weights, self.biases, strict=True):
                for parameter in (weight, bias):
                    parameter.uniform_(-(weight.shape[1] ** -0.5), weight.shape[1] ** -0.5)
        for layer in (self.router_in, self.router_out) if frozen else ():
            layer.requires_grad_(False)

    def logits(self, x: Tensor) -> Tensor:
        """The router's logits (T, E)."""
        return self.router_out(ACTIVATIONS[self.activation](self.router_in(x)))

    def forward(self, x: Tensor, logits: Tensor | None = None) -> Tensor:
        """x (T, N_0) -> (T, N_L). logits: the router's logits for x, if they are already known."""
        scores = self.logits(x) if logits is None else logits
        weights, experts = topk_gate(scores, 1, order="softmax_topk")
        plan = make_plan(experts, self.num_experts)
        rows = dispatch(x, plan)
        fused = self.activation if self.activation in FUSED else None
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True), 1):
            last = number == len(self.weights)
            rows, weight, bias = as_autocast(rows, weight, bias)
            rows = grouped_gemm(rows, weight, plan.expert_offsets, bias=bias, activation=None if last else fused)
            if not last and fused is None:
                rows = ACTIVATIONS[self.activation](rows)
        return combine(rows, plan, weights)


MASKED = {"comet": CometMLP, "topk": ScoredMLP, "layerwise": LayerwiseMLP}
MODELS = ("standard", "smaller", "dropout", "topk", "moe", "moe-fixed", "layerwise", "bernoulli", "tied", "l1", "comet")


def comparison_mlp(
    name: str,
    inputs: int,
    width: int,
    classes: int,
    *,
    layers: int = 4,
    p: float = 0.5,
    activation: str = "softplus",
    ties: str = "index",
    seed: int | None = None,
) -> CometMLP | MoEMLP:
    """The model `name`, one of MODELS, with keep fraction p and `layers` linear layers, hidden ones of `width` neurons.

    "smaller" and the experts of "moe" and "moe-fixed" have k_from_fraction(p, width) neurons in a hidden layer instead.
    "bernoulli" and "tied" are dense models; recipes/comet.py passes them masks of `tied_masks` as bits. "l1" is the
    standard model; recipes/comet.py adds the L1 term to its loss.

    "moe" and "moe-fixed" are drawn by torch's own generator, not from `seed`. The models other than "moe", "moe-fixed"
    and "smaller" have the same initial weights for the same seed.
    """
    check_choice("comparison_mlp", "name", name, MODELS)
    check_int("comparison_mlp", "layers", layers, 2, 2**31 - 1, "linear layers")
    if name in ("moe", "moe-fixed"):
        widths = (inputs, *[width] * (layers - 1), classes)
        return MoEMLP(widths, p, activation=activation, frozen=name == "moe-fixed")
    width = k_from_fraction(p, width) if name == "smaller" else width
    kind = DropoutMLP if name == "dropout" else MASKED.get(name, CometMLP)
    options: dict[str, Any] = {"layers": layers, "activation": activation, "ties": ties, "seed": seed}
    # Drawn on the CPU, so that a seed gives the same weights for every device.
    model = comet_mlp(inputs, width, classes, p=p if name in MASKED else 1.0, kind=kind, device="cpu", **options)
    if isinstance(model, DropoutMLP):
        model.rate = 1 - p
    return model


def tied_masks(samples: int, width: int, p: float, always: int, device: torch.device, chunk: int = 4096) -> Tensor:
    """One layer's random masks as bits: int32 (samples, ceil(width / 32)).

    The first `always` neurons (generalisation neurons) are always active, the others with probability p. always = 0
    gives Bernoulli masking, always > 0 example-tied dropout (Maini et al. 2023). Drawn by torch's own CPU generator.
    """
    shared = torch.arange(width, device="cpu") < always
    packed = [
        pack_bits((torch.rand(min(chunk, samples - first), width, device="cpu") < p) | shared)
        for first in range(0, samples, chunk)
    ]
    return torch.cat(packed).to(device)
