"""Operators that multiply rows by the weights of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import python_ref.combine as combine
import python_ref.expert_norms as norms
import python_ref.plan as plans
from python_ref.grouped_gemm import activate, grouped_gemm
from tests.helpers.operators.of_routing import (
    CHOICES,
    ENDS,
    EXPERTS,
    INDEX,
    PLAN,
    arrays,
    gathered,
    random,
    rises,
)
from tests.helpers.operators.operator import (
    INT32_MAX,
    Call,
    Given,
    Operator,
    Rule,
    computed,
    gradients,
    need,
    wide,
    with_value,
    within,
)

GATED = ("swiglu", "geglu")
ACTIVATIONS = ("", "relu", "gelu", "silu", "tanh", *GATED)


def _weight(dtype: torch.dtype, *shape: int) -> Tensor:
    return random(dtype, *shape) / shape[-2] ** 0.5


def _products(x: Tensor, weight: Tensor, offsets: Tensor, row_token: Tensor | None, bias: Tensor | None) -> Tensor:
    """(R, Dout), zeros in rows that are not in use."""
    rows = x if row_token is None else gathered(x, row_token)
    need(rises(offsets, rows.shape[0]), "expert_offsets")
    return grouped_gemm(rows, weight, offsets, bias=bias)


def _activated(pre: Tensor, activation: str, offsets: Tensor) -> Tensor:
    """act(pre), but zeros in rows that are not in use."""
    rows = torch.arange(pre.shape[0])[:, None]
    return torch.where(rows < offsets[-1], activate(pre, activation or None), 0)


# The grouped GEMM


def _gemm(dtype: torch.dtype) -> dict[str, Call]:
    offsets = arrays("expert_offsets")["expert_offsets"]
    rest = {"activation": "swiglu", "keep_pre": True, "backend": "cpu"}
    tokens = {"x": random(dtype, 5, 7), "weight": _weight(dtype, 3, 7, 8), "expert_offsets": offsets}
    tokens |= {**arrays("row_token"), "bias": random(dtype, 3, 8)}
    rows = {"x": random(dtype, 9, 37), "weight": _weight(dtype, 3, 37, 19), "expert_offsets": offsets}
    rows |= {"row_token": None, "bias": None}
    return {
        "tokens": tokens | rest,
        "rows": rows | rest | {"activation": "gelu", "keep_pre": False},
        "linear": rows | rest | {"activation": "", "keep_pre": False},
    }


def _gemm_fwd(s: Given) -> tuple[Tensor, ...]:
    x, weight, bias = wide(s.x, s.weight, s.bias)
    pre = _products(x, weight, s.expert_offsets, s.row_token, bias).detach()
    return _activated(pre, s.activation, s.expert_offsets), pre if s.keep_pre else pre[:0]


def _gemm_bwd_calls(dtype: torch.dtype) -> dict[str, Call]:
    def call(given: Call, activation: str, pre: bool, wanted: list[bool]) -> Call:
        names = "x", "weight", "expert_offsets", "row_token", "bias"
        x, weight, bias = wide(given["x"], given["weight"], given["bias"])
        offsets = given["expert_offsets"]
        saved = _products(x, weight, offsets, given["row_token"], bias).detach().to(dtype)
        grad = random(dtype, *_activated(saved, activation, offsets).shape)
        rest = {"pre": saved if pre else None, "activation": activation, "wanted": wanted, "backend": "cpu"}
        return {"grad": grad} | {name: given[name] for name in names} | rest

    found = _gemm(dtype)
    return {
        "pre": call(found["tokens"], "swiglu", True, [True] * 3),
        "recomputed": call(found["rows"], "gelu", False, [True, True, False]),
        "linear": call(found["tokens"], "", False, [True, False, True]),
    }


def _gemm_bwd(s: Given) -> tuple[Tensor, ...]:
    if not any(s.wanted):
        return (s.x.new_zeros(0),) * 3
    x, weight, bias = leaves = wide(s.x, s.weight, s.bias)
    pre = with_value(_products(x, weight, s.expert_offsets, s.row_token, bias), s.pre)
    return gradients(_activated(pre, s.activation, s.expert_offsets), s.grad, leaves, s.wanted)


# The expert MLP


def _mlp_of(dtype: torch.dtype, full: bool, **sizes: int) -> dict[str, Any]:
    dim, width, hidden, dout = (sizes[name] for name in ("dim", "width", "hidden", "dout"))
    return {
        "x": random(dtype, len(CHOICES), dim),
        "weights": random(computed(dtype), len(CHOICES), 2) if full else None,
        "w_in": _weight(dtype, EXPERTS, dim, width),
        "w_out": _weight(dtype, EXPERTS, hidden, dout),
        "b_in": random(dtype, EXPERTS, width) if full else None,
        "b_out": random(dtype, EXPERTS, dout) if full else None,
    }


SMALL = {"dim": 7, "width": 8, "hidden": 4, "dout": 6}
WIDE = {"dim": 37, "width": 19, "hidden": 19, "dout": 33}
ORDER = ("expert_offsets", "row_token", "row_choice", "slot_row")


def _mlp_calls(dtype: torch.dtype) -> dict[str, Call]:
    full = _mlp_of(dtype, True, **SMALL) | arrays(*ORDER)
    none = _mlp_of(dtype, False, **WIDE) | arrays(*ORDER, capacity=None)
    return {
        "full": full | {"activation": "geglu", "keep_pre": True, "backend": "cpu"},
        "none": none | {"activation": "gelu", "keep_pre": False, "backend": "cpu"},
    }


def _mlp(s: Given, leaves: list[Any]) -> tuple[Tensor, Tensor]:
    x, weights, w_in, w_out, b_in, b_out = leaves
    pre = with_value(_products(x, w_in, s.expert_offsets, s.row_token, b_in), getattr(s, "pre", None))
    hidden = _activated(pre, s.activation, s.expert_offsets)
    rows = _products(hidden, w_out, s.expert_offsets, None, b_out)
    need(within(s.slot_row, -1, rows.shape[0]), "slot_row")
    return combine.combine(rows, s, weights), pre


def _leaves(s: Given) -> list[Any]:
    return wide(s.x, s.weights, s.w_in, s.w_out, s.b_in, s.b_out)


def _mlp_fwd(s: Given) -> tuple[Tensor, ...]:
    y, pre = _mlp(s, _leaves(s))
    return y.detach(), pre.detach() if s.keep_pre else pre[:0].detach()


def _mlp_bwd_calls(dtype: torch.dtype) -> dict[str, Call]:
    def call(given: Call, pre: bool, wanted: list[bool]) -> Call:
        parts = {name: value for name, value in given.items() if name not in ("activation", "keep_pre", "backend")}
        saved = _mlp(Given(**given), _leaves(Given(**given)))[1].detach().to(dtype)
        rest = {"pre": saved if pre else None, "activation": given["activation"], "wanted": wanted, "backend": "cpu"}
        return {"grad": random(dtype, len(CHOICES), given["w_out"].shape[2])} | parts | rest

    found = _mlp_calls(dtype)
    return {
        "pre": call(found["full"], True, [True] * 6),
        "recomputed": call(found["none"], False, [True, False, True, True, False, False]),
    }


def _mlp_bwd(s: Given) -> tuple[Tensor, ...]:
    leaves = _leaves(s)
    return gradients(_mlp(s, leaves)[0], s.grad, leaves, s.wanted)


def _of_choices(dtype: torch.dtype) -> dict[str, Call]:
    experts = torch.tensor(CHOICES)
    beyond = torch.where(experts == 2, 2**31 + 5, experts)
    return {
        "int64": _mlp_of(dtype, True, **SMALL) | {"experts": beyond, "activation": "geglu", "backend": "cpu"},
        "int32": _mlp_of(dtype, False, **WIDE) | {"experts": experts.int(), "activation": "gelu", "backend": "cpu"},
    }


def _choices_mlp(s: Given) -> tuple[Tensor]:
    num_experts = s.w_in.shape[0]
    need(s.experts.numel() == 0 or bool(s.experts.min() >= -1), "experts")
    plan = plans.make_plan(s.experts, num_experts)
    given = Given(**vars(s) | {name: getattr(plan, name) for name in ORDER})
    return (_mlp(given, _leaves(s))[0].detach(),)


# The norms


def _norms(dtype: torch.dtype) -> dict[str, Call]:
    def call(full: bool, sizes: dict[str, int], activation: str) -> Call:
        given = _mlp_of(dtype, full, **sizes)
        del given["weights"]
        return given | {"activation": activation, "backend": "cpu", "winners": None}

    found = {"full": call(True, SMALL, "swiglu"), "none": call(False, WIDE, "relu"), "linear": call(False, WIDE, "")}
    return found | {"winners": call(True, SMALL, "geglu") | {"winners": 2}}


def _norm(s: Given, leaves: list[Any]) -> Tensor:
    x, w_in, w_out, b_in, b_out = leaves
    return norms.expert_norms(x, w_in, w_out, b_in=b_in, b_out=b_out, activation=s.activation or None)


def _norm_leaves(s: Given) -> list[Any]:
    return wide(s.x, s.w_in, s.w_out, s.b_in, s.b_out)


def _norms_bwd(dtype: torch.dtype) -> dict[str, Call]:
    def call(given: Call, wanted: list[bool], keeps: bool = False) -> Call:
        found = _norm(Given(**given), _norm_leaves(Given(**given))).detach().to(computed(dtype))
        parts = {name: given[name] for name in ("x", "w_in", "w_out", "b_in", "b_out")}
        rest = {"norms": found, "activation": given["activation"], "wanted": wanted, "backend": "cpu"}
        kept = dict.fromkeys(("pre", "outputs"))
        if keeps:
            kept = dict(zip(kept, _kept(Given(**given))[1:], strict=True))
            kept = {name: each.to(dtype).contiguous() for name, each in kept.items()}
        grad = random(computed(dtype), *found.shape)
        if given["winners"] is not None:  # more than so many gradients are exact on the CPU, an error on GPUs
            grad[:, given["winners"] :] = 0
        return {"grad": grad} | parts | rest | {"winners": given["winners"]} | kept

    found = _norms(dtype)
    return {
        "kept": call(found["full"], [True] * 5, keeps=True),
        "kept linear": call(found["linear"], [True, False, True, False, False], keeps=True),
        "winners": call(found["winners"], [True] * 5),
        "full": call(found["full"], [True] * 5),
        "none": call(found["none"], [True, True, True, False, False]),
        "linear": call(found["linear"], [False, True, False, False, False]),
    }


def _kept(s: Given, leaves: list[Any] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The norms, pre-activations (E, T, W) and outputs (E, T, O)."""
    x, w_in, w_out, b_in, b_out = _norm_leaves(s) if leaves is None else leaves
    pre = torch.einsum("td,edw->etw", x, w_in)
    pre = with_value(pre if b_in is None else pre + b_in[:, None], getattr(s, "pre", None))
    y = torch.einsum("eth,eho->eto", activate(pre, s.activation or None), w_out)
    y = y if b_out is None else y + b_out[:, None]
    return y.norm(dim=-1).t().detach(), pre, y


