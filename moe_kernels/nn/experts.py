"""Experts of a layer in one module: the first dimension of each parameter is E; a RoutingPlan groups rows by expert."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_kernels.backends import is_batch_invariant
from moe_kernels.nn._invariance import refuse_random
from moe_kernels.nn._parameters import empty_parameter, linear_init_
from moe_kernels.ops._autocast import as_autocast
from moe_kernels.ops._checks import check_backend, check_choice, check_int, check_number, check_size
from moe_kernels.ops.combine import combine
from moe_kernels.ops.expert_mlp import expert_mlp
from moe_kernels.ops.expert_norms import expert_norms
from moe_kernels.ops.grouped_gemm import ACTIVATIONS, HALVING, grouped_gemm
from moe_kernels.plan import RoutingPlan


class Experts(nn.Module):
    """E experts of equal shape. `experts(x, plan, weights)` maps (T, D) to the weighted sums (T, Dout).

    `rows(x, plan)` returns the experts' outputs (R, Dout) for the R rows of the plan, before weighting. A subclass
    defines `outputs`, which returns the rows before dropout.

    Across processes: moe_kernels.nn.parallel.ExpertParallel shards the parameters by expert and sets `exchange`, which
    sends rows to the ranks that own their experts and the outputs back. num_experts stays the number of all experts.

    Autocast acts as on torch.nn.Linear: if it is on for the device of x, x and the parameters are cast to its dtype,
    and the output has this dtype; each gradient has the dtype of its tensor. As in torch, float64 is not cast. Gate
    weights are not cast. The weighted sums are computed in float32, those of float64 rows in float64.

    Example:
        >>> plan = mk.make_plan(torch.tensor([[0], [1], [1]]), num_experts=2)
        >>> ExpertMLP(2, 8, 16)(torch.randn(3, 8), plan, None, part="rows").shape
        torch.Size([3, 8])
    """

    exchange: Any = None

    def __init__(
        self, num_experts: int, activation: str | None = None, dropout: float = 0.0, backend: str | None = None
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.num_experts = check_int(name, "num_experts", num_experts, 1, 2**31 - 1, "experts")
        check_choice(name, "activation", activation, (None, *ACTIVATIONS))
        self.dropout = check_number(name, "dropout", dropout, 0, 1, "a rate")
        self.activation, self.backend = activation, check_backend(name, backend)

    def outputs(self, x: Tensor, plan: RoutingPlan) -> Tensor:
        """(R, Dout): the outputs of this process's experts, without dropout."""
        raise NotImplementedError

    def rows(self, x: Tensor, plan: RoutingPlan) -> Tensor:
        return self._apply_dropout(self._all_outputs(x, plan))

    def _all_outputs(self, x: Tensor, plan: RoutingPlan) -> Tensor:
        """(R, Dout): the outputs of all experts, including those of other processes."""
        return self.outputs(x, plan) if self.exchange is None else self.exchange(self, x, plan)

    def _apply_dropout(self, y: Tensor) -> Tensor:
        if not (self.training and self.dropout):
            return y
        refuse_random(type(self).__name__, f"dropout={self.dropout:g}")
        return F.dropout(y, self.dropout)

    def _cast(self, x: Tensor, weight: Tensor, *more: Tensor | None) -> tuple[Any, ...]:
        """x and the parameters, after autocast; raises TypeError unless they have one dtype then."""
        found = as_autocast(x, weight, *more)
        if found[0].dtype != found[1].dtype:
            double = torch.float64 in (x.dtype, weight.dtype)
            autocast = "; torch.autocast casts no float64" if double else ", or call the layer in torch.autocast"
            raise TypeError(
                f"{type(self).__name__}: x must have the dtype of the parameters, {weight.dtype}; got {x.dtype}; "
                f"convert x or the layer with .to(dtype){autocast}"
            )
        return found

    def _own(self, *names: str) -> tuple[Any, ...]:
        """The parameters with these names; if they are sharded, the part for this process's experts."""
        parameters = tuple(getattr(self, name) for name in names)
        return parameters if self.exchange is None else tuple(map(self.exchange.own, parameters))

    def extra_repr(self) -> str:
        shapes = ", ".join(f"{name}={tuple(each.shape)}" for name, each in self.named_parameters(recurse=False))
        return f"{shapes}, activation={self.activation!r}, dropout={self.dropout:g}"

    def forward(
        self,
        x: Tensor,
        plan: RoutingPlan | None,
        weights: Tensor | None,
        *,
        part: str = "output",
        winners: int | None = None,
    ) -> Tensor:
        """part: "output" returns the weighted sums (T, Dout); "rows" and "norms" call the method of that name.
        winners: for `norms`.

        Layers and gates pass `part` instead of calling the method, so that the module's hooks run; those of fully_shard
        gather the parameters.
        """
        if part == "norms":
            return self.norms(x, winners)
        assert plan is not None
        rows = self.rows(x, plan)
        return rows if part == "rows" else combine(rows, plan, weights, backend=self.backend)

    def norms(self, x: Tensor, winners: int | None = None) -> Tensor:
        """(T, E): the l2 norm of every expert's output for every token. winners: as in expert_norms."""
        raise NotImplementedError


