"""The modules of COMET fixed routing."""

import copy
import math

import pytest
import torch

import moe_kernels as mk
from moe_kernels.nn import ACTIVATIONS, CometFFN, CometMLP, FixedRouting, MaskedLinear, Utilisation
from moe_kernels.ops.kwta import pack_bits
from moe_kernels.papers.models import comet_mlp, dense_twin
from tests.helpers.layers import Operators

WIDTHS = (7, 12, 9, 10, 4)


def model(p=0.5, seed=0, widths=WIDTHS, **options):
    return CometMLP(widths, p, generator=torch.Generator().manual_seed(seed), **options)


def winners(row: list[float], k: int) -> list[bool]:
    """Whether each number is one of the k largest; of equal numbers the one with the lower index counts as larger."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    return [i in order[:k] for i in range(len(row))]


def matvec(matrix: torch.Tensor, vector: list[float]) -> list[float]:
    return [math.fsum(w * v for w, v in zip(row, vector, strict=True)) for row in matrix.tolist()]


def by_hand(net: CometMLP, x: list[float], f) -> tuple[list[float], list[list[bool]]]:
    """Output and masks for one sample at p = 0.3, by the paper's equations."""
    z, masks = x, []
    for layer, hidden in enumerate(net.hidden, 1):
        c = matvec(net.router.get_buffer(f"weight_{layer}"), z)
        m = winners(c, max(1, len(c) * 3 // 10))
        z = [ci if mi else 0.0 for ci, mi in zip(c, m, strict=True)]
        a = [s + b for s, b in zip(matvec(hidden.weight, x), hidden.bias.tolist(), strict=True)]
        x = [f(ai) if mi else 0.0 for ai, mi in zip(a, m, strict=True)]
        masks.append(m)
    return [s + b for s, b in zip(matvec(net.output.weight, x), net.output.bias.tolist(), strict=True)], masks


@pytest.mark.parametrize(
    ("activation", "f"),
    [
        ("tanh", math.tanh),
        ("relu", lambda a: max(a, 0.0)),
        ("silu", lambda a: a / (1 + math.exp(-a))),
        ("softplus", lambda a: math.log1p(math.exp(a))),
        ("gelu", lambda a: a * 0.5 * (1 + math.erf(a / math.sqrt(2)))),
        ("mish", lambda a: a * math.tanh(math.log1p(math.exp(a)))),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_forward_is_the_papers_equations_sample_by_sample(activation, f, backend):
    net = model(0.3, activation=activation, backend=backend, dtype=torch.float64)
    x = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y, masks = net(x), net.masks(x)
    for i in range(5):
        expected, expected_masks = by_hand(net, x[i].tolist(), f)
        torch.testing.assert_close(y[i], torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-13)
        assert [m[i].tolist() for m in masks] == expected_masks


def test_every_named_activation_is_tried_above():
    assert set(ACTIVATIONS) == {"tanh", "relu", "silu", "softplus", "gelu", "mish"}


def test_any_leading_dimensions_give_what_their_rows_give():
    net = model().double()
    x = torch.randn(2, 3, 7, dtype=torch.float64)
    torch.testing.assert_close(net(x).view(6, 4), net(x.view(6, 7)), rtol=1e-12, atol=1e-13)
    assert net(x[:0]).shape == (0, 3, 4)
    assert [m.shape for m in net.masks(x)] == [(2, 3, 12), (2, 3, 9), (2, 3, 10)]


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_cached_masks_of_samples_change_nothing(activation):
    net, x = model(0.3, activation=activation), torch.randn(50, 7)
    kept, rows = net.router.kept(x, chunk=16), torch.tensor([3, 49, 0, 3])
    bits = [layer[rows] for layer in kept]
    assert all(torch.equal(a, b) for a, b in zip(bits, net.router(x[rows]), strict=True))
    ways = net(x[rows], bits), net(x[rows], kept, rows), net(x[rows], kept, rows.int()), net(x[rows])
    gradients = [torch.autograd.grad(y.square().sum(), list(net.parameters())) for y in ways]
    assert all(torch.equal(a, b) for each in gradients[1:] for a, b in zip(each, gradients[0], strict=True))
    pairs = net(x[rows].view(2, 2, 7), kept, rows.view(2, 2))
    assert torch.equal(pairs.view(4, -1), net(x[rows], bits))
    assert net(x[:0], kept, rows[:0]).shape == (0, 4)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_inactive_neurons_are_zero_even_with_infinite_values(target, activation):
    given = {"k": 1, "activation": activation, "backend": target.backend, "device": target.device}
    first, second = MaskedLinear(3, 40, **given), MaskedLinear(40, 5, **given)
    with torch.no_grad():
        first.bias[:3] = torch.tensor([math.nan, math.inf, -math.inf])
        second.weight[:, 3] = 1e38  # so that the gradient to the output of neuron 3 overflows
    masks = torch.rand(4, 40) < 0.5, torch.ones(4, 5, dtype=torch.bool)
    masks[0][:, :4] = False
    bits = [pack_bits(mask).to(target.device) for mask in masks]
    x = torch.randn(4, 3, device=target.device)
    y = second(first(x, bits=bits[0]), bits=bits[1])
    y.backward(torch.full_like(y, 1e10))
    assert y.isfinite().all()
    assert not any(each.grad[:4].any() for each in (first.weight, first.bias))
    assert not second.weight.grad[:, :4].any()
    masks[0][2, 0] = True
    y = second(first(x, bits=pack_bits(masks[0]).to(target.device)))
    assert y.isnan().any(-1).tolist() == [False, False, True, False]


def test_p_one_is_the_dense_mlp_bit_for_bit():
    net = model(1.0, activation="gelu")
    layers = []
    for hidden in net.hidden:
        linear = torch.nn.Linear(hidden.in_features, hidden.out_features)
        linear.load_state_dict(hidden.state_dict())
        layers += [linear, torch.nn.GELU()]
    plain = torch.nn.Sequential(*layers, copy.deepcopy(net.output))
    x = torch.randn(6, 7)
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    y1, y2 = net(x1), plain(x2)
    assert torch.equal(y1, y2)
    y1.square().sum().backward()
    y2.square().sum().backward()
    assert torch.equal(x1.grad, x2.grad)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(net.parameters(), plain.parameters(), strict=True))
    assert all(mask.all() for mask in net.masks(x))


def test_routing_is_state_and_no_parameter():
    net = model()
    buffers = {"router.weight_1", "router.weight_2", "router.weight_3"}
    assert buffers == set(net.state_dict()) - {name for name, _ in net.named_parameters()}
    assert not list(net.router.parameters())
    other = model(seed=1)
    x = torch.randn(20, 7)
    assert not all(torch.equal(a, b) for a, b in zip(net.masks(x), other.masks(x), strict=True))
    other.load_state_dict(net.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(net.masks(x), other.masks(x), strict=True))
    assert torch.equal(net(x), other(x))


def test_training_does_not_change_the_routing():
    net, x = model(), torch.randn(20, 7)
    before, masks = copy.deepcopy(dict(net.router.named_buffers())), net.masks(x)
    optimiser = torch.optim.SGD(net.parameters(), 1.0, weight_decay=0.1)
    for _ in range(3):
        net(x).square().sum().backward()
        optimiser.step()
    assert all(torch.equal(before[name], buffer) for name, buffer in net.router.named_buffers())
    assert all(torch.equal(a, b) for a, b in zip(masks, net.masks(x), strict=True))


def test_inactive_neurons_get_exactly_zero_gradient_and_no_gradient_enters_through_the_mask():
    net = model(0.3, activation="tanh", dtype=torch.float64)
    x = torch.randn(1, 7, dtype=torch.float64, requires_grad=True)
    net(x).sum().backward()
    gradient, masks = torch.ones(4, dtype=torch.float64), net.masks(x)
    outer = gradient @ net.output.weight
    inputs = [x.detach()[0]]
    for hidden, mask in zip(net.hidden, masks, strict=True):
        inputs.append(torch.tanh(hidden.weight @ inputs[-1] + hidden.bias).detach() * mask[0])
    for layer in (2, 1, 0):
        hidden, mask = net.hidden[layer], masks[layer][0]
        assert (hidden.weight.grad[~mask] == 0).all()
        assert (hidden.bias.grad[~mask] == 0).all()
        assert (hidden.bias.grad[mask] != 0).all()
        local = outer * mask * (1 - inputs[layer + 1] ** 2)  # dL/da = dL/dx * m * f'(a), with x = m * f(a)
        torch.testing.assert_close(hidden.weight.grad, torch.outer(local, inputs[layer]), rtol=1e-12, atol=1e-14)
        outer = local @ hidden.weight
    torch.testing.assert_close(x.grad[0], outer.detach(), rtol=1e-12, atol=1e-14)
    assert all(not c.requires_grad for c in net.router(x))


def test_one_generator_gives_one_network_and_the_same_backbone_at_every_p():
    a, b, c, dense = model(seed=3), model(seed=3), model(seed=4), model(1.0, seed=3)
    assert all(torch.equal(a.state_dict()[k], b.state_dict()[k]) for k in a.state_dict())
    assert all(torch.equal(a.state_dict()[k], dense.state_dict()[k]) for k in a.state_dict())
    assert not torch.equal(a.output.weight, c.output.weight)


def test_a_seeded_network_does_not_use_the_global_generator():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    comet_mlp(5, 8, 3, seed=1)
    assert torch.equal(torch.rand(3), expected)


def test_weights_are_uniform_within_one_over_root_n():
    net = comet_mlp(400, 300, 10, seed=0)
    for weight, n in ((net.router.weight_1, 400), (net.router.weight_2, 300), (net.hidden[0].weight, 400)):
        bound = n**-0.5
        assert weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
        assert abs(weight.mean().item()) < 4 * bound / (3 * weight.numel()) ** 0.5


def test_dense_twin_has_the_same_weights_and_no_mask():
    net = comet_mlp(7, 20, 3, seed=0, activation="tanh")
    twin, x = dense_twin(net), torch.randn(4, 7)
    assert twin.dense
    assert all(
        torch.equal(net.state_dict()[k], v) and v is not net.state_dict()[k] for k, v in twin.state_dict().items()
    )
    h = x
    for layer in net.hidden:
        h = torch.tanh(torch.nn.functional.linear(h, layer.weight, layer.bias))
    assert torch.equal(twin(x), net.output(h))


@pytest.mark.parametrize("ties", ["index", "strict", "all"])
def test_ties_of_a_black_image(ties):
    """The routing has no bias, so all scores of a zero input are 0, and only the tie rule decides."""
    masks = model(0.5, ties=ties).masks(torch.zeros(1, 7))
    assert [int(m.sum()) for m in masks] == {"index": [6, 4, 5], "strict": [0, 0, 0], "all": [12, 9, 10]}[ties]


@pytest.mark.parametrize(("ties", "active"), [("index", 3), ("strict", 0), ("all", 8)])
def test_ties_of_single_layers(ties, active):
    layer = MaskedLinear(4, 8, 3, activation=None, ties=ties)
    assert int((layer(torch.randn(1, 4), torch.zeros(1, 8)) != 0).sum()) == active
    ffn = CometFFN(4, 8, 3 / 8, ties=ties)
    assert int(ffn.mask(torch.zeros(1, 4)).sum()) == active


def test_networks_pass_their_backend_on():
    x = torch.randn(3, 7)
    for activation in ("softplus", "relu"):
        net = model(0.5, activation=activation, backend="reference")
        with Operators() as seen:
            net(x).sum().backward()
            net.hidden[0](x, torch.randn(3, 12)).sum().backward()
        assert seen.names == []


def test_masks_do_not_depend_on_autocast_and_values_keep_its_dtype():
    net, x = model(widths=(64, 96, 96, 8), activation="relu"), torch.randn(40, 64)
    masks, bits = net.masks(x), net.router(x)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = net.hidden[0](x, bits=bits[0])
        y = net(x)
        assert all(torch.equal(a, b) for a, b in zip(masks, net.masks(x), strict=True))
        values = torch.relu(torch.nn.functional.linear(x, net.hidden[0].weight, net.hidden[0].bias))
    assert hidden.dtype == y.dtype == torch.bfloat16
    assert torch.equal(hidden, values * masks[0])
    y.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())


def test_a_network_on_meta_gives_shapes():
    """torch.autocast raises for the meta device, so the modules must not use it there."""
    net, x = model(device="meta"), torch.randn(3, 5, WIDTHS[0], device="meta", requires_grad=True)
    y = net(x)
    assert (y.shape, y.device.type) == ((3, 5, WIDTHS[-1]), "meta")
    assert [mask.shape[-1] for mask in net.masks(x)] == list(WIDTHS[1:-1])
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert all(p.grad.shape == p.shape for p in net.parameters())


def test_narrow_scores_are_widened_exactly():
    layer = MaskedLinear(6, 32, 10, activation=None)
    x, c = torch.randn(5, 6), torch.randn(5, 32).bfloat16()
    expected = layer(x) * mk.kwta_mask(c, 10)
    assert torch.equal(layer(x, c), expected)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiles_into_one_graph_forward_and_backward(compiler):
    torch.compiler.reset()
    net, x = model(widths=(16, 32, 32, 5), activation="tanh"), torch.randn(8, 16)
    compiled = torch.compile(net, fullgraph=True, backend=compiler)
    y = compiled(x)
    y.square().sum().backward()
    gradients = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    eager = net(x)
    eager.square().sum().backward()
    torch.testing.assert_close(y, eager, rtol=1e-5, atol=1e-6)
    for gradient, parameter in zip(gradients, net.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-6)
        assert torch.equal(gradient == 0, parameter.grad == 0)


def test_bad_arguments_are_errors_with_their_name():
    with pytest.raises(ValueError, match=r"CometMLP: widths must be a sequence of at least 3 sizes.*\(4, 5\)"):
        CometMLP((4, 5))
    with pytest.raises(ValueError, match=r"keep fraction in \(0, 1\], got 0"):
        CometMLP((4, 5, 6), 0.0)
    with pytest.raises(ValueError, match=r"activation must be one of .*'relu'.*; got 'swish'"):
        CometMLP((4, 5, 6), activation="swish")
    with pytest.raises(ValueError, match=r"ties must be one of .*; got 'none'"):
        CometMLP((4, 5, 6), ties="none")
    net, x = model(), torch.randn(3, 7)
    with pytest.raises(ValueError, match=r"CometMLP: samples must be \(3,\).*got \(2,\)"):
        net(x, net.router(x), torch.tensor([0, 1]))
    with pytest.raises(TypeError, match="CometMLP: samples must have dtype int32, int64"):
        net(x, net.router(x), torch.zeros(3))
    with pytest.raises(IndexError, match="out of range"):
        net(x, net.router(x), torch.tensor([0, -1, 1]))
    with pytest.raises(ValueError, match="CometMLP: samples must be None without bits"):
        net(x, samples=torch.tensor([2, 0, 1]))


def test_utilisation_is_a_count_independent_of_batches():
    net, x = model(0.3), torch.randn(50, 7)
    masks = net.masks(x)
    whole, parts, merged = Utilisation().update(masks), Utilisation(), Utilisation()
    first = Utilisation().update(net.masks(x[:7]))
    merged.merge(first)
    parts.update(net.masks(x[:7]))
    for chunk in x[7:].split(7):
        parts.update(net.masks(chunk))
        merged.merge(Utilisation().update(net.masks(chunk)))
    expected = [[sum(m[b][i] for b in range(50)) / 50 for i in range(m.shape[1])] for m in masks]
    merged.merge(Utilisation())
    for counted in (whole, parts, merged):
        assert counted.samples == 50
        assert [share.tolist() for share in counted.share()] == expected
    assert [share.tolist() for share in first.share()] == [m[:7].double().mean(0).tolist() for m in masks]
    flat = [share for layer in expected for share in layer]
    summary = whole.summary()
    assert summary["dead"] == flat.count(0.0)
    assert summary["neurons"] == len(flat)
    assert summary["min"] == min(flat)
    assert summary["mean"] == pytest.approx(sum(flat) / len(flat))
    whole.reset()
    assert whole.samples == 0
    assert whole.share() == []


def test_utilisation_finds_the_dead_neurons_and_takes_any_leading_dimensions():
    mask = torch.tensor([[[1, 0, 1], [1, 0, 0]], [[0, 0, 1], [1, 0, 1]]], dtype=torch.bool)
    counted = Utilisation().update([mask])
    assert counted.share()[0].tolist() == [0.75, 0.0, 0.75]
    assert counted.dead()[0].tolist() == [1]
    assert Utilisation().update([mask.transpose(0, 1)]).share()[0].tolist() == [0.75, 0.0, 0.75]
    with pytest.raises(TypeError, match="bool"):
        counted.update([mask.int()])
    with pytest.raises(ValueError, match=r"widths \[3\].*\[2\]"):
        counted.update([mask[..., :2]])
    with pytest.raises(ValueError, match="leading dimensions"):
        Utilisation().update([mask, mask[0]])


def test_utilisation_without_samples_has_no_shares():
    none, empty = Utilisation(), Utilisation().update([torch.ones(0, 3, dtype=torch.bool)])
    for counted in (none, empty):
        summary = counted.summary()
        assert math.isnan(summary.pop("min"))
        assert math.isnan(summary.pop("mean"))
        assert summary == {"dead": 0, "neurons": 0}
    assert none.share() == []
    assert empty.share()[0].isnan().tolist() == [True] * 3
    empty.update([torch.tensor([[True, False, False]])])
    assert empty.summary() == {"min": 0.0, "mean": pytest.approx(1 / 3), "dead": 2, "neurons": 3}


def test_a_parametrised_layer_is_read_through_its_parametrisation():
    model = CometMLP((6, 40, 40, 3))
    torch.nn.utils.parametrizations.weight_norm(model.hidden[0])
    x = torch.randn(5, 6)
    bits = model.router(x)
    with torch.no_grad():
        model.hidden[0].parametrizations.weight.original0 *= 2  # the norms of the rows
        expected = model.output(model.hidden[1](model.hidden[0](x, bits=bits[0]), bits=bits[1]))
    torch.testing.assert_close(model(x, bits), expected)


def test_inputs_of_a_wrong_width_are_errors():
    with pytest.raises(ValueError, match=r"FixedRouting: x must be \(..., 8\), got shape \(4, 7\)"):
        CometMLP((8, 5, 3))(torch.randn(4, 7))


@pytest.mark.parametrize(
    ("dtype", "scores_dtype", "apart"),
    [
        (torch.bfloat16, torch.float32, 1e-4),
        (torch.float32, torch.float64, 1e-10),
        (torch.float64, torch.float64, 1e-10),
        (torch.float64, torch.float32, 1e-4),
    ],
)
def test_scores_are_compared_in_their_own_dtype(dtype, scores_dtype, apart):
    layer = MaskedLinear(3, 2, 1, activation=None, dtype=dtype)
    scores, x = torch.tensor([[1.0, 1.0 + apart]], dtype=scores_dtype), torch.rand(1, 3).to(dtype)
    assert torch.equal(layer(x, scores), layer(x) * torch.tensor([0.0, 1.0], dtype=dtype))


def test_a_generator_draws_the_same_routing_again():
    def draw(seed):
        return FixedRouting((6, 5, 4), generator=torch.Generator().manual_seed(seed)).state_dict()

    first, again, other = draw(1), draw(1), draw(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_routing_compares_in_the_dtype_of_its_weights():
    router = FixedRouting((1, 2, 2), 0.5, dtype=torch.float64)
    router.weight_1.copy_(torch.tensor([[1.0], [1.0 + 1e-10]], dtype=torch.float64))
    router.weight_2.copy_(torch.tensor([[0.0, 1.0], [0.0, 1.0 + 1e-10]], dtype=torch.float64))
    for x in (torch.ones(1, 1), torch.ones(1, 1, dtype=torch.float64)):
        assert [mask.tolist() for mask in router.masks(x)] == [[[False, True]]] * 2