def _norm_gradients(s: Given) -> tuple[Tensor, ...]:
    """dy_te = ds_te y_te / s_te with the norms s that the call has."""
    leaves = _norm_leaves(s)
    y = _kept(s, leaves)[2].transpose(0, 1)
    share = torch.where(s.norms == 0, 0, s.grad.double() / s.norms.double())
    direction = y.detach() if s.outputs is None else s.outputs.double().transpose(0, 1)
    return gradients(y, share[..., None] * direction, leaves, s.wanted)


def _halves(width: int, hidden: int, activation: str) -> bool:
    return width == (2 * hidden if activation in GATED else hidden)


EVEN: Rule = (lambda s: s.activation not in GATED or s.W % 2 == 0, "activation weight w_in bias")
HIDDEN: Rule = (lambda s: _halves(s.W, s.H, s.activation), "activation w_in w_out b_in pre")
WEIGHTS = ("weight", "w_in", "w_out")
BOUND: Rule = (lambda s: s.P == s.E + 1, "expert_offsets weight w_in")
SAVED: Rule = (lambda s: s.pre is None or s.activation != "", "pre activation")

GEMM = {"x": "f T D", "weight": "f E D W", "expert_offsets": "i P", "row_token": "i R", "bias": "f E W"}
MLP = {
    "x": "f T D",
    "weights": "c T K",
    "w_in": "f E D W",
    "w_out": "f E H O",
    "b_in": "f E W",
    "b_out": "f E O",
    "expert_offsets": "i P",
    "row_token": "i R",
    "row_choice": "i R",
    "slot_row": "i T K",
}
WINNERS = (0, lambda s: INT32_MAX)
NORMS = {name: MLP[name] for name in ("x", "w_in", "w_out", "b_in", "b_out")}
OFFSETS = {"expert_offsets": (0, lambda s: (s.T if s.row_token is None else s.R) + 1), "row_token": INDEX["row_token"]}
IN_ORDER: Rule = (
    lambda s: rises(s.expert_offsets, (s.x if s.row_token is None else s.row_token).shape[0]),
    "expert_offsets row_token",
)
TOKENS: Rule = (lambda s: within(s.row_token, -1, s.T), "row_token")


