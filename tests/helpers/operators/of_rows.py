"""Operators that work on rows or matrices: kwta, the top-k gate, Sinkhorn's iteration, harden, the clamped SwiGLU."""

from __future__ import annotations

from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

import python_ref.harden as harden
import python_ref.kwta as kwta
import python_ref.sinkhorn as sinkhorn
from python_ref.grouped_gemm import activate
from python_ref.kwta_linear import kwta_linear
from tests.helpers.operators.of_routing import random
from tests.helpers.operators.operator import INT32_MAX, Call, Given, Operator, computed, gradients, wide

TIES = ("index", "strict", "all")


def _kwta_fwd(dtype: torch.dtype) -> dict[str, Call]:
    def call(n: int, k: int, ties: str, values: bool, bits: bool) -> Call:
        given = {"x": random(dtype, 3, n), "values": random(dtype, 3, n + 0).flip(0) if values else None}
        return {**given, "k": k, "ties": ties, "save_bits": bits, "backend": "cpu"}

    return {
        "values": call(40, 5, "index", True, True),
        "none": call(7, 3, "strict", False, False),
        "all": call(70, 9, "all", False, True),
    }


def _kept(s: Given) -> tuple[Tensor, ...]:
    mask = kwta.kwta_mask(s.x, s.k, ties=s.ties)
    bits = kwta.pack_bits(mask) if s.save_bits else torch.zeros(s.x.shape[0], 0, dtype=torch.int32)
    return torch.where(mask, s.x if s.values is None else s.values, 0), bits


def _kwta_bwd(dtype: torch.dtype) -> dict[str, Call]:
    def call(n: int) -> Call:
        bits = kwta.pack_bits(random(torch.float32, 3, n) > 0)
        return {"grad": random(dtype, 3, n), "bits": bits, "backend": "cpu"}

    return {"two words": call(40), "one word": call(7)}


def _kwta_mask(dtype: torch.dtype) -> dict[str, Call]:
    return {
        ties: {"x": random(dtype, 3, n), "k": 5, "ties": ties, "backend": "cpu"}
        for n, ties in zip((40, 9, 17), TIES, strict=True)
    }


