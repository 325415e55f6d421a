"""torch.export of layers of experts with a dynamic number of tokens: values, losses and gradients of the layer; and
what AOTInductor makes of one."""

from __future__ import annotations

import io

import pytest
import torch
from torch.utils import _pytree as pytree

from moe_kernels import nn as mnn

D, E, H, IDS = 6, 4, 5, 12


def layer(gate, policy=None, experts=None, **options):
    return mnn.MoE(gate, experts or mnn.ExpertMLP(gate.num_experts, D, H), policy, **options)


LAYERS = {
    "softmax": lambda: layer(mnn.SoftmaxGate(D, E, importance=0.1)),
    "topk": lambda: layer(mnn.TopKGate(D, E, 2, balance=0.1, z=0.1)),
    "swiglu": lambda: layer(mnn.TopKGate(D, E, 2), experts=mnn.ExpertMLP(E, D, H, activation="swiglu", bias=False)),
    "one layer": lambda: layer(mnn.TopKGate(D, E, 2), experts=mnn.ExpertLayer(E, D, H)),
    "tensor": lambda: layer(mnn.TopKGate(D, E, 2), output="tensor"),
    "pass": lambda: layer(mnn.TopKGate(D, E, 1, order="softmax_topk"), pass_through=True),
    "tree": lambda: layer(mnn.TreeGate(D, E, 2, entropy=0.1)),
    "nonzero": lambda: layer(mnn.TreeGate(D, E, 2), mnn.NonzeroWeights()),
    "dselect": lambda: layer(mnn.DSelectKGate(D, 3, 2, entropy=0.1)),
    "xmoe": lambda: layer(mnn.XMoEGate(D, E, 2, score="cosine")),
    "hyper": lambda: layer(mnn.HyperRouterGate(D, E, 2, hidden=8)),
    "stable": lambda: layer(mnn.StableGate(D, E, IDS)),
    "hash": lambda: layer(mnn.HashGate(IDS, E)),
    "capacity": lambda: layer(mnn.TopKGate(D, E, 2), mnn.TokenChoice(1.25)),
    "priority": lambda: layer(mnn.TopKGate(D, E, 2), mnn.TokenChoice(1.25, priority="max", multiple_of=4)),
    "expert choice": lambda: layer(mnn.SoftmaxGate(D, E), mnn.ExpertChoice(1.0)),
    "priority routing": lambda: layer(mnn.SoftmaxGate(D, E), mnn.PriorityRouting()),
    "tasks": lambda: mnn.MultiGateMoE([mnn.SoftmaxGate(D, E), mnn.TopKGate(D, E, 2)], mnn.ExpertLayer(E, D, H)),
}


def inputs(tokens):
    x = torch.randn(tokens, D, generator=torch.Generator().manual_seed(tokens))
    return x, torch.arange(tokens) % IDS


def found(call, parameters, tokens):
    x, ids = inputs(tokens)
    x.requires_grad_()
    out = call(x, ids)
    y = pytree.tree_leaves(getattr(out, "y", out))
    loss = sum(each.square().sum() for each in y) + getattr(out, "loss", 0)
    gradients = torch.autograd.grad(loss, [x, *parameters], allow_unused=True)
    return [*y, loss, *(each for each in gradients if each is not None)]


@pytest.mark.parametrize("name", LAYERS)
def test_an_exported_layer_is_the_layer(name):
    torch.manual_seed(0)
    made = LAYERS[name]()
    # An expert takes round(T / 4) tokens: none of 2, and torch.export makes a program of its own for sizes 0 and 1.
    tokens = torch.export.Dim("tokens", min=3 if name == "expert choice" else 2, max=4096)
    shapes = {"x": {0: tokens}, "ids": {0: tokens}}
    if name == "tensor":
        made = torch.nn.Sequential(made)
    given = inputs(8)
    if name == "tensor":
        program = torch.export.export(made, given[:1], dynamic_shapes=({0: tokens},))
    else:
        program = torch.export.export(made, given, dynamic_shapes=shapes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for exported in (program.module(), torch.export.load(file).module()):
        call = (lambda x, ids, exported=exported: exported(x)) if name == "tensor" else exported
        plain = (lambda x, ids: made(x)) if name == "tensor" else made
        own = dict(exported.named_parameters())
        for count in (8, 3, 21):
            expected = found(plain, [p for p in made.parameters() if p.requires_grad], count)
            got = found(call, [own[n] for n, p in made.named_parameters() if p.requires_grad], count)
            assert len(got) == len(expected)
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.timeout(900)  # a C++ compiler with optimisation: 15 s on quiet cores, minutes on busy ones
def test_what_aot_inductor_packages_is_the_layer(tmp_path):
    torch.manual_seed(0)
    made = LAYERS["tensor"]().eval()
    x, _ = inputs(12)
    with torch.no_grad():
        program = torch.export.export(made, (x,), dynamic_shapes=({0: torch.export.Dim("tokens", min=2, max=4096)},))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
        call = torch._inductor.aoti_load_package(package)
        for count in (12, 3, 31):
            x, _ = inputs(count)
            torch.testing.assert_close(call(x), made(x), rtol=1e-5, atol=1e-6)
