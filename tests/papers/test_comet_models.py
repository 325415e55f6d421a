"""Models of the papers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from moe_kernels.nn import ExpertLayer, ExpertMLP, HashGate, MoE, TopKGate
from moe_kernels.nn.comet import CometFFN
from moe_kernels.ops.kwta import unpack_bits
from moe_kernels.papers.models import comparison
from moe_kernels.papers.models.comparison import MODELS, comparison_mlp, tied_masks
from moe_kernels.papers.models.gpt import GPT
from moe_kernels.papers.models.mixer import Mixer
from moe_kernels.papers.models.mmoe import MMoE
from moe_kernels.papers.models.moe import MoEBlock, MoEGPT, MoEViT
from moe_kernels.papers.models.transformer import Block, Blocks, FeedForward, ffn_masks
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


@pytest.mark.parametrize("name", ["topk", "layerwise"])
def test_masks_from_the_backbone_have_its_backend_and_ties(name, monkeypatch):
    net, seen = mlp(name, 0.3), []
    net.backend, net.ties = "reference", "lowest"
    for each in ("kwta", "kwta_mask"):
        monkeypatch.setattr(comparison, each, lambda c, k, values=None, **given: seen.append((k, given)) or c)
    net.with_masks(X)
    assert seen == [(6, {"ties": "lowest", "backend": "reference"})] * 4


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


def feed_forward(ffn, x):
    if isinstance(ffn, CometFFN):
        return ffn.output(torch.tanh(F.linear(x, ffn.hidden.weight, ffn.hidden.bias)))
    return ffn.fc2(F.gelu(ffn.fc1(x)))


def through_blocks(net, x, causal):
    """x (B, S, D) through the blocks and the last norm, head by head."""
    for block in net.blocks.blocks:
        size, mixed = x.shape[-1] // block.heads, []
        heads = (each.split(size, -1) for each in block.qkv(block.norm_attention(x)).chunk(3, -1))
        for q, k, v in zip(*heads, strict=True):
            scores = q @ k.mT / size**0.5
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            mixed.append(scores.softmax(-1) @ v)
        x = x + block.project(torch.cat(mixed, -1))
        x = x + feed_forward(block.ffn, block.norm_ffn(x))
    return net.blocks.norm(x)


def squares(images, side):
    """Patches (B, patches, C * side * side), row by row."""
    return F.unfold(images, side, stride=side).mT


@pytest.mark.parametrize("kind", ["comet", "experts"])
def test_dense_transformers_by_hand(kind):
    """p = 1, and no layer with experts."""
    torch.manual_seed(0)
    sizes, images = {"dim": 16, "depth": 2, "heads": 2, "hidden": 24}, torch.randn(3, 2, 8, 12)
    if kind == "comet":
        vit, gpt = ViT((2, 8, 12), 5, p=1.0, **sizes), GPT(11, 10, p=1.0, **sizes)
    else:
        vit = MoEViT((2, 8, 12), 5, lambda index: None, **sizes)
        gpt = MoEGPT(11, 10, lambda index: None, activation="gelu", **sizes)
    first = vit.embed.class_token.expand(3, 1, 16)
    x = torch.cat([first, vit.embed.project(squares(images, 4))], 1) + vit.embed.positions
    expected = vit.head(through_blocks(vit, x, False)[:, 0])
    found = vit.eval()(images.flatten(1))
    torch.testing.assert_close(found if kind == "comet" else found[0], expected, rtol=1e-4, atol=1e-5)
    tokens = torch.randint(11, (3, 7))
    h = through_blocks(gpt, gpt.tokens.weight[tokens] + gpt.positions[:7], True)
    found = gpt.eval()(tokens)
    torch.testing.assert_close(found if kind == "comet" else found[0], h @ gpt.tokens.weight.T, rtol=1e-4, atol=1e-5)


def test_mixer_by_hand():
    torch.manual_seed(0)
    net, images = Mixer((2, 8, 12), 5, dim=16, depth=2, p=1.0), torch.randn(3, 2, 8, 12)
    for parameter in net.parameters():  # norms too: else those of tokens and channels would be equal
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    x = net.embed(squares(images, 4))
    for block in net.blocks:
        x = x + feed_forward(block.tokens, block.norm_tokens(x).mT).mT
        x = x + feed_forward(block.channels, block.norm_channels(x))
    torch.testing.assert_close(net(images.flatten(1)), net.head(net.norm(x).mean(1)), rtol=1e-4, atol=1e-5)


def test_gpt_starts_as_gpt_2_does():
    net = GPT(60, 30, dim=64, depth=8, heads=2)
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            residual = name.endswith(("project.weight", "output.weight"))
            assert parameter.std().item() == pytest.approx(0.005 if residual else 0.02, rel=0.1), name


def test_a_recommender_by_hand():
    torch.manual_seed(0)
    gates = (HashGate(6, 3), HashGate(6, 3))
    net = MMoE(6, 9, gates, ExpertLayer(3, 8, 5), embedding=4, width=5, head=7)
    users, movies = torch.tensor([0, 5, 3, 3]), torch.tensor([8, 2, 2, 7])
    found = net(users, movies)[:2]
    h = torch.cat([net.users.weight[users], net.movies.weight[movies]], 1)
    for gate, head, each in zip(gates, net.heads, found, strict=True):
        e = gate.table[users].long()
        y = (torch.einsum("td,tdh->th", h, net.moe.experts.weight[e]) + net.moe.experts.bias[e]).relu()
        inner, _, last = head
        expected = (inner(y).relu() @ last.weight.T + last.bias)[:, 0]
        torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-6)
    assert 0.04 < max(each.weight.abs().max() for each in (net.users, net.movies)) <= 0.05


def test_dropout_of_blocks_is_for_training():
    """At rate 1 only the residual connection is left."""
    x = torch.randn(2, 5, 8)
    moe = MoE(TopKGate(8, 2, 1), ExpertMLP(2, 8, 4))
    for block in (MoEBlock(8, 2, moe, dropout=1.0), Block(8, 2, FeedForward(8, 12, dropout=1.0), dropout=1.0)):
        call = (lambda x, block=block: block(x)[0]) if isinstance(block, MoEBlock) else block
        assert torch.equal(call(x), x)
        block.eval()
        attended = (block.block if isinstance(block, MoEBlock) else block).attend(x)
        assert (attended != x).any(-1).all()
        assert (call(x) != attended).any(-1).all()
    layer, hidden = FeedForward(6, 8, dropout=0.5), []
    layer.fc2.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    y = layer(torch.randn(40, 6))
    assert all(0.3 < (each == 0).float().mean() < 0.7 for each in (y, hidden[0]))


def test_patches_are_squares_of_the_image():
    image = torch.arange(2 * 4 * 6).float().view(1, 2, 4, 6)
    found = patches(image.flatten(1), (2, 4, 6), 2)
    assert found.shape == (1, 6, 8)
    assert torch.equal(found[0, 4], image[0, :, 2:4, 2:4].flatten())
    with pytest.raises(ValueError, match="divides both sides, got 4 for 4 x 6"):
        patches(image.flatten(1), (2, 4, 6), 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda ffn: Block(10, 4, ffn), "Block: dim must be a multiple of heads, got 10 and 4"),
        (lambda ffn: Block(8, 4, ffn, relative=1), "Block: relative positions are for causal blocks, got causal=False"),
        (
            lambda ffn: Blocks(1, 8, 4, 6, 0.5, router_input="tokens"),
            r"Blocks: router_input must be one of \('layer', 'embedding'\), got 'tokens'",
        ),
    ],
    ids=["heads", "relative", "router_input"],
)
def test_blocks_refuse_what_they_could_not_use(make, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        make(FeedForward(8, 6))


def test_blocks_take_heads_that_divide_and_relative_positions_if_they_are_causal():
    ffn = FeedForward(8, 6)
    for heads in (1, 4, 8):
        assert Block(8, heads, ffn)(torch.randn(2, 3, 8)).shape == (2, 3, 8)
    assert Block(8, 4, ffn, causal=True, relative=1).relative.shape == (4, 1)
    assert Block(8, 4, ffn, relative=0).relative is None


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