def _kwta_linear_fwd(dtype: torch.dtype) -> dict[str, Call]:
    def call(tokens: int, dim: int, width: int, bias: bool) -> Call:
        bits = kwta.pack_bits(random(torch.float32, tokens, width) > 0.5)
        given = {"x": random(dtype, tokens, dim), "weight": random(dtype, width, dim)}
        given["bias"] = random(dtype, width) if bias else None
        return {**given, "bits": bits, "k": width // 2, "backend": "cpu"}

    return {"two words": call(3, 5, 40, True), "one word": call(2, 9, 7, False)}


def _taus(first: float, last: float) -> Tensor:
    return torch.tensor([first, last], dtype=torch.float64)


def _sums(n: int) -> dict[str, Tensor]:
    return {
        "row_sums": torch.full((2, n), 0.5, dtype=torch.float64),
        "column_sums": torch.full((2, n), 0.5, dtype=torch.float64),
    }


def _sinkhorn_fwd(dtype: torch.dtype) -> dict[str, Call]:
    def call(n: int, taus: Tensor, iterations: int, sums: dict, tolerance: float, implicit: bool) -> Call:
        given = {"scores": random(dtype, 2, n, n), "taus": taus, "iterations": iterations, **sums}
        return {**given, "tolerance": tolerance, "implicit": implicit, "backend": "cpu"}

    none = {"row_sums": None, "column_sums": None}
    return {
        "annealed": call(4, _taus(1.0, 0.5), 3, none, -1.0, False),
        "sums": call(4, _taus(1.0, 1.0), 3, _sums(4), 0.1, False),
        "implicit": call(4, _taus(1.0, 1.0), 300, none, -1.0, dtype not in HALF),
        "one at a time": call(19, _taus(1.0, 1.0), 2, none, -1.0, False),
    }


def _sinkhorn(s: Given, scores: Tensor, row_sums: Tensor | None, column_sums: Tensor | None) -> Tensor:
    first, last = s.taus.tolist()
    options = {"tau": last, "anneal_from": None if first == last else first, "rows": row_sums, "columns": column_sums}
    options["tolerance"] = None if s.tolerance < 0 else s.tolerance
    if getattr(s, "implicit", False):
        options["gradient"] = "implicit"
    return sinkhorn.sinkhorn(scores, s.iterations, **options)


def _stops_while_it_cools(s: Given) -> bool:
    """A tolerance and a falling temperature together have no definition."""
    return s.tolerance >= 0 and bool(s.taus[0] != s.taus[-1])


HALF = (torch.bfloat16, torch.float16)  # too coarse for row sums within 1e-5 of 1


def _doubly_stochastic(s: Given) -> tuple[Tensor | None]:
    return (None if _stops_while_it_cools(s) else _sinkhorn(s, s.scores, s.row_sums, s.column_sums),)


def _sinkhorn_bwd(dtype: torch.dtype) -> dict[str, Call]:
    found = _sinkhorn_fwd(dtype)
    del found["implicit"]
    return {
        name: {"grad": random(dtype, *call["scores"].shape).flip(0)}
        | {each: value for each, value in call.items() if each != "implicit"}
        for name, call in found.items()
    }


def _sinkhorn_gradients(s: Given) -> tuple[Tensor | None, ...]:
    if _stops_while_it_cools(s):
        return None, None, None
    leaves = wide(s.scores, s.row_sums, s.column_sums)
    return gradients(_sinkhorn(s, *leaves), s.grad, leaves, [True] * 3)


def _implicit(dtype: torch.dtype) -> dict[str, Call]:
    return {
        "uniform": {
            "grad": random(dtype, 2, 4, 4),
            "p": torch.full((2, 4, 4), 0.25, dtype=dtype),
            "taus": _taus(1.0, 0.5),
        }
    }


def _moderate(s: Given) -> bool:
    return abs(s.alpha) < 1e30 and 0 < s.limit < 1e30


def _swiglu_bwd(s: Given) -> tuple[Tensor | None, ...]:
    if not _moderate(s):  # PyTorch computes it, whatever it is
        return (None,)
    leaf = s.pre.to(computed(s.pre.dtype)).detach().requires_grad_()
    found = activate(leaf, "swiglu_clamped", s.alpha, s.limit)
    return torch.autograd.grad(found, leaf, s.grad.to(leaf.dtype))


MATRICES = {"scores": "f B n n", "taus": "all A", "row_sums": "d B n", "column_sums": "d B n"}
SINKHORN: dict[str, Any] = {
    "ints": {"iterations": (0, lambda s: INT32_MAX)},
    "floats": {"tolerance": lambda s: s.tolerance == s.tolerance},
    "rules": ((lambda s: s.A == 2 and all(0 < each < inf for each in s.taus.tolist()), "taus"),),
    "soft": (
        (lambda s: s.taus.dtype == torch.float64, "taus"),
        (lambda s: s.tolerance != 0 and isfinite(s.tolerance), "tolerance"),
        (lambda s: s.iterations > 0, "iterations"),
        (lambda s: s.tolerance < 0 or s.row_sums is not None, "tolerance row_sums column_sums"),
        (lambda s: not (s.implicit and s.scores.dtype in HALF), "implicit scores"),
        (lambda s: (s.row_sums is None) == (s.column_sums is None), "row_sums column_sums"),
    ),
}
CLAMPED: dict[str, Any] = {
    "soft": ((lambda s: s.limit <= torch.finfo(torch.float32).max, "limit"),),
    "floats": {"alpha": lambda s: isfinite(s.alpha), "limit": lambda s: 0 < s.limit < inf},
    "loose": True,
}
K_OF_N = {"k": (0, lambda s: s.N)}

OPERATORS = {
    "kwta_fwd": Operator(
        {"x": "f B N", "values": "f B N"}, _kwta_fwd, _kept, ints=K_OF_N, choices={"ties": TIES}, exact=True
    ),
    "kwta_bwd": Operator(
        {"grad": "f B N", "bits": "i B words"},
        _kwta_bwd,
        lambda s: (torch.where(kwta.unpack_bits(s.bits, s.N), s.grad, 0),),
        rules=((lambda s: s.words == (s.N + 31) // 32, "grad bits"),),
        exact=True,
    ),
    "kwta_mask": Operator(
        {"x": "f B N"},
        _kwta_mask,
        lambda s: (kwta.kwta_mask(s.x, s.k, ties=s.ties),),
        ints=K_OF_N,
        choices={"ties": TIES},
        exact=True,
        families=("kwta",),
    ),
    "kwta_linear_fwd": Operator(
        {"x": "f T D", "weight": "f N D", "bias": "f N", "bits": "i T words"},
        _kwta_linear_fwd,
        lambda s: (kwta_linear(*wide(s.x, s.weight), s.bits, *wide(s.bias)).detach(),),
        ints=K_OF_N,
        rules=((lambda s: s.words == (s.N + 31) // 32, "weight bits"),),
        backends=("cpu", "triton"),
    ),
    "sinkhorn_fwd": Operator(MATRICES, _sinkhorn_fwd, _doubly_stochastic, **SINKHORN),
    "sinkhorn_bwd": Operator({"grad": "f B n n"} | MATRICES, _sinkhorn_bwd, _sinkhorn_gradients, **SINKHORN),
    "sinkhorn_implicit_bwd": Operator(
        {"grad": "f B n n", "p": "f B n n", "taus": "all A"},
        _implicit,
        lambda s: (sinkhorn.implicit_gradient(s.p, s.grad, s.taus.tolist()[-1]).to(s.p.dtype),),
        rules=SINKHORN["rules"],
        soft=SINKHORN["soft"][:1],
        saved=("p",),
        families=("sinkhorn_implicit", "sinkhorn"),
    ),
    "harden": Operator(
        {"soft": "all ... n n"},
        lambda dtype: {"two": {"soft": random(dtype, 2, 4, 4)}},
        lambda s: (harden.harden(s.soft),),
        soft=((lambda s: s.soft.is_floating_point(), "soft"),),
        exact=True,
    ),
    "swiglu_clamped": Operator(
        {"pre": "f ... W"},
        lambda dtype: {"rows": {"pre": random(dtype, 5, 8), "alpha": 1.702, "limit": 0.9, "fixed": False}},
        lambda s: (activate(s.pre.to(computed(s.pre.dtype)), "swiglu_clamped", s.alpha, s.limit),),
        rules=((lambda s: s.W % 2 == 0, "pre"),),
        **CLAMPED,
    ),
    "swiglu_clamped_bwd": Operator(
        {"grad": "f ... H", "pre": "f ... W"},
        lambda dtype: {
            "rows": {
                "grad": random(dtype, 5, 4),
                "pre": random(dtype, 5, 8),
                "alpha": 1.702,
                "limit": 0.9,
                "fixed": False,
            }
        },
        _swiglu_bwd,
        rules=(
            (lambda s: s.W == 2 * s.H, "pre grad"),
            (lambda s: s.pre.shape[:-1] == s.grad.shape[:-1], "pre grad"),
        ),
        **CLAMPED,
    ),
}
