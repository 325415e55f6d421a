"""expert_norms: values and gradients against norms of all outputs (T, E, Dout) in float64."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import moe_kernels as mk
from moe_kernels.backends.native import grouped_gemm_cpu
from tests.helpers.expert_norms import dense, leaves_of
from tests.helpers.grouped_gemm import DTYPES, finest, judged, results, skip_unsupported
from tests.helpers.inputs import behind_one, each_alone
from tests.helpers.targets import HAS_GPU, INTERPRET, Target

OP = "expert_norms"


# tokens, experts, dim, hidden, dout
SIZES = (13, 3, 12, 20, 10) if INTERPRET else (70, 5, 33, 51, 131)
FORMS = [("relu", True), ("gelu", False), ("swiglu", False), ("swiglu", True)]  # activation, with biases
CASES = [(*form, dtype) for form in FORMS for dtype in (DTYPES if form[0] == "swiglu" else DTYPES[:2])]
# The only cases that Triton runs without a GPU, to save compilations.
COMPILED = [(*FORMS[0], torch.bfloat16), (*FORMS[1], torch.float32), (*FORMS[2], torch.bfloat16)]
COMPILED += [(*FORMS[3], torch.float32)]  # in float16: test_small_float16_outputs_have_finite_gradients


@pytest.mark.parametrize(("activation", "with_bias", "dtype"), CASES, ids=str)
def test_values_and_gradients_are_the_dense_ones(target, activation, with_bias, dtype):
    skip_unsupported(target, dtype, OP)
    if target.compiles and (activation, with_bias, dtype) not in COMPILED:
        pytest.skip("Triton runs this form in another dtype, to save compilations")
    leaves = leaves_of(dtype, target.device, activation, *SIZES, with_bias=with_bias)
    call, exact = (partial(norms, activation=activation) for norms in (mk.expert_norms, dense))
    # floor: an epsilon for rounding results, one for rounding hidden layers and intermediate gradients.
    judged(target, dtype, call, exact, leaves, torch.randn(SIZES[:2]).to(dtype), floor=2.0)


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize(("activation", "with_bias", "dtype"), CASES, ids=str)
def test_with_products_by_torch(activation, with_bias, dtype, tiles, monkeypatch):
    """tiles: as if the CPU had AMX."""
    monkeypatch.setattr(grouped_gemm_cpu, "in_cpp", lambda *args: False)
    monkeypatch.setattr(grouped_gemm_cpu, "_in_tiles", lambda dtype: tiles and dtype is torch.bfloat16)
    test_values_and_gradients_are_the_dense_ones(Target("cpu", "cpu", "cpu"), activation, with_bias, dtype)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_experts_in_groups_are_all_experts(target, dtype, monkeypatch):
    """If tensors of all experts are too large, GPU backends compute experts in groups: here of two, the last of one;
    with Triton of four and one, whose weights are as aligned as those of all, to save compilations."""
    skip_unsupported(target, dtype, OP)
    if target.compiles and dtype == torch.float32:
        pytest.skip("Triton tests groups in bfloat16 only, to save compilations")
    sizes, group = ((70, 5, 33, 50, 130), 4) if target.compiles and not target.interpreted else (SIZES, 2)
    leaves = leaves_of(dtype, target.device, "gelu", *sizes)
    grad = torch.randn(sizes[:2]).to(dtype)
    call = partial(mk.expert_norms, backend=target.backend)
    whole = results(call, leaves, grad)
    monkeypatch.setattr("moe_kernels.ops.expert_norms.ELEMENTS", group * sizes[0] * max(sizes[2:]))
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    for name, each in results(call, leaves, grad).items():
        exact = name != "x"  # the gradient to x is a sum over groups, and each term is rounded
        torch.testing.assert_close(each, whole[name], rtol=0 if exact else tolerance, atol=0 if exact else tolerance)


def test_biases_that_start_anywhere(target):
    if target.backend == "triton":
        pytest.skip("Triton itself specialises kernels by alignment")
    leaves = leaves_of(finest(target), target.device, "gelu", 9, 3, 16, 24, 16)
    moved = leaves | {name: behind_one(leaves[name]) for name in ("b_in", "b_out")}
    got, expected = (mk.expert_norms(**each, activation="gelu", backend=target.backend) for each in (moved, leaves))
    torch.testing.assert_close(got, expected)


def test_each_gradient_alone_is_the_same(target):
    dtype = DTYPES[1]
    skip_unsupported(target, dtype, OP)
    activation = "relu" if target.compiles else "gelu"  # Triton has compiled relu for another test
    leaves, grad = leaves_of(dtype, target.device, activation, *SIZES), torch.randn(SIZES[:2]).to(target.device, dtype)
    call = partial(mk.expert_norms, backend=target.backend, activation=activation)
    together = results(call, leaves, grad)
    for name, each in each_alone(call, leaves, grad).items():
        torch.testing.assert_close(each, together[name], rtol=0, atol=0, msg=name)


def test_the_gradient_at_zero_is_zero(target):
    dtype = torch.bfloat16
    leaves = leaves_of(dtype, target.device, "relu", 6, 2, 8, 8, 4, with_bias=False)
    leaves["x"][2] = 0  # without biases both norms of token 2 are 0
    got = results(partial(mk.expert_norms, backend=target.backend), leaves, torch.ones(6, 2))
    assert not got["out"][2].any()
    assert not got["x"][2].any()
    assert all(each.isfinite().all() for each in got.values())
    leaves["x"][3] = math.nan
    s = mk.expert_norms(backend=target.backend, **leaves)
    assert s.isnan().any(1).tolist() == [False, False, False, True, False, False]


def test_a_norm_whose_squares_are_too_small_is_zero(target):
    """Each expert has a single output, 6e-29, whose square is 0 in float32."""
    leaves = {"x": torch.full((2, 8), 1e-15), "w_in": torch.full((2, 8, 8), 1e-15), "w_out": torch.ones(2, 8, 1)}
    leaves = {name: each.to(target.device, torch.bfloat16) for name, each in leaves.items()}
    grad = torch.ones(2, 2, device=target.device)
    for backend in (target.backend, "reference"):
        got = results(partial(mk.expert_norms, backend=backend), leaves, grad)
        assert not any(each.any() for each in got.values())


def test_an_infinite_output_has_an_infinite_norm(target):
    """Kernels may pad w_out with columns of zeros. Infinity times zero is NaN, which must not reach the norm."""
    x, w_in, w_out = torch.ones(3, 8), torch.ones(2, 8, 8), torch.ones(2, 8, 10)
    b_in = torch.zeros(2, 8)
    b_in[1, 5] = math.inf
    given = (each.to(target.device, torch.bfloat16) for each in (x, w_in, w_out, b_in))
    x, w_in, w_out, b_in = given
    s = mk.expert_norms(x, w_in, w_out, b_in=b_in, activation="relu", backend=target.backend)
    assert s[:, 0].isfinite().all()
    assert s[:, 1].isposinf().all()


def test_small_float16_outputs_have_finite_gradients(target):
    """1 / norm is larger than any float16 number; the gradients are not."""
    skip_unsupported(target, torch.float16, OP)
    leaves = {"x": torch.ones(2, 8), "w_in": torch.full((1, 8, 8), 0.125), "w_out": torch.full((1, 8, 8), 2.0**-22)}
    leaves = {name: each.to(target.device, torch.float16) for name, each in leaves.items()}
    got, expected = (
        results(partial(mk.expert_norms, backend=backend), leaves, torch.ones(2, 1))
        for backend in (target.backend, "reference")
    )
    for name in ("out", "w_out"):
        torch.testing.assert_close(got[name], expected[name], rtol=4e-3, atol=0)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_gradients_of_experts_are_added_up_in_float32(backend):
    """The gradients to x through the five experts are 1 and four times 2^-9. Their sum is 1 + 2^-7, but added one by
    one in bfloat16 they would give 1."""
    x, w_in = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True), torch.full((5, 1, 1), 2.0**-9).bfloat16()
    w_in[0] = 1
    s = mk.expert_norms(x, w_in, torch.ones_like(w_in), backend=backend)
    assert torch.autograd.grad(s.sum(), x)[0].item() == 1 + 2.0**-7


def test_the_outputs_are_never_stored():
    tokens, experts, dim = 4096, 16, 352
    leaves = leaves_of(torch.float32, "cpu", "relu", tokens, experts, dim, dim, dim)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        s = mk.expert_norms(backend="cpu", **leaves)
    peak = now = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    assert 4 * s.numel() <= peak < 4 * tokens * experts * dim / 5


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("activation", ["tanh", "geglu", None])
def test_derivatives_in_float64(backend, activation):
    leaves = leaves_of(torch.float64, "cpu", activation, 4, 3, 2, 3, 2)
    names = list(leaves)

    def call(*given):
        return mk.expert_norms(activation=activation, backend=backend, **dict(zip(names, given, strict=True)))

    assert torch.autograd.gradcheck(call, [each.requires_grad_() for each in leaves.values()])


@pytest.mark.parametrize(
    "sizes", [(0, 2, 3, 4, 5), (3, 0, 3, 4, 5), (3, 2, 3, 4, 0), (3, 2, 0, 4, 5), (3, 1, 1, 1, 1)], ids=str
)
def test_empty_and_thin(sizes):
    leaves = leaves_of(torch.float32, "cpu", "relu", *sizes)
    got, expected = (
        results(partial(mk.expert_norms, backend=backend), leaves, torch.ones(sizes[:2]))
        for backend in ("cpu", "reference")
    )
    for name in got:
        torch.testing.assert_close(got[name], expected[name])


@pytest.mark.parametrize(("kept", "products"), [(7 * 3 * 11, 3), (7 * 3 * 11 - 1, 4)])
def test_flops_are_counted(kept, products, monkeypatch):
    """Pre-activations and outputs have 7 * 3 * (6 + 5) elements. Without them backward computes them again."""
    monkeypatch.setattr("moe_kernels.ops.expert_norms.KEPT", kept)
    leaves = leaves_of(torch.float32, "cpu", "relu", 7, 3, 8, 6, 5)
    with FlopCounterMode(display=False) as counter:
        mk.expert_norms(
            backend="cpu", **{name: each.requires_grad_() for name, each in leaves.items()}
        ).sum().backward()
    assert counter.get_total_flops() == products * 2 * 7 * 3 * (8 * 6 + 6 * 5)


def test_bad_input_is_named():
    good = leaves_of(torch.float32, "cpu", "relu", 7, 3, 8, 6, 5)
    for change, error, words in (
        ({"x": good["x"][0]}, ValueError, r"x must be \(T, D\)"),
        ({"w_in": good["w_in"][:, 1:]}, ValueError, r"w_in must be \(E, D, H\) = \(3, 8, 6\)"),
        ({"w_out": good["w_out"][1:]}, ValueError, r"w_out must be \(E, H, Dout\) = \(3, 6, 5\)"),
        ({"activation": "softmax"}, ValueError, "activation must be None or one of"),
    ):
        for backend in ("cpu", "reference"):
            with pytest.raises(error, match=f"^expert_norms: {words}"):
                mk.expert_norms(backend=backend, **{**good, **change})


def grad_of_winners(tokens, experts, winners, dtype):
    """(T, E): from 0 to `winners` elements of a row are not zero; no element of the last expert is."""
    grad = torch.randn(tokens, experts)
    order = torch.rand(tokens, experts - 1).argsort(1).argsort(1)
    kept = order < torch.randint(winners + 1, (tokens, 1))
    kept[0] = order[0] < winners
    return torch.cat([grad[:, :-1] * kept, torch.zeros(tokens, 1)], 1).to(dtype)


@pytest.mark.parametrize("winners", [1, 2, 4, None])
@pytest.mark.parametrize(
    ("activation", "with_bias", "dtype"),
    [*COMPILED, ("swiglu", True, torch.float16), ("swiglu", True, torch.float64)],
    ids=str,
)
def test_gradients_of_winners(target, activation, with_bias, dtype, winners):
    """None, with 2 winners: each expert alone, as the rows are more than the tokens."""
    skip_unsupported(target, dtype, OP)
    if target.compiles and (winners != 2 or dtype != torch.bfloat16):
        pytest.skip("Triton runs one number of winners and one dtype, to save compilations")
    leaves = leaves_of(dtype, target.device, activation, *SIZES, with_bias=with_bias)
    grad = grad_of_winners(SIZES[0], SIZES[1], min(winners or 2, SIZES[1] - 1), dtype)
    if winners is None:
        grad[:, 0] = 1  # every token of expert 0
    call, exact = partial(mk.expert_norms, activation=activation), partial(dense, activation=activation)
    got = judged(
        target,
        dtype,
        lambda backend, **given: call(backend=backend, winners=winners, **given),
        exact,
        leaves,
        grad,
        floor=2.0,
    )
    assert all(not got[name][-1].any() for name in got if name.startswith(("w_", "b_")))
    assert not got["x"][(grad == 0).all(1).to(target.device)].any()


def test_more_gradients_than_winners(target):
    """A CPU computes them all. On a GPU, where the host does not wait for their number, the device raises."""
    dtype = finest(target)
    leaves, grad = leaves_of(dtype, target.device, "relu", *SIZES), torch.zeros(SIZES[:2])
    grad[:, 0] = grad[4, 1] = 1
    call = partial(mk.expert_norms, backend=target.backend)
    if target.backend == "cpu":
        found, expected = (results(partial(call, winners=winners), leaves, grad) for winners in (1, None))
        for name, each in found.items():
            torch.testing.assert_close(each, expected[name], msg=name)
    elif not HAS_GPU:  # the assert of a GPU would end the use of that GPU in this process
        with pytest.raises(RuntimeError, match=r"at most winners=1 norms of a token"):
            results(partial(call, winners=1), leaves, grad)
    results(partial(call, winners=2), leaves, grad)


def test_a_norm_without_a_gradient_adds_nothing(target):
    """Here the outputs of the last expert, and with it its norms, are NaN."""
    dtype = finest(target)
    leaves, grad = leaves_of(dtype, target.device, "relu", *SIZES), torch.zeros(SIZES[:2])
    leaves["w_out"][-1] = math.nan
    grad[:, 0] = 1
    got = results(partial(mk.expert_norms, backend=target.backend, winners=1), leaves, grad)
    assert got["out"][:, -1].isnan().all()
    assert all(each.isfinite().all() for name, each in got.items() if name != "out")


@pytest.mark.parametrize("winners", [None, 1, 2, 9])
def test_the_cpu_computes_pairs_with_a_gradient_alone(winners, monkeypatch):
    rows, whole = [], grouped_gemm_cpu.expert_mlp_bwd_hidden
    monkeypatch.setattr(
        mk.backends.cpu, "expert_mlp_bwd_hidden", lambda *given: rows.append(len(given[0])) or bound(*given)
    )
    bound = partial(whole, mk.backends.cpu)
    leaves = leaves_of(torch.float32, "cpu", "relu", *SIZES)
    grad = grad_of_winners(SIZES[0], SIZES[1], 2, torch.float32)
    results(partial(mk.expert_norms, backend="cpu", winners=winners), leaves, grad)
    assert sum(rows) == grad.count_nonzero()
    assert len(rows) == (1 if sum(rows) <= SIZES[0] * (winners or 1) else SIZES[1])


@pytest.mark.parametrize("winners", [None, 2, 5])
def test_flops_of_winners_are_counted(winners, monkeypatch):
    monkeypatch.setattr("moe_kernels.ops.expert_norms.KEPT", 0)
    leaves = leaves_of(torch.float32, "cpu", "relu", 7, 3, 8, 6, 5)
    with FlopCounterMode(display=False) as counter:
        results(partial(mk.expert_norms, backend="cpu", winners=winners), leaves, torch.ones(7, 3))
    assert counter.get_total_flops() == 2 * 7 * (3 + 3 * min(winners or 3, 3)) * (8 * 6 + 6 * 5)


@pytest.mark.parametrize(("winners", "error"), [(-1, ValueError), (2**31, ValueError), (1.0, TypeError)])
def test_bad_winners_are_refused(winners, error):
    leaves = leaves_of(torch.float32, "cpu", "relu", 7, 3, 8, 6, 5)
    for backend in ("cpu", "reference"):
        with pytest.raises(error, match=r"^expert_norms: winners must be"):
            mk.expert_norms(winners=winners, backend=backend, **leaves)


def test_no_winners(target):
    dtype = finest(target)
    leaves = leaves_of(dtype, target.device, "relu", *SIZES)
    got = results(partial(mk.expert_norms, backend=target.backend, winners=0), leaves, torch.zeros(SIZES[:2]))
    assert not any(each.any() for name, each in got.items() if name != "out")


@pytest.mark.parametrize("gradients", ["all", "of two winners", "of one"])
@pytest.mark.parametrize(("activation", "with_bias", "dtype"), [*CASES, (None, True, torch.bfloat16)], ids=str)
def test_saving_outputs_changes_no_bit(activation, with_bias, dtype, gradients, monkeypatch):
    leaves, grad = leaves_of(dtype, "cpu", activation, *SIZES, with_bias=with_bias), torch.randn(SIZES[:2])
    if gradients != "all":
        grad = grad_of_winners(SIZES[0], SIZES[1], 2 if gradients == "of two winners" else 1, dtype)
    call = partial(mk.expert_norms, activation=activation, backend="cpu")
    found = results(call, leaves, grad)
    monkeypatch.setattr("moe_kernels.ops.expert_norms.KEPT", 0)
    for name, each in results(call, leaves, grad).items():
        torch.testing.assert_close(found[name], each, rtol=0, atol=0, msg=name)


def test_outputs_are_saved_for_all_gradients_alone():
    leaves = leaves_of(torch.float32, "cpu", "relu", 7, 3, 8, 6, 5)
    leaves = {name: each.requires_grad_() for name, each in leaves.items()}

    def operator(**options):
        return type(mk.expert_norms(backend="cpu", **leaves, **options).grad_fn).__name__

    assert "kept" in operator()
    assert "kept" not in operator(winners=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moe_kernels.ops.expert_norms.KEPT", 7 * 3 * (6 + 5) - 1)
        assert "kept" not in operator()
