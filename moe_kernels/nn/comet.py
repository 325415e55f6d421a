"""COMET fixed routing: a frozen random network chooses, for every input, the active neurons of a backbone MLP.

    c_l = V_l z_{l-1},  m_l = C_k(c_l),  z_l = m_l * c_l,  z_0 = x_0          routing, eqs. 4 to 6 with g the identity
    a_l = W_l x_{l-1} + b_l,  x_l = m_l * f(a_l)                              backbone, eqs. 7 and 8; l = 1 .. L-1
    output = W_L x_{L-1} + b_L                                                never masked

C_k(c) is 1 for the k largest elements of c and 0 for the others (see moe_kernels.kwta). f is the backbone's activation,
g the routing's. Eq. 7 prints no bias; the backbone here has one by default, as in eq. 1. The routing has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor  # torch has no public predicate
from torch.compiler import is_compiling

from moe_kernels.backends import has_kernel, is_batch_invariant
from moe_kernels.nn._invariance import call_linear, linear, refuse_random
from moe_kernels.nn._parameters import reset
from moe_kernels.ops._autocast import autocast_on, without_autocast
from moe_kernels.ops._checks import (
    INDEX,
    check_backend,
    check_choice,
    check_int,
    check_number,
    check_size,
    check_tensor,
)
from moe_kernels.ops.grouped_gemm import IN_KERNELS
from moe_kernels.ops.kwta import TIES, k_from_fraction, kwta, kwta_apply, kwta_bits, unpack_bits
from moe_kernels.ops.kwta_linear import kwta_linear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "mish": F.mish,
}


class FixedRouting(nn.Module):
    """The frozen routing network: x_0 -> m_1 .. m_{L-1}, the active neurons of every hidden layer, as bits.

        c_l = V_l z_{l-1},  z_l = C_{k_l}(c_l) * c_l,  z_0 = x_0   (COMET fixed routing, eqs. 4 to 6; g the identity)
        V_l ~ U(-1/sqrt(N_{l-1}), 1/sqrt(N_{l-1})),  k_l = k_from_fraction(p, N_l),  no bias

    C_k(c) is 1 for the k largest elements of c, else 0. V_l (N_l, N_{l-1}) is the buffer `weight_l`; state dicts hold
    it. The masks depend only on x_0, so those of samples that are used again can be computed once (`kept`). Neither V
    nor x_0 gets a gradient. x_0 is converted to the dtype of V; autocast has no effect.

    Args:
        widths: (N_0, N_1, .., N_{L-1}): the input and every masked layer.
        p: keep fraction, 0 < p <= 1.
        ties, backend: as in kwta.
        generator: draws V, on the device of V; None is torch's own generator.

    Raises:
        ValueError, TypeError: fewer than two widths, a width below 1, p outside (0, 1], an unknown tie rule or backend.

    Example:
        >>> masks = FixedRouting((8, 20, 10), p=0.3).masks(torch.randn(5, 8))
        >>> [mask.sum(-1).tolist() for mask in masks]  # k = 6 of 20, 3 of 10
        [[6, 6, 6, 6, 6], [3, 3, 3, 3, 3]]
    """

    def __init__(
        self,
        widths: Sequence[int],
        p: float = 0.5,
        *,
        ties: str = "index",
        backend: str | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.widths = _widths("FixedRouting", widths, 2)
        check_backend("FixedRouting", backend)
        check_choice("FixedRouting", "ties", ties, TIES)
        self.p, self.ties, self.backend = p, ties, backend
        self.ks = tuple(k_from_fraction(p, n) for n in self.widths[1:])
        for layer, (n_in, n_out) in enumerate(pairwise(self.widths), 1):
            self.register_buffer(f"weight_{layer}", torch.empty(n_out, n_in, device=device, dtype=dtype))
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        for weight in self.buffers():
            _draw(weight, weight.shape[1], generator)

    def forward(self, x: Tensor) -> list[Tensor]:
        """x_0 (..., N_0) -> [m_1, .., m_{L-1}] (eq. 5), packed like kwta_bits: int32 (..., ceil(N_l / 32))."""
        if x.shape[-1:] != self.widths[:1]:
            raise ValueError(f"FixedRouting: x must be (..., {self.widths[0]}), got shape {tuple(x.shape)}")
        packed: list[Tensor] = []
        z = x.detach()
        with torch.no_grad(), without_autocast(x.device.type):
            for weight, k in zip(self.buffers(), self.ks, strict=True):
                scores = linear(z.to(weight.dtype), weight)
                z, bits = kwta_bits(scores, k, ties=self.ties, backend=self.backend)
                packed.append(bits)
        return packed

    def kept(self, x: Tensor, chunk: int = 4096) -> list[Tensor]:
        """The packed masks of many samples x_0 (n, N_0), computed `chunk` samples at a time."""
        return [torch.cat(layer) for layer in zip(*map(self, x.split(chunk)), strict=True)]

    def masks(self, x: Tensor) -> list[Tensor]:
        """x_0 (..., N_0) -> [m_1 bool (..., N_1), .., m_{L-1} bool (..., N_{L-1})], True for active neurons."""
        return [unpack_bits(bits, n) for bits, n in zip(self(x), self.widths[1:], strict=True)]

    def extra_repr(self) -> str:
        return f"widths={self.widths}, p={self.p}, ks={self.ks}, ties={self.ties!r}"


class MaskedLinear(nn.Linear):
    """A linear layer in which the k neurons with the highest scores c are active; the others have the value +0.

        x_l = C_k(c) * f(W x_{l-1} + b)                              (COMET fixed routing, eqs. 7 and 8)

    C_k(c) is 1 for the k largest elements of c, else 0. W (N_out, N_in), b (N_out) ~ U(-1/sqrt(N_in), 1/sqrt(N_in)).
    The scores get no gradient. The gradient of an inactive neuron's pre-activation W x_{l-1} + b is zero, except where
    scores are passed, not bits, and f has no finite derivative at a pre-activation of NaN or infinity. The output has
    the dtype of f(W x_{l-1} + b). Scores of another dtype are compared in the common dtype of both
    (torch.promote_types): conversion may round integer scores, but no floating-point ones.

    Given bits and no need for gradients, few active neurons are computed alone (`kwta_linear`): on a CPU where
    k <= N_out / 4 and N_in >= 128, on a GPU where k rows <= N_out, and not in compiled programs. Outputs then differ
    from those with gradients by rounding, as do those of a reentrant checkpoint from its repetition.

    Args:
        k: active neurons, 0 to out_features.
        activation: f, a name in ACTIVATIONS; None is the identity.
        ties, backend: as in kwta.
        in_features, out_features, bias, device, dtype: as in torch.nn.Linear.

    Raises:
        ValueError, TypeError: k outside [0, out_features], an unknown activation, tie rule or backend.

    Example:
        >>> y = MaskedLinear(8, 20, k=5, activation="tanh")(torch.randn(3, 8), torch.randn(3, 20))
        >>> (y != 0).sum(-1)
        tensor([5, 5, 5])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        k: int,
        *,
        activation: str | None = "relu",
        bias: bool = True,
        ties: str = "index",
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_size("MaskedLinear", "in_features", in_features)
        check_size("MaskedLinear", "out_features", out_features)
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.k = check_int("MaskedLinear", "k", k, 0, out_features, "active neurons among out_features")
        if activation is not None:
            check_choice("MaskedLinear", "activation", activation, tuple(ACTIVATIONS))
        check_choice("MaskedLinear", "ties", ties, TIES)
        check_backend("MaskedLinear", backend)
        self.activation, self.ties, self.backend = activation, ties, backend

    def forward(self, x: Tensor, c: Tensor | None = None, *, bits: Tensor | None = None) -> Tensor:
        """x (..., N_in), scores c (..., N_out) or bits (..., ceil(N_out / 32)) -> (..., N_out).

        With bits, c is not used, and k only to choose the faster of two products. Without scores and bits all neurons
        are active, as in a dense layer.
        """
        if is_batch_invariant():
            return self._invariant(x, c, bits)
        if bits is not None:
            # The mask comes before f, whose derivative at NaN or infinity could turn a gradient of zero into NaN.
            if self._winners_first(x):
                values = kwta_linear(x, self.weight, bits, self.bias, k=self.k, backend=self.backend)
            else:
                values = kwta_apply(super().forward(x), bits, backend=self.backend)
            values = self._activate(values)
            # Only softplus has f(0) != 0, so only its values need a second mask.
            return kwta_apply(values, bits, backend=self.backend) if self.activation == "softplus" else values
        return self._masked(self._activate(super().forward(x)), c)

    def _winners_first(self, x: Tensor) -> bool:
        """Whether kwta_linear computes this layer without gradients in less time than the dense product.

        On a CPU (one thread, 512 rows, N_in = N_out = 3000, float32) it takes .22 (AVX-512) or .29 to .37 (AVX2) of its
        time with a tenth of the neurons, .53 or .75 with three tenths; in bfloat16 with AVX512-BF16 .78 and 1.9. 128
        inputs and a quarter of 512 neurons take as long. On a GPU it should where the rows together read less than the
        weight. Programs of torch.compile and torch.export keep the dense product, as a rule about the number of rows
        would restrict them.
        """
        # Parametrised, pruned, sparse and quantised weights, and those under torch.func, are for torch's own product.
        if is_compiling() or not {"weight", "bias"} <= self._parameters.keys():
            return False
        parameters = [each for each in (self._parameters["weight"], self._parameters["bias"]) if each is not None]
        given = [x, *parameters]
        if torch.is_grad_enabled() and any(each.requires_grad for each in given):
            return False
        if any(type(each) not in (Tensor, nn.Parameter) or each.layout is not torch.strided for each in given):
            return False
        if any(each.dtype != x.dtype or each.device != x.device for each in parameters) or autocast_on(x.device.type):
            return False
        few = 4 * self.k <= self.out_features and self.in_features >= 128
        if not x.is_cpu:
            few = x.is_cuda and x.shape[:-1].numel() * self.k <= self.out_features
        return (
            few and not any(map(is_functorch_wrapped_tensor, parameters)) and has_kernel("kwta_linear", self.backend, x)
        )

    def _invariant(self, x: Tensor, c: Tensor | None, bits: Tensor | None) -> Tensor:
        """forward in the mode batch_invariant, where the product's kernel computes f.

        torch's vectorised functions round by an element's place in memory.
        """
        if self.activation not in (None, *IN_KERNELS):
            raise RuntimeError(
                f"MaskedLinear: the bits of {self.activation} depend on the batch; inside batch_invariant() expected "
                f"an activation of grouped_gemm ({', '.join(IN_KERNELS[1:5])}) or None"
            )
        values = linear(x, self.weight, self.bias, self.activation)
        return self._masked(values, c) if bits is None else kwta_apply(values, bits, backend=self.backend)

    def _masked(self, values: Tensor, c: Tensor | None) -> Tensor:
        if c is None:
            return values
        common = torch.promote_types(c.dtype, values.dtype)
        y = kwta(c.to(common), self.k, values=values.to(common), ties=self.ties, backend=self.backend)
        return y.to(values.dtype)

    def _activate(self, values: Tensor) -> Tensor:
        return values if self.activation is None else ACTIVATIONS[self.activation](values)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, k={self.k}, activation={self.activation!r}, ties={self.ties!r}"


