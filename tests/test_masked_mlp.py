"""The masked MLP: values and gradients against products with masks in float64, and equal results of equal inputs."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from test_grouped_gemm import DTYPES, judged, results, skip_unsupported
from torch.utils.flop_counter import FlopCounterMode

import moe_kernels as mk
from moe_kernels.backends import cpu
from moe_kernels.ops.kwta import pack_bits
from moe_kernels.ops.masked_mlp import ACTIVATIONS, masked_mlp
from moe_kernels.verify import threads

OP = "masked_mlp"
WIDTHS = (9, 33, 100, 64, 7)  # bits with and without padding


def network(*shape, widths=WIDTHS, dtype=torch.float32, device="cpu", bias=True, seed=0):
    """Leaves by name, and the masks of the hidden layers."""
    torch.manual_seed(seed)
    leaves = {"x": torch.randn(*shape, widths[0])}
    for layer, (n_in, n_out) in enumerate(pairwise(widths)):
        leaves[f"w{layer}"] = torch.randn(n_out, n_in) / math.sqrt(n_in)
        if bias:
            leaves[f"b{layer}"] = torch.randn(n_out)
    masks = [torch.rand(*shape, n) < 0.5 for n in widths[1:-1]]
    return {name: each.to(device, dtype) for name, each in leaves.items()}, [mask.to(device) for mask in masks]


def parameters(leaves):
    depth = sum(name.startswith("w") for name in leaves)
    return [leaves[f"w{i}"] for i in range(depth)], [leaves.get(f"b{i}") for i in range(depth)]


def call(masks, activation, backend=None):
    bits = [pack_bits(mask) for mask in masks]

    def forward(backend=backend, **leaves):
        return masked_mlp(leaves["x"], *parameters(leaves), bits, activation=activation, backend=backend)

    return forward


def multiplied(masks, activation):
    """Eqs. 7 and 8 of paper 000, with masks as factors."""

    def forward(**leaves):
        x, (weights, biases) = leaves["x"], parameters(leaves)
        for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            x = x @ weight.T + (0 if bias is None else bias)
            if layer < len(masks):
                x = ACTIVATIONS[activation](x) * masks[layer].cpu()
        return x

    return forward


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_values_and_gradients_are_those_of_masks_multiplied_by(target, activation, dtype):
    skip_unsupported(target, dtype, OP)
    for tokens, bias in ((3, True),) if target.interpreted else ((150, True), (5, False)):
        leaves, masks = network(tokens, dtype=dtype, device=target.device, bias=bias)
        grad, exact = torch.randn(tokens, WIDTHS[-1]).to(dtype), multiplied(masks, activation)
        judged(target, dtype, call(masks, activation), exact, leaves, grad, floor=4.0)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_gradients_of_first_and_second_order(activation):
    leaves, masks = network(4, widths=(3, 5, 4, 2), dtype=torch.float64)
    if activation == "relu":
        leaves["x"].sign_()  # away from the kink
    names, tensors = list(leaves), [each.requires_grad_() for each in leaves.values()]
    forward = call(masks, activation, "cpu")

    def function(*given):
        return forward(**dict(zip(names, given, strict=True)))

    torch.autograd.gradcheck(function, tensors)
    torch.autograd.gradgradcheck(function, tensors)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_what_does_not_answer_is_zero_whatever_it_holds(target, activation):
    leaves, masks = network(4, widths=(3, 40, 5, 2), device=target.device)
    leaves["b0"][:3] = torch.tensor([math.nan, math.inf, -math.inf])
    leaves["w1"][:, 3] = 1e38  # so that the gradient of neuron 3 is infinite
    masks[0][:, :4] = False
    found = results(call(masks, activation, target.backend), leaves, torch.full((4, 2), 1e10))
    assert found["out"].isfinite().all()
    assert all((found[name][:4] == 0).all() for name in ("w0", "b0"))
    assert (found["w1"][:, :4] == 0).all()
    masks[0][2, 0] = True
    found = results(call(masks, activation, target.backend), leaves, torch.ones(4, 2))
    assert found["out"].isnan().any(-1).tolist() == [False, False, bool(masks[1][2].any()), False]


def test_the_slope_of_relu_at_zero_is_zero(target):
    """Active neurons with a pre-activation of exactly 0."""
    for zero in (0.0, -0.0):
        leaves, masks = network(4, widths=(3, 40, 33, 2), device=target.device)
        leaves["w0"].zero_()
        leaves["b0"].fill_(zero)
        masks = [torch.ones_like(mask) for mask in masks]
        found = results(call(masks, "relu", target.backend), leaves, torch.ones(4, 2))
        assert found["w1"].shape == (33, 40)
        assert not any(found[name].any() for name in ("x", "w0", "b0", "w1"))
        assert found["b1"].any()
        leaves["b0"][2] = math.nan  # which is not below 0: its gradient goes on
        of_nan = [
            results(call(masks, "relu", name), leaves, torch.ones(4, 2))["b0"] for name in (target.backend, "reference")
        ]
        assert of_nan[1][2].isfinite()
        assert of_nan[1][2] != 0
        torch.testing.assert_close(*of_nan)


def test_no_tokens_with_samples(target):
    leaves, _ = network(0, widths=(4, 5, 2), device=target.device)
    bits, samples = torch.zeros(7, 1, dtype=torch.int32, device=target.device), torch.zeros(0, dtype=torch.int64)
    for name in (target.backend, "reference"):
        given = {"activation": "relu", "samples": samples.to(target.device), "backend": name}
        y = masked_mlp(leaves["x"], *parameters(leaves), [bits], **given)
        assert y.shape == (0, 2)


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_no_tokens_and_one_hidden_layer_and_none(target, activation):
    for tokens, widths in ((0, WIDTHS), (5, (4, 6, 3)), (5, (4, 3))):
        leaves, masks = network(tokens, widths=widths, device=target.device)
        grad = torch.ones(tokens, 3 if tokens else 7)
        got, expected = (results(call(masks, activation, name), leaves, grad) for name in (target.backend, "reference"))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_any_layout_and_any_leading_dimensions_are_those_of_their_rows():
    leaves, masks = network(2, 3)
    weights, biases = parameters(leaves)
    bits = [pack_bits(mask) for mask in masks]
    y = masked_mlp(leaves["x"], weights, biases, bits, activation="gelu")
    flat = [each.view(6, -1) for each in bits]
    assert torch.equal(y.view(6, -1), masked_mlp(leaves["x"].view(6, -1), weights, biases, flat, activation="gelu"))
    apart = [torch.nn.functional.pad(each, (0, 1))[:, :-1] for each in flat]
    turned = leaves["x"].view(6, -1).t().contiguous().t()
    given = [weight.t().contiguous().t() for weight in weights]
    torch.testing.assert_close(masked_mlp(turned, given, biases, apart, activation="gelu"), y.view(6, -1))
    strided = [torch.stack((bias, bias), 1)[:, 0] for bias in biases]
    torch.testing.assert_close(masked_mlp(turned, given, strided, apart, activation="gelu"), y.view(6, -1))
    one = masked_mlp(leaves["x"][0, 0], weights, biases, [each[0, 0] for each in bits], activation="gelu")
    torch.testing.assert_close(one, y[0, 0])


@pytest.mark.parametrize("activation", ["tanh", "silu"])
def test_samples_are_where_the_masks_of_all_are_kept(target, activation):
    leaves, _ = network(6, device=target.device)
    kept = [pack_bits(torch.rand(50, n) < 0.5).to(target.device) for n in WIDTHS[1:-1]]
    for samples in (torch.tensor([49, 0, 7, 7, 31, 2]), torch.tensor([[3, 1, 0], [49, 48, 3]], dtype=torch.int32)):
        x = leaves["x"].view(*samples.shape, -1)
        own = [each[samples.to(each.device)] for each in kept]

        def forward(bits, samples, **given):
            return masked_mlp(
                given["x"], *parameters(given), bits, activation=activation, samples=samples, backend=target.backend
            )

        given = {**leaves, "x": x}, torch.ones(*samples.shape, 7)
        found = results(partial(forward, kept, samples.to(target.device)), *given)
        expected = results(partial(forward, own, None), *given)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_samples_are_seen_by_compilers_and_in_the_second_derivative():
    leaves, _ = network(4, widths=(3, 5, 4, 2), dtype=torch.float64)
    kept, samples = [pack_bits(torch.rand(9, n) < 0.5) for n in (5, 4)], torch.tensor([8, 0, 3, 8])
    weights, biases = parameters(leaves)

    def forward(x, samples=samples):
        return masked_mlp(x, weights, biases, kept, activation="tanh", samples=samples)

    torch.autograd.gradgradcheck(forward, [leaves["x"].requires_grad_()])
    torch.compiler.reset()
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(leaves["x"]), forward(leaves["x"]))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_samples_without_masks_are_refused(backend):
    leaves, masks = network(6)
    bits = [pack_bits(mask) for mask in masks]

    def forward(samples, bits=bits):
        return masked_mlp(leaves["x"], *parameters(leaves), bits, activation="tanh", samples=samples, backend=backend)

    for low, high in ((-1, 5), (0, 6), (0, 2**40)):
        with pytest.raises(ValueError, match=f"masked_mlp: samples must be from 0 to 5; got {low} to {high}"):
            forward(torch.tensor([0, low, 2, 3, high, 1]))
    with pytest.raises(ValueError, match=r"samples must be \(6,\) on cpu.*got \(5,\)"):
        forward(torch.zeros(5, dtype=torch.int64))
    with pytest.raises(TypeError, match="samples must have dtype int32, int64"):
        forward(torch.zeros(6))
    with pytest.raises(ValueError, match=r"same samples in every layer; got \(6, 2\), \(5, 4\), \(6, 2\)"):
        forward(torch.zeros(6, dtype=torch.int64), [bits[0], bits[1][:5], bits[2]])
    with pytest.raises(ValueError, match=r"bits must be \(1, 2\) on cpu"):
        forward(torch.zeros(6, dtype=torch.int64), [bits[0][:, :1], *bits[1:]])


def test_frozen_parameters_and_inputs_get_no_gradient_and_the_others_the_same():
    leaves, masks = network(6)
    expected = results(call(masks, "tanh"), leaves, torch.ones(6, 7))
    for wanted in (("w1",), ("b0", "b3"), ("x",), ("w0", "b2", "w3")):
        given = {name: each.detach().clone().requires_grad_(name in wanted) for name, each in leaves.items()}
        call(masks, "tanh")(**given).sum().backward()  # an expanded gradient
        for name, each in given.items():
            assert (each.grad is not None) == (name in wanted)
            assert each.grad is None or torch.equal(each.grad, expected[name])


def test_every_time_and_with_every_number_of_threads_the_same_bits():
    leaves, masks = network(300, widths=(20, 500, 300, 5))
    grad, bits = torch.randn(300, 500), pack_bits(masks[0])
    found = []
    for count in (1, 2, 5):
        with threads(count):
            dpre = grad.clone()
            found.append((cpu.masked_mlp_bwd(dpre, None, bits, None, ""), dpre))
    assert all(torch.equal(a, b) for each in found for a, b in zip(each, found[0], strict=True))
    twice = [results(call(masks, "tanh"), leaves, torch.ones(300, 5)) for _ in range(2)]
    assert all(torch.equal(twice[0][name], twice[1][name]) for name in twice[0])


def test_autocast_and_compilers_take_the_layers_one_by_one():
    leaves, masks = network(6, widths=(16, 32, 32, 5))
    forward = call(masks, "tanh")
    with torch.autocast("cpu", torch.bfloat16):
        narrow = forward(**leaves)
        with mk.use_backend("reference"):
            assert torch.equal(narrow, forward(**leaves))
    assert narrow.dtype == torch.bfloat16
    torch.compiler.reset()
    bits = [pack_bits(mask) for mask in masks]
    compiled = torch.compile(masked_mlp, fullgraph=True, backend="aot_eager")
    found, expected = (
        results(
            lambda f=f, **given: f(given["x"], *parameters(given), bits, activation="tanh"), leaves, torch.ones(6, 5)
        )
        for f in (compiled, masked_mlp)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_flops_are_those_of_the_products_and_one_for_each_element_masked():
    leaves, masks = network(6, widths=(16, 32, 24, 5))
    with FlopCounterMode(display=False) as counter:
        results(call(masks, "tanh", "cpu"), leaves, torch.ones(6, 5))
    products = 2 * 6 * (16 * 32 + 32 * 24 + 24 * 5)
    assert counter.get_total_flops() == 3 * products + 2 * 6 * (32 + 24)


@pytest.mark.parametrize("changed", ["w1", "b1", "bits", "samples"])
def test_what_is_changed_before_backward_is_noticed(changed):
    leaves, masks = network(6)
    leaves["w1"].requires_grad_()
    given = {**leaves, "bits": pack_bits(masks[1]), "samples": torch.arange(6)}
    bits = [pack_bits(masks[0]), given["bits"], pack_bits(masks[2])]
    y = masked_mlp(leaves["x"], *parameters(leaves), bits, activation="tanh", samples=given["samples"])
    with torch.no_grad():
        given[changed].sub_(1).abs_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_list_of_masks_that_changes_and_masks_of_inference_mode_are_those_of_the_call():
    leaves, masks = network(6)
    expected = results(call(masks, "tanh"), leaves, torch.ones(6, 7))
    with torch.inference_mode():
        kept = [pack_bits(mask) for mask in masks]

    def forward(**given):
        bits = list(kept)
        y = masked_mlp(given["x"], *parameters(given), bits, activation="tanh")
        bits.clear()
        return y

    found = results(forward, leaves, torch.ones(6, 7))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_bad_arguments_are_refused_by_name():
    leaves, masks = network(6)
    x, (weights, biases), bits = leaves["x"], parameters(leaves), [pack_bits(mask) for mask in masks]
    with pytest.raises(ValueError, match=r"masked_mlp: weights and biases must be one .* got 4, 4 and 2"):
        masked_mlp(x, weights, biases, bits[:2], activation="tanh")
    with pytest.raises(ValueError, match=r"masked_mlp: activation must be one of .*'tanh'.*; got 'swish'"):
        masked_mlp(x, weights, biases, bits, activation="swish")
    with pytest.raises(TypeError, match="masked_mlp: x must have dtype"):
        masked_mlp(x.int(), weights, biases, bits, activation="tanh")
    with pytest.raises(ValueError, match=r"masked_mlp: bits must be \(6, 2\) on cpu"):
        masked_mlp(x, weights, biases, [bits[0][:, :1], *bits[1:]], activation="tanh")
    with pytest.raises(TypeError, match="masked_mlp: bits must have dtype int32"):
        masked_mlp(x, weights, biases, [bits[0].long(), *bits[1:]], activation="tanh")
    with pytest.raises(TypeError, match="masked_mlp: weights must be a Tensor, got NoneType"):
        masked_mlp(x, [None, *weights[1:]], biases, bits, activation="tanh")
    with pytest.raises(RuntimeError, match="expanded size"):
        masked_mlp(x, weights, [biases[0][1:], *biases[1:]], bits, activation="tanh")
    with pytest.raises(RuntimeError, match="same dtype"):
        masked_mlp(x, weights, [biases[0].double(), *biases[1:]], bits, activation="tanh")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        masked_mlp(x[:, 1:], weights, biases, bits, activation="tanh")
