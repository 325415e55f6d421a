"""topk_gate with sigmoid scores, a bias, groups, scaled weights and forced experts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_kernels as mk
from tests.helpers.targets import Target

OP = "topk_gate"
INF, NAN = math.inf, math.nan


def by_loops(logits: Tensor, k: int, order="topk_softmax", scores="softmax", bias=None, groups=None, renormalise=False,
             scale=1.0, forced=None) -> tuple[list[list[float]], list[list[int]]]:  # fmt: skip
    """The rule of docs/operations/topk_gate.md, one token and one number after another, in float64."""
    found: tuple[list[list[float]], list[list[int]]] = ([], [])
    for t, row in enumerate(logits.double().tolist()):
        total = sum(math.exp(z) for z in row)
        score = [1 / (1 + math.exp(-z)) if scores == "sigmoid" else math.exp(z) / total for z in row]
        keys = row if bias is None and groups is None else score
        if bias is not None:
            keys = [s + b for s, b in zip(score, bias.double().tolist(), strict=True)]
        allowed = set(range(len(row)))
        if groups is not None:
            size = len(row) // groups[0]
            sums = [sum(sorted(keys[g * size : (g + 1) * size])[-2:]) for g in range(groups[0])]
            best = sorted(range(groups[0]), key=lambda g: (-sums[g], g))[: groups[1]]
            allowed = {e for e in allowed if e // size in best}
        given = [-1] * k if forced is None else forced[t].tolist()
        free = sorted(allowed - set(given), key=lambda e: (-keys[e], e))
        chosen = [e if e >= 0 else free.pop(0) for e in given]
        weights = [score[e] for e in chosen]
        if scores == "softmax" and order == "topk_softmax":
            weights = [math.exp(row[e]) / sum(math.exp(row[c]) for c in chosen) for e in chosen]
        if renormalise:
            weights = [w / (sum(weights) + 1e-20) for w in weights]
        found[0].append([scale * w for w in weights])
        found[1].append(chosen)
    return found


def records(tokens: int, num_experts: int, k: int, dtype: torch.dtype, share: float) -> Tensor:
    """k experts a token, of which about `share` are forced and the others -1."""
    chosen = torch.rand(tokens, num_experts).argsort(1)[:, :k]
    return chosen.where(torch.rand(tokens, k) < share, -1).to(dtype)


# name -> options of a call with (T, E) logits and k choices
OPTIONS: dict[str, Any] = {
    "sigmoid": lambda t, e, k: {"scores": "sigmoid"},
    "sigmoid, to a sum of 2.5": lambda t, e, k: {"scores": "sigmoid", "renormalise": True, "scale": 2.5},
    "bias": lambda t, e, k: {"bias": torch.randn(e)},
    "sigmoid and bias": lambda t, e, k: {"scores": "sigmoid", "bias": torch.randn(e)},
    "softmax first and bias": lambda t, e, k: {"order": "softmax_topk", "bias": torch.randn(e), "renormalise": True},
    "softmax first, scaled": lambda t, e, k: {"order": "softmax_topk", "scale": -3.0},
    "softmax last, scaled": lambda t, e, k: {"scale": 0.5, "renormalise": True},
    "groups": lambda t, e, k: {"groups": (4, 2), "order": "softmax_topk"},
    "groups with a bias": lambda t, e, k: {"groups": (4, 3), "scores": "sigmoid", "bias": torch.randn(e)},
    "one group": lambda t, e, k: {"groups": (1, 1)},
    "groups of one": lambda t, e, k: {"groups": (e, k), "scores": "sigmoid"},
    "all forced": lambda t, e, k: {"forced": records(t, e, k, torch.int16, 2.0)},
    "some forced": lambda t, e, k: {"forced": records(t, e, k, torch.int32, 0.5), "order": "softmax_topk"},
    "forced, in groups": lambda t, e, k: {
        "forced": records(t, e, k, torch.int64, 0.3), "groups": (4, 2), "scores": "sigmoid", "bias": torch.randn(e),
        "renormalise": True,
    },
}  # fmt: skip


def run(logits: Tensor, k: int, options: dict[str, Any], grad: Tensor, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.detach().clone().requires_grad_()
    weights, experts = mk.topk_gate(logits, k, **options, backend=backend)
    (dlogits,) = torch.autograd.grad(weights, logits, grad.to(weights.dtype))
    return weights.detach(), experts, dlogits


def sizes(target: Target) -> tuple[tuple[int, int, int], ...]:
    """(T, E, K); CUDA has kernels for up to 128, up to 256 and more experts."""
    few = ((5, 8, 3), (3, 132, 2))
    return few if target.compiles else (*few, (9, 36, 5), (2, 300, 40), (3, 16, 1), (0, 8, 2))


@pytest.mark.parametrize("name", OPTIONS)
def test_the_definition_is_the_rule(name):
    for tokens, num_experts, k in ((6, 8, 3), (4, 12, 6), (3, 20, 1)):
        logits = torch.randn(tokens, num_experts, dtype=torch.float64)
        options = OPTIONS[name](tokens, num_experts, k)
        weights, experts = mk.topk_gate(logits, k, **options, backend="reference")
        expected = by_loops(logits, k, **options)
        assert experts.tolist() == expected[1]
        torch.testing.assert_close(weights, torch.tensor(expected[0], dtype=torch.float64))


@pytest.mark.parametrize("name", OPTIONS)
def test_choices_weights_and_gradients(target, name):
    for index, (tokens, num_experts, k) in enumerate(sizes(target)):
        options = OPTIONS[name](tokens, num_experts, k)
        options = {each: value.to(target.device) if isinstance(value, Tensor) else value
                   for each, value in options.items()}  # fmt: skip
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        for dtype in dtypes[index % 3 : index % 3 + 1] if target.executed else dtypes:
            logits = (2 * torch.randn(tokens, num_experts)).to(dtype).to(target.device)
            grad = torch.randn(tokens, k, device=target.device)
            got = run(logits, k, options, grad, target.backend)
            expected = run(logits, k, options, grad, "reference")
            assert torch.equal(got[1], expected[1]), (num_experts, k)
            assert got[0].dtype == got[2].dtype == dtype
            eps = torch.finfo(dtype).eps
            close = {"rtol": 8 * eps, "atol": 8 * eps if dtype == torch.float32 else eps}
            torch.testing.assert_close((got[0], got[2]), (expected[0], expected[2]), **close)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_derivative_in_float64(backend, name):
    logits = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    options = OPTIONS[name](3, 8, 3)
    assert torch.autograd.gradcheck(lambda z: mk.topk_gate(z, 3, **options, backend=backend)[0], (logits,))


def test_ties_nan_and_infinity(target):
    """Equal keys, also of groups, go to the lower index; NaN ranks first, and is every weight of its softmax."""
    device = target.device
    logits = torch.zeros(3, 8, device=device)
    logits[1, 5], logits[2, 6] = NAN, INF
    both = {"groups": (4, 2), "backend": target.backend}
    weights, experts = mk.topk_gate(logits, 3, scores="sigmoid", **both)
    assert experts.tolist() == [[0, 1, 2], [5, 0, 1], [6, 0, 1]]
    assert weights[1].isnan().tolist() == [True, False, False]
    torch.testing.assert_close(weights[2].cpu(), torch.tensor([1, 0.5, 0.5]))
    weights, experts = mk.topk_gate(logits[:2], 3, order="softmax_topk", **both)
    assert experts[0].tolist() == [0, 1, 2]
    assert weights[1].isnan().all()
    bias = torch.zeros(8, device=device)
    bias[[7, 2]] = -INF
    _, experts = mk.topk_gate(logits[:1], 8, scores="sigmoid", bias=bias, backend=target.backend)
    assert experts.tolist() == [[0, 1, 3, 4, 5, 6, 2, 7]]


def test_the_bias_moves_the_choice_alone(target):
    logits = torch.randn(6, 8, device=target.device)
    bias = torch.tensor([9.0, 9.0, 0, 0, 0, 0, 0, 0], device=target.device, requires_grad=True)
    weights, experts = mk.topk_gate(logits, 2, scores="sigmoid", bias=bias, backend=target.backend)
    assert (experts.sort(1).values == torch.tensor([0, 1], device=target.device)).all()
    torch.testing.assert_close(weights, logits.gather(1, experts.long()).sigmoid())
    assert not weights.requires_grad


def test_noise_enters_scores_and_takes_a_gradient(target):
    logits, noise = (torch.randn(5, 8, device=target.device, requires_grad=True) for _ in range(2))
    options = {"scores": "sigmoid", "bias": torch.randn(8, device=target.device), "renormalise": True}
    weights, experts = mk.topk_gate(logits, 2, noise=noise, **options, backend=target.backend)
    expected, chosen = mk.topk_gate(logits + noise, 2, **options, backend="reference")
    assert torch.equal(experts, chosen)
    found = torch.autograd.grad(weights.square().sum(), (logits, noise))
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], torch.autograd.grad(expected.square().sum(), logits)[0])


def test_a_sum_of_zero_is_renormalised_to_zero(target):
    logits = torch.full((2, 4), -200.0, device=target.device, requires_grad=True)
    weights, _ = mk.topk_gate(logits, 2, scores="sigmoid", renormalise=True, backend=target.backend)
    assert not weights.any()
    (found,) = torch.autograd.grad(weights.sum(), logits)
    assert found.isfinite().all()


def test_the_replay_of_a_choice_is_the_choice(target):
    logits = torch.randn(7, 12, device=target.device)
    for options in ({}, {"scores": "sigmoid", "bias": torch.randn(12, device=target.device), "groups": (3, 2)}):
        weights, experts = mk.topk_gate(logits, 4, **options, backend=target.backend)
        again = mk.topk_gate(logits, 4, **options, forced=experts.to(torch.int16), backend=target.backend)
        assert torch.equal(experts, again[1])
        torch.testing.assert_close(weights, again[0], rtol=0, atol=2e-7)


def test_views_of_the_arguments(target):
    logits = torch.randn(20, 6, device=target.device).t()[1:]
    bias = torch.randn(20, 2, device=target.device)[:, 0]
    forced = records(4, 20, 5, torch.int32, 0.5).t().contiguous().t().to(target.device)
    options = {"bias": bias, "forced": forced[:, :4], "scores": "sigmoid", "groups": (5, 3)}
    got = run(logits[:4], 4, options, torch.ones(4, 4, device=target.device), target.backend)
    expected = run(logits[:4], 4, options, torch.ones(4, 4, device=target.device), "reference")
    assert torch.equal(got[1], expected[1])
    torch.testing.assert_close((got[0], got[2]), (expected[0], expected[2]))


X = torch.randn(2, 6)


def forced(*rows: list[int], dtype: torch.dtype = torch.int16) -> Tensor:
    return torch.tensor(rows, dtype=dtype)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"scores": "tanh"}, ValueError, "scores must be one of 'softmax', 'sigmoid'; got 'tanh'"),
        ({"scores": "sigmoid", "order": "softmax_topk"}, ValueError, "order has no meaning with scores='sigmoid'"),
        ({"bias": torch.zeros(5)}, ValueError, r"bias must be \(E,\) = \(6,\) on cpu; got \(5,\)"),
        ({"bias": torch.zeros(6).double()}, TypeError, "bias must have dtype float32; got float64"),
        ({"renormalise": 1}, TypeError, "renormalise must be a bool, got int"),
        ({"scale": INF}, ValueError, r"scale must be from .* \(finite in float32\)"),
        ({"groups": 2}, TypeError, "groups must be a pair"),
        ({"groups": (4, 2)}, ValueError, r"groups\[0\] must divide the 6 experts, got 4"),
        ({"groups": (3, 4)}, ValueError, r"groups\[1\] must be from 1 to 3"),
        ({"groups": (6, 1)}, ValueError, "k = 2 experts must fit into 1 groups of 1"),
        ({"forced": forced([0, 1])}, ValueError, r"forced must be \(T, K\) = \(2, 2\) on cpu; got \(1, 2\)"),
        ({"forced": torch.zeros(2, 2)}, TypeError, "forced must have dtype int16, int32, int64; got float32"),
        ({"forced": forced([0, 6], [0, 1])}, ValueError, r"forced must be from -1 \(free\) to 5; got 0 to 6"),
        ({"forced": forced([0, -2], [0, 1])}, ValueError, r"forced must be from -1 \(free\) to 5; got -2 to 1"),
        (
            {"forced": forced([0, -1], [3, 3], dtype=torch.int64), "groups": (3, 1)},
            ValueError,
            r"forced must name no expert twice in a row; got \[3, 3\] in row 1",
        ),
    ],
)
def test_bad_input_is_named(options, error, words, backend):
    with pytest.raises(error, match=f"^topk_gate: .*{words}"):
        mk.topk_gate(X, 2, **options, backend=backend)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_wrong_records_read_nothing_else_on_a_gpu_and_are_named_if_checked(backend, monkeypatch):
    from tests.helpers.planted_ptx import on  # a GPU kernel is executed on the CPU, which reports wrong addresses

    bad = torch.tensor([[7, 7], [-9, 2**40]])
    with on(backend):
        for options in ({}, {"scores": "sigmoid", "groups": (3, 2)}):
            with pytest.raises(ValueError, match="forced must be from -1"):
                mk.topk_gate(X, 2, forced=bad, **options, backend=backend)
            monkeypatch.setattr("moe_kernels.sizes.is_checked", lambda index: False)
            _, experts = mk.topk_gate(X, 2, forced=bad, **options, backend=backend)
            assert ((experts >= 0) & (experts < 6)).all()
            monkeypatch.undo()


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_a_bias_that_starts_anywhere(target: Target, start: int) -> None:
    """Logits and bias may be read in vectors of four."""
    logits, memory = torch.randn(5, 12), torch.randn(12 + start)
    memory[:start] = NAN
    named = {"scores": "sigmoid", "backend": target.backend}
    weights, experts = mk.topk_gate(logits.to(target.device), 3, bias=memory.to(target.device)[start:], **named)
    expected = by_loops(logits, 3, scores="sigmoid", bias=memory[start:])
    assert experts.tolist() == expected[1]
    torch.testing.assert_close(weights.cpu(), torch.tensor(expected[0]))