def _no_wanted_bias(s: Given) -> bool:
    """A gradient is wanted only of what is there."""
    return all(value is not None or not wanted for value, wanted in zip((s.x, s.weight, s.bias), s.wanted, strict=True))


OPERATORS = {
    "grouped_gemm_fwd": Operator(
        GEMM,
        _gemm,
        _gemm_fwd,
        choices={"activation": ACTIVATIONS},
        reordered=WEIGHTS,
        index=OFFSETS,
        rules=(ENDS, BOUND, EVEN),
        soft=(IN_ORDER, TOKENS),
    ),
    "grouped_gemm_bwd": Operator(
        {"grad": "f R G"} | GEMM | {"pre": "f R W"},
        _gemm_bwd_calls,
        _gemm_bwd,
        choices={"activation": ACTIVATIONS},
        reordered=WEIGHTS,
        flags={"wanted": 3},
        index=OFFSETS,
        rules=(
            ENDS,
            BOUND,
            EVEN,
            (lambda s: _halves(s.W, s.G, s.activation), "grad weight activation"),
            (lambda s: s.row_token is not None or s.R == s.T, "grad x row_token pre"),
        ),
        soft=(IN_ORDER, TOKENS, SAVED, (_no_wanted_bias, "wanted bias")),
        saved=("pre",),
    ),
    "expert_mlp_fwd": Operator(
        MLP,
        _mlp_calls,
        _mlp_fwd,
        choices={"activation": ACTIVATIONS},
        reordered=WEIGHTS,
        index=INDEX,
        rules=(ENDS, BOUND, HIDDEN),
        soft=PLAN,
    ),
    "expert_mlp_bwd": Operator(
        {"grad": "f T O"} | MLP | {"pre": "f R W"},
        _mlp_bwd_calls,
        _mlp_bwd,
        choices={"activation": ACTIVATIONS},
        reordered=WEIGHTS,
        flags={"wanted": 6},
        index=INDEX,
        rules=(ENDS, BOUND, HIDDEN),
        soft=(*PLAN, SAVED),
        saved=("pre",),
    ),
    "expert_mlp_of_choices": Operator(
        {name: MLP[name] for name in ("x", "weights", "w_in", "w_out", "b_in", "b_out")} | {"experts": "ij T K"},
        _of_choices,
        _choices_mlp,
        choices={"activation": ACTIVATIONS},
        reordered=WEIGHTS,
        index={"experts": (-1, lambda s: s.E)},
        rules=(HIDDEN,),
        soft=((lambda s: s.experts.numel() == 0 or bool(s.experts.min() >= -1), "experts"),),
        families=("expert_mlp",),
    ),
    "expert_norms_fwd": Operator(
        NORMS,
        _norms,
        lambda s: (_norm(s, _norm_leaves(s)).detach(),),
        ints={"winners": WINNERS},
        choices={"activation": ACTIVATIONS},
        reordered=WEIGHTS,
        rules=(HIDDEN,),
    ),
    "expert_norms_kept_fwd": Operator(
        NORMS,
        lambda dtype: {name: {k: v for k, v in call.items() if k != "winners"} for name, call in _norms(dtype).items()},
        lambda s: tuple(each.detach() for each in _kept(s)),
        choices={"activation": ACTIVATIONS},
        reordered=WEIGHTS,
        rules=(HIDDEN,),
        backends=("cpu",),
    ),
    "expert_norms_bwd": Operator(
        {"grad": "c T E"} | NORMS | {"norms": "c T E", "pre": "f E T W", "outputs": "f E T O"},
        _norms_bwd,
        _norm_gradients,
        ints={"winners": WINNERS},
        choices={"activation": ACTIVATIONS},
        reordered=WEIGHTS,
        flags={"wanted": 5},
        rules=(HIDDEN, (lambda s: (s.pre is None) == (s.outputs is None), "pre outputs")),
        saved=("norms", "pre", "outputs"),
    ),
}