class CometFFN(nn.Module):
    """A transformer's feed-forward layer with a mask over its hidden neurons (COMET fixed routing, section 4.2.2).

        c = V x,  y = W_out (C_k(c) * f(W_in x + b_in)) + b_out

    C_k(c) is 1 for the k largest elements of c, else 0. The paper only says that the random projection and the cap C_k
    are applied in the MLP layers. Here the projection V is frozen and multiplies the layer's input; the output is not
    masked. Other masks, such as those of a FixedRouting over the embedded tokens, can be passed as `bits`. p = 1 is the
    dense layer; V is still drawn.

    Args:
        dim, hidden: D, H; V is (H, D).
        p: keep fraction of the hidden neurons, 0 < p <= 1; k = k_from_fraction(p, H).
        activation: f, a name in ACTIVATIONS.
        dropout: rate after the hidden layer and after the output.
        ties: as in kwta.

    Input (..., D), output (..., D).

    Example:
        >>> CometFFN(16, 64, p=0.25)(torch.randn(2, 7, 16)).shape
        torch.Size([2, 7, 16])
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        p: float = 0.5,
        *,
        activation: str = "tanh",
        dropout: float = 0.0,
        ties: str = "index",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        k = k_from_fraction(p, hidden)
        self.hidden = MaskedLinear(dim, hidden, k, activation=activation, ties=ties, device=device, dtype=dtype)
        self.output = nn.Linear(hidden, dim, device=device, dtype=dtype)
        self.dropout = check_number("CometFFN", "dropout", dropout, 0, 1, "a rate")
        self.router = FixedRouting((dim, hidden), p, ties=ties, device=device, dtype=dtype)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        reset(self, generator)

    def extra_repr(self) -> str:
        return f"dropout={self.dropout:g}"

    @property
    def dense(self) -> bool:
        """Whether every neuron is active for every input, unless bits are passed."""
        return self.hidden.k == self.hidden.out_features

    def forward(self, x: Tensor, bits: Tensor | None = None) -> Tensor:
        """x (..., D) -> (..., D). bits, int32 (..., ceil(H / 32)): the active neurons; None: V x selects them."""
        if bits is None and not self.dense:
            (bits,) = self.router(x)
        if self.dropout and self.training:
            refuse_random("CometFFN", f"dropout={self.dropout:g}")
        x = F.dropout(self.hidden(x, bits=bits), self.dropout, self.training)
        return F.dropout(call_linear(self.output, x), self.dropout, self.training)

    def mask(self, x: Tensor, bits: Tensor | None = None) -> Tensor:
        """bool (..., H): the hidden neurons that are active in `forward` with the same arguments."""
        if bits is not None:
            return unpack_bits(bits, self.hidden.out_features)
        if self.dense:
            return x.new_ones((*x.shape[:-1], self.hidden.out_features), dtype=torch.bool)
        return self.router.masks(x)[0]


class CometMLP(nn.Module):
    """The MLP of COMET fixed routing: L linear layers. A FixedRouting masks the L-1 hidden ones, and never the output.

    p = 1 is the dense MLP: the routing does not run. Its weights V are still drawn and saved, so that a state dict fits
    every p and a generator gives the same weights at every p.

    Args:
        widths: (N_0, .., N_L): input, L-1 hidden layers, output; L >= 2.
        p: keep fraction of every hidden layer, 0 < p <= 1; k_l = k_from_fraction(p, N_l).
        activation: f of eq. 8, a name in ACTIVATIONS.
        bias: whether the backbone has biases; the routing has none.
        ties, backend: as in kwta.
        generator: draws the backbone, first layer to last, then the routing; None is torch's own generator.

    Raises:
        ValueError, TypeError: fewer than three widths, a width below 1, p outside (0, 1], an unknown activation, tie
            rule or backend.

    Example:
        >>> model = CometMLP((784, 1000, 1000, 10), p=0.1)
        >>> model(torch.randn(32, 784)).shape, model.router.ks
        (torch.Size([32, 10]), (100, 100))
    """

    def __init__(
        self,
        widths: Sequence[int],
        p: float = 0.5,
        *,
        activation: str = "relu",
        bias: bool = True,
        ties: str = "index",
        backend: str | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.widths, self.p = _widths("CometMLP", widths, 3), p
        self.activation, self.bias, self.ties, self.backend = activation, bias, ties, backend
        hidden = self.widths[:-1]
        # Constructors draw no weights on the meta device, so only reset_parameters draws, with `generator`.
        self.router = FixedRouting(hidden, p, ties=ties, backend=backend, device="meta", dtype=dtype)
        self.hidden = nn.ModuleList(
            MaskedLinear(
                n_in, n_out, k, activation=activation, bias=bias, ties=ties, backend=backend, device="meta", dtype=dtype
            )
            for (n_in, n_out), k in zip(pairwise(hidden), self.router.ks, strict=True)
        )
        self.output = nn.Linear(hidden[-1], self.widths[-1], bias=bias, device="meta", dtype=dtype)
        self.to_empty(device=device or torch.get_default_device())
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        for layer in (*self.hidden, self.output):
            for parameter in layer.parameters():
                _draw(parameter, layer.in_features, generator)
        self.router.reset_parameters(generator)

    def forward(self, x: Tensor, bits: Sequence[Tensor] | None = None, samples: Tensor | None = None) -> Tensor:
        """x_0 (..., N_0) -> a_L (..., N_L).

        bits: the masks m_1 .. m_{L-1}, if they are known, as int32; the routing then does not run. Shape
            (..., ceil(N_l / 32)), one row for each row of x_0, or, with `samples`, (S, ceil(N_l / 32)), one row for
            each of S samples, as `router.kept` returns them.
        samples: int32 or int64 (...): the row of `bits` for each row of x_0. ValueError without `bits`.
        """
        if samples is not None:
            if bits is None:
                raise ValueError("CometMLP: samples must be None without bits, whose rows they select")
            bits = _rows_of_samples(bits, samples, x)
        elif bits is None and not self.dense:
            bits = self.router(x)
        masks = [None] * len(self.hidden) if bits is None else bits
        for layer, mask in zip(self.hidden, masks, strict=True):
            x = layer(x, bits=mask)
        return call_linear(self.output, x)

    def masks(self, x: Tensor) -> list[Tensor]:
        """x_0 (..., N_0) -> [m_1, .., m_{L-1}], bool (..., N_l): the active neurons."""
        if self.dense:
            return [x.new_ones((*x.shape[:-1], n), dtype=torch.bool) for n in self.router.widths[1:]]
        return self.router.masks(x)

    @property
    def dense(self) -> bool:
        """Whether every neuron is active for every input, unless bits are passed."""
        return self.router.ks == self.router.widths[1:]

    def extra_repr(self) -> str:
        return f"widths={self.widths}, p={self.p}"


def _rows_of_samples(bits: Sequence[Tensor], samples: Tensor, x: Tensor) -> list[Tensor]:
    """The rows `samples` of every layer's masks; index_select refuses indices out of range."""
    check_tensor("CometMLP", "samples", samples, INDEX)
    if samples.shape != x.shape[:-1]:
        raise ValueError(
            f"CometMLP: samples must be {tuple(x.shape[:-1])}, one for each row of x; got {tuple(samples.shape)}"
        )
    rows = samples.flatten()
    return [mask.index_select(0, rows).view(*samples.shape, mask.shape[-1]) for mask in bits]


def _draw(weight: Tensor, n_in: int, generator: torch.Generator | None) -> None:
    """Draws W, b or V in place from U(-1/sqrt(n_in), 1/sqrt(n_in)), as COMET fixed routing and torch.nn.Linear do."""
    bound = 1 / sqrt(n_in)
    weight.uniform_(-bound, bound, generator=generator)


def _widths(name: str, widths: Sequence[int], minimum: int) -> tuple[int, ...]:
    if isinstance(widths, int) or len(widths) < minimum:
        raise ValueError(
            f"{name}: widths must be a sequence of at least {minimum} sizes, first the input's; got {widths!r}"
        )
    return tuple(check_int(name, "a width", width, 1, 2**31 - 1, "neurons of a layer") for width in widths)
