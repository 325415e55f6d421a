"""Gates whose linear layers are wrapped: LoRA, hooks, parametrizations and offloaded weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from moe_kernels import nn as mnn
from tests.helpers.layers import EVERY, D, E, Lora, inputs

# By name: a gate, and the path of a linear layer whose output its choice or weights depend on.
LINEAR = {
    "softmax": "linear",
    "topk": "linear",
    "dselect": "code",
    "dselect mix": "mix",
    "xmoe": "linear",
    "hyper": "hypernetwork.0",
    "hyper out": "hypernetwork.2",
    "stable": "router",
    "staged": "second.linear",
    "competition": "router.linear",
}


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


def gate_of(name):
    torch.manual_seed(0)
    return EVERY[name.split()[0]]()


def call(gate, noisy=False):
    torch.manual_seed(0)
    x, ids = inputs(9)
    return gate.train(noisy)(x, ids)


def differs(one, other):
    return not torch.equal(one.gates, other.gates)


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("name", LINEAR)
def test_lora_counts_and_trains(name, bare):
    gate, path = gate_of(name), LINEAR[name]
    before = call(gate)
    lora = Lora(gate.get_submodule(path), bare)
    gate.set_submodule(path, lora)
    assert not differs(call(gate), before)
    out = call(gate, noisy=True)
    (out.gates * torch.linspace(1, 2, out.num_experts) + out.loss).sum().backward()
    assert lora.b.weight.grad.abs().sum() > 0
    with torch.no_grad():
        lora.b.weight.normal_(0, 10)
    assert differs(call(gate), before)


@pytest.mark.parametrize("name", LINEAR)
def test_hooks_are_called(name):
    gate, seen = gate_of(name), []
    before = call(gate)
    linear = gate.get_submodule(LINEAR[name])
    linear.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    linear.register_forward_hook(lambda module, args, output: output.flip(-1) * 3)
    assert differs(call(gate), before)
    assert seen == [torch.float32]


@pytest.mark.parametrize("name", [each for each in LINEAR if not each.startswith("hyper")])
def test_a_parametrized_weight(name):
    gate = gate_of(name)
    before = call(gate)
    linear = gate.get_submodule(LINEAR[name])
    parametrize.register_parametrization(linear, "weight", Twice())
    with torch.no_grad():
        linear.parametrizations.weight.original.mul_(0.5)
    assert not differs(call(gate), before)


def offload(module):
    """As accelerate: the module's own tensors are on the meta device, but for the time of its forward."""
    own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    forward = module.forward

    def place(tensors):
        for name, each in tensors.items():
            (module._parameters if name in module._parameters else module._buffers)[name] = each

    def around(*args, **kwargs):
        place(own)
        try:
            return forward(*args, **kwargs)
        finally:
            place(away)

    away = {
        name: nn.Parameter(each.to("meta"), False) if isinstance(each, nn.Parameter) else each.to("meta")
        for name, each in own.items()
    }
    place(away)
    module.forward = around


@pytest.mark.parametrize("name", [each for each in EVERY if each != "random"])
def test_offloaded(name):
    gate = gate_of(name) if name in LINEAR else EVERY[name]()
    with torch.no_grad():
        before = call(gate)
        for module in gate.modules():
            if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                offload(module)
        after = call(gate)
    assert not after.weights.is_meta
    assert not differs(after, before)


def test_a_weight_on_the_meta_device_is_refused():
    gate = mnn.XMoEGate(D, E, 2)
    gate.embeddings = nn.Parameter(gate.embeddings.to("meta"))
    with pytest.raises(RuntimeError, match=r"XMoEGate: the gate's own weight .* is on the meta device and x on cpu"):
        call(gate)


def test_a_frozen_hypernetwork_stays_frozen():
    gate = mnn.HyperRouterGate(D, E, 2, hidden=8)
    nn.ModuleList([gate, nn.Linear(2, 2)]).requires_grad_()
    call(gate).weights.square().sum().backward()
    assert gate.embedding.grad.abs().sum() > 0
    assert all(each.grad is None for each in gate.hypernetwork.parameters())
    lora = Lora(gate.hypernetwork[0])
    gate.hypernetwork[0] = lora
    gate.requires_grad_()
    assert lora.b.weight.requires_grad
    assert not lora.base_layer.weight.requires_grad
