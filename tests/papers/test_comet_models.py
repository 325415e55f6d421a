"""Models of the COMET paper (000)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from moe_kernels.nn.comet import CometFFN
from moe_kernels.ops.kwta import unpack_bits
from moe_kernels.papers.models.comparison import MODELS, comparison_mlp, tied_masks
from moe_kernels.papers.models.gpt import GPT
from moe_kernels.papers.models.mixer import Mixer
from moe_kernels.papers.models.transformer import ffn_masks
from moe_kernels.papers.models.vit import ViT, patches

X = torch.randn(9, 7, generator=torch.Generator().manual_seed(1))


def mlp(name: str, p: float = 0.5, activation: str = "tanh"):
    return comparison_mlp(name, 7, 20, 3, layers=3, p=p, activation=activation, seed=0)


def winners(c: torch.Tensor, k: int) -> torch.Tensor:
    """The mask of the k largest scores of each row; the scores of a row must differ."""
    return (c[:, :, None] < c[:, None, :]).sum(-1) < k


def test_networks_of_one_shape_start_from_the_same_weights():
    first = mlp("standard").state_dict()
    for name in set(MODELS) - {"smaller", "moe", "moe-fixed"}:
        assert all(torch.equal(first[key], value) for key, value in mlp(name).state_dict().items()), name


def test_an_unknown_model_or_one_without_a_hidden_layer_is_refused():
    with pytest.raises(ValueError, match=r"comparison_mlp: name must be one of 'standard', .*; got 'top-k'"):
        mlp("top-k")
    for name in ("moe", "comet"):
        with pytest.raises(ValueError, match="comparison_mlp: layers must be from 2"):
            comparison_mlp(name, 7, 20, 3, layers=1)


@pytest.mark.parametrize("name", ["topk", "layerwise"])
def test_masks_from_the_backbone(name):
    net, x = mlp(name, 0.3), X.clone().requires_grad_()
    h = x
    for layer, v in zip(net.hidden, net.router.buffers(), strict=True):
        a = h @ layer.weight.T + layer.bias
        mask = winners(a if name == "topk" else h @ v.T, 6)
        h = torch.where(mask, torch.tanh(a), 0)
    expected = h @ net.output.weight.T + net.output.bias
    y = net(x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    own_gradients, expected_gradients = (
        torch.autograd.grad(each.square().sum(), [x, *net.parameters()]) for each in (y, expected)
    )
    torch.testing.assert_close(own_gradients, expected_gradients, rtol=1e-4, atol=1e-6)
    for masks in (net.train().masks(X), net.eval().masks(X)):
        assert [m.sum(-1).unique().tolist() for m in masks] == [[6], [6]]
        assert torch.equal(masks[-1], mask)


def test_smaller_and_dropout():
    assert mlp("smaller", 0.3).widths == (7, 6, 6, 3)
    net = mlp("dropout", 0.25).train()
    seen = []
    net.output.register_forward_pre_hook(lambda layer, args: seen.append(args[0]))
    many = torch.randn(400, 7)
    net(many)
    assert (seen[0] != 0).float().mean() == pytest.approx(0.25, abs=0.03)
    net.eval()(many)
    assert torch.equal(net(many), mlp("standard")(many))
    for name in ("dropout", "topk"):
        with pytest.raises(ValueError, match="MLP: takes no bits and no samples"):
            mlp(name)(many, [torch.zeros(400, 1, dtype=torch.int32)] * 3)


@pytest.mark.parametrize("activation", ["relu", "softplus"])
@pytest.mark.parametrize("name", ["moe", "moe-fixed"])
def test_mixture_of_whole_mlps(name, activation):
    net = mlp(name, 0.3, activation)
    f = getattr(F, activation)
    assert net.num_experts == 3  # floor(1 / 0.3)
    assert [tuple(w.shape) for w in net.weights] == [(3, 7, 6), (3, 6, 6), (3, 6, 3)]
    rows = []
    for x in X:
        probs = net.router_out(f(net.router_in(x))).softmax(-1)
        e = int(probs.argmax())
        for i, (weight, bias) in enumerate(zip(net.weights, net.biases, strict=True)):
            x = x @ weight[e] + bias[e]
            x = f(x) if i < 2 else x
        rows.append(probs[e] * x)
    y = net(X)
    torch.testing.assert_close(y, torch.stack(rows), rtol=1e-5, atol=1e-6)
    y.square().sum().backward()
    assert net.router_in.weight.requires_grad == (name == "moe")
    if name == "moe":
        assert (net.router_in.weight.grad != 0).any()


@pytest.mark.parametrize("activation", ["relu", "softplus"])
def test_mixture_of_whole_mlps_under_autocast(activation):
    net = mlp("moe", 0.3, activation)
    with torch.autocast("cpu", torch.bfloat16):
        y = net(X)
    assert torch.equal(y, copy.deepcopy(net).bfloat16()(X.bfloat16()))
    y.float().square().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in net.parameters())
    assert all(parameter.grad.any() for parameter in net.weights)


def test_masks_tied_to_examples():
    device = torch.device("cpu")
    bernoulli = unpack_bits(tied_masks(3000, 40, 0.3, 0, device, chunk=1024), 40)
    tied = unpack_bits(tied_masks(3000, 40, 0.3, 12, device), 40)
    assert bernoulli.float().mean() == pytest.approx(0.3, abs=0.01)
    assert tied[:, :12].all()
    assert tied[:, 12:].float().mean() == pytest.approx(0.3, abs=0.01)
    assert not torch.equal(bernoulli[0], bernoulli[1])
    with torch.device("meta"):  # the default device does not change where masks are drawn
        assert unpack_bits(tied_masks(1, 40, 0.0, 12, device), 40).sum() == 12


@pytest.mark.parametrize("p", [0.5, 1.0])
def test_feed_forward_layer_by_hand(p):
    layer = CometFFN(7, 20, p, activation="tanh")
    h = torch.tanh(X @ layer.hidden.weight.T + layer.hidden.bias)
    mask = winners(X @ layer.router.weight_1.T, 10) if p < 1 else torch.ones(9, 20, dtype=torch.bool)
    expected = (h * mask) @ layer.output.weight.T + layer.output.bias
    torch.testing.assert_close(layer(X), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(layer.mask(X), mask)


def networks(p: float, **options):
    torch.manual_seed(0)
    small = {"dim": 16, "depth": 2, "p": p}
    yield ViT((2, 8, 12), 5, heads=2, hidden=24, **small, **options), torch.randn(3, 192), (3, 5)
    yield GPT(11, 10, heads=2, **small, **options), torch.randint(11, (3, 10)), (3, 10, 11)
    if not options:
        yield Mixer((2, 8, 12), 5, **small), torch.randn(3, 192), (3, 5)


@pytest.mark.parametrize("router_input", [None, "embedding"])
def test_half_of_every_feed_forward_layer_is_active(router_input):
    for net, x, shape in networks(0.5, **({"router_input": router_input} if router_input else {})):
        net.eval()
        hidden: list[torch.Tensor] = []
        for layer in (module for module in net.modules() if isinstance(module, CometFFN)):
            layer.output.register_forward_pre_hook(lambda layer, args, seen=hidden: seen.append(args[0]))
        assert net(x).shape == shape
        seen = list(hidden)
        masks = ffn_masks(net, x)
        assert len(masks) == len(seen) == (4 if isinstance(net, Mixer) else 2)
        for mask, h in zip(masks, seen, strict=True):
            assert torch.equal(mask, h != 0)  # no active neuron has a tanh of exactly 0 here
            assert (mask.sum(-1) == h.shape[-1] // 2).all()


def test_at_p_one_nothing_is_routed():
    for net, x, shape in networks(1.0):
        assert net(x).shape == shape
        assert all(mask.all() for mask in ffn_masks(net.eval(), x))
    mask = CometFFN(8, 32, p=1.0).mask(torch.randn(2, 8), torch.ones(2, 1, dtype=torch.int32))
    assert mask.sum(1).tolist() == [1, 1]  # bits that are passed decide at p = 1 too


def test_patches_are_squares_of_the_image():
    image = torch.arange(2 * 4 * 6).float().view(1, 2, 4, 6)
    found = patches(image.flatten(1), (2, 4, 6), 2)
    assert found.shape == (1, 6, 8)
    assert torch.equal(found[0, 4], image[0, :, 2:4, 2:4].flatten())
    with pytest.raises(ValueError, match="divides both sides, got 4 for 4 x 6"):
        patches(image.flatten(1), (2, 4, 6), 4)


def test_gpt_does_not_see_the_future():
    net = GPT(11, 10, dim=16, depth=2, heads=2).eval()
    x = torch.randint(11, (2, 10))
    changed = x.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 11
    a, b = net(x), net(changed)
    torch.testing.assert_close(a[:, :6], b[:, :6], rtol=1e-5, atol=1e-6)
    assert (a[:, 6:] != b[:, 6:]).any()


def test_a_router_over_the_embedding_ignores_the_blocks():
    net = ViT((2, 8, 12), 5, dim=16, depth=2, heads=2, hidden=24, router_input="embedding").eval()
    x = torch.randn(3, 192)
    before = ffn_masks(net, x)
    with torch.no_grad():
        for parameter in net.blocks.blocks.parameters():
            parameter.normal_()
    assert all(torch.equal(a, b) for a, b in zip(before, ffn_masks(net, x), strict=True))


def test_dropout_follows_both_products_of_a_feed_forward_layer():
    layer, x, hidden = CometFFN(6, 8, 1.0, dropout=0.5), torch.randn(20, 6), []
    layer.output.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    assert 0.3 < (layer(x) == 0).float().mean() < 0.7
    assert layer.eval()(x).all()
    assert 0.3 < (hidden[0] == 0).float().mean() < 0.7
    assert hidden[1].all()