def _needs_gradient(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


class ExpertLayer(Experts):
    """Experts of one linear layer: dropout(act(x W_e + b_e)). COMET trees has ReLU and dropout 0.5 for MovieLens.

    Args:
        num_experts, dim, out: E, D, Dout.
        activation: as in grouped_gemm.
        dropout: rate after the activation.

    Parameters: weight (E, D, Dout) and, if `bias`, bias (E, Dout); with a gated activation they have 2 Dout columns.
    Each expert is initialised as an nn.Linear.

    Example:
        >>> plan = mk.make_plan(torch.tensor([[0], [1], [1]]), num_experts=2)
        >>> ExpertLayer(2, 8, 4)(torch.randn(3, 8), plan, torch.ones(3, 1)).shape
        torch.Size([3, 4])
    """

    def __init__(
        self,
        num_experts: int,
        dim: int,
        out: int,
        *,
        activation: str | None = "relu",
        bias: bool = True,
        dropout: float = 0.0,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_experts, activation, dropout, backend)
        dim, out = (check_size("ExpertLayer", name, size) for name, size in (("dim", dim), ("out", out)))
        columns = 2 * out if activation in HALVING else out
        self.weight = empty_parameter(num_experts, dim, columns, device=device, dtype=dtype)
        self.bias = empty_parameter(num_experts, columns, device=device, dtype=dtype) if bias else None
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        for each in (self.weight, self.bias):
            linear_init_(each, self.weight.shape[1], generator)

    def outputs(self, x: Tensor, plan: RoutingPlan) -> Tensor:
        x, weight, bias = self._cast(x, *self._own("weight", "bias"))
        named = {"bias": bias, "row_token": plan.row_token, "backend": self.backend}
        return grouped_gemm(x, weight, plan.expert_offsets, activation=self.activation, **named)


class ExpertMLP(Experts):
    """Experts of two linear layers, act(x W_in_e + b_in_e) W_out_e + b_out_e: a transformer's feed-forward block.

    Args:
        num_experts, dim, hidden: E, D, H.
        out: Dout, D if None.
        activation: as in expert_mlp; a gated activation turns 2 H columns into H values.
        dropout: rate on the weighted sum, as after a dense feed-forward block; `rows` applies dropout to each row.

    Parameters: w_in (E, D, H, or 2 H if gated), w_out (E, H, Dout) and, if `bias`, b_in (E, H or 2 H) and b_out
    (E, Dout). Each expert is initialised as two nn.Linear.

    Example:
        >>> experts = ExpertMLP(4, 16, 32, activation="swiglu")
        >>> experts.w_in.shape, experts.w_out.shape
        (torch.Size([4, 16, 64]), torch.Size([4, 32, 16]))
    """

    def __init__(
        self,
        num_experts: int,
        dim: int,
        hidden: int,
        out: int | None = None,
        *,
        activation: str = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_experts, activation, dropout, backend)
        sizes = (("dim", dim), ("hidden", hidden), ("out", dim if out is None else out))
        dim, hidden, out = (check_size("ExpertMLP", name, size) for name, size in sizes)
        columns = 2 * hidden if activation in HALVING else hidden
        self.w_in = empty_parameter(num_experts, dim, columns, device=device, dtype=dtype)
        self.w_out = empty_parameter(num_experts, hidden, out, device=device, dtype=dtype)
        self.b_in = empty_parameter(num_experts, columns, device=device, dtype=dtype) if bias else None
        self.b_out = empty_parameter(num_experts, out, device=device, dtype=dtype) if bias else None
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        dim, hidden = self.w_in.shape[1], self.w_out.shape[1]
        for each, fan_in in ((self.w_in, dim), (self.w_out, hidden), (self.b_in, dim), (self.b_out, hidden)):
            linear_init_(each, fan_in, generator)

    def outputs(self, x: Tensor, plan: RoutingPlan) -> Tensor:
        offsets, backend = plan.expert_offsets, self.backend
        x, w_in, w_out, b_in, b_out = self._cast(x, *self._own("w_in", "w_out", "b_in", "b_out"))
        hidden = grouped_gemm(
            x, w_in, offsets, bias=b_in, activation=self.activation, row_token=plan.row_token, backend=backend
        )
        return grouped_gemm(hidden, w_out, offsets, bias=b_out, backend=backend)

    def forward(
        self,
        x: Tensor,
        plan: RoutingPlan | None,
        weights: Tensor | None,
        *,
        part: str = "output",
        winners: int | None = None,
    ) -> Tensor:
        if part != "output":
            return super().forward(x, plan, weights, part=part, winners=winners)
        assert plan is not None
        # In the mode batch_invariant one process adds gradients in the order in which several do; outputs are the same.
        differentiated = torch.is_grad_enabled() and any(map(_needs_gradient, (x, weights, *self.parameters())))
        if self.exchange is not None or (differentiated and is_batch_invariant()):
            y = combine(self._all_outputs(x, plan), plan, weights, backend=self.backend)
            return self._apply_dropout(y)
        x, w_in, w_out, b_in, b_out = self._cast(x, self.w_in, self.w_out, self.b_in, self.b_out)
        named = {"weights": weights, "b_in": b_in, "b_out": b_out, "backend": self.backend}
        return self._apply_dropout(expert_mlp(x, plan, w_in, w_out, activation=self.activation, **named))

    def norms(self, x: Tensor, winners: int | None = None) -> Tensor:
        """(T, E): the l2 norm of every expert's output for every token of x (T, D), in the dtype of the parameters.

        winners: as in expert_norms, counted over the experts of all processes.
        """
        return self.own_norms(x, winners) if self.exchange is None else self.exchange.norms(self, x, winners)

    def own_norms(self, x: Tensor, winners: int | None = None) -> Tensor:
        """The columns of `norms` for this process's experts."""
        x, w_in, w_out, b_in, b_out = self._cast(x, *self._own("w_in", "w_out", "b_in", "b_out"))
        named: dict[str, Any] = {"activation": self.activation, "winners": winners, "backend": self.backend}
        norms = expert_norms(x, w_in, w_out, b_in=b_in, b_out=b_out, **named)
        return norms.to(self.w_in.dtype)
