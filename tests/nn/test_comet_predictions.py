"""Predictions of COMET's layers: few winners are computed alone, and everything else by torch's product."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import moe_kernels as mk
from moe_kernels.nn import ACTIVATIONS, CometMLP, MaskedLinear
from moe_kernels.ops.kwta import pack_bits
from tests.helpers.layers import Operators


def model(p, widths):
    return CometMLP(widths, p, generator=torch.Generator().manual_seed(0))


def ran(net, *given, **named):
    with Operators() as seen:
        return net(*given, **named), [name for name in seen.names if name not in ("kwta_bits", "kwta_fwd")]


WIDE = (130, 150, 160, 4)  # layers of fewer than 128 inputs keep the dense product


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_without_gradients_few_winners_are_computed_alone(activation):
    net, x = CometMLP(WIDE, 0.2, activation=activation), torch.randn(3, 5, 130)
    trained, dense = ran(net, x)
    assert "kwta_linear_fwd" not in dense
    with torch.no_grad():
        y, names = ran(net, x)
        assert names.count("kwta_linear_fwd") == 2
        torch.testing.assert_close(y, trained.detach(), rtol=1e-5, atol=1e-6)
        bits = net.router.kept(x.view(15, 130))
        known = net(x.view(15, 130), bits, torch.arange(15))
    assert torch.equal(known, y.view(15, 4))


def alone(layer, *given, **named):
    """Whether the layer computed winners alone."""
    return "kwta_linear_fwd" in ran(layer, *given, **named)[1]


def test_where_the_dense_product_stays():
    few, x = model(0.2, widths=WIDE), torch.randn(5, 130)
    with torch.no_grad():
        assert alone(few, x)
        assert not alone(model(0.3, widths=WIDE), x)  # it would take longer
        assert not alone(model(0.2, widths=(127, 150, 4)), x[:, :127])
        with torch.autocast("cpu"):
            assert not alone(few, x)
            assert few(x).dtype == torch.bfloat16
        with mk.batch_invariant():
            assert not alone(few, x)
    few.hidden.requires_grad_(False)
    few.output.requires_grad_(False)
    assert alone(few, x)  # no gradient is needed
    assert not alone(few, x.requires_grad_())


class Doubled(nn.Parameter):
    """A weight that overrides F.linear, as quantised ones do."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            plain = [each.as_subclass(torch.Tensor) for each in args if each is not None]
            return function(plain[0], 2 * plain[1], *plain[2:])
        return super().__torch_function__(function, types, args, kwargs or {})


class Counted(nn.Module):
    calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight


def test_weights_for_torchs_own_product():
    x, bits = torch.randn(5, 130), pack_bits(torch.rand(5, 40) < 0.2)
    layer = MaskedLinear(130, 40, 8, activation=None)
    plain = layer(x, bits=bits).detach()
    with torch.no_grad():
        assert alone(layer, x, bits=bits)
        sparse = copy.deepcopy(layer)
        sparse.weight = nn.Parameter(layer.weight.to_sparse_csr(), requires_grad=False)
        torch.testing.assert_close(sparse(x, bits=bits), plain)
        doubled = MaskedLinear(130, 40, 8, activation=None, bias=False)
        doubled.weight = Doubled(layer.weight.detach())
        torch.testing.assert_close(doubled(x, bits=bits), mk.kwta_apply(2 * x @ layer.weight.t(), bits))
        meta = MaskedLinear(130, 40, 8, device="meta")
        assert meta(x.to("meta"), bits=bits.to("meta")).shape == (5, 40)
    counted = Counted()
    nn.utils.parametrize.register_parametrization(layer, "weight", counted)
    before = counted.calls
    with torch.no_grad():
        torch.testing.assert_close(layer(x, bits=bits), plain)
    layer(x, bits=bits)
    assert counted.calls - before == 2


@pytest.mark.parametrize("compiled", [False, True])
def test_vmap_over_weights_without_gradients(compiled):
    copies = [MaskedLinear(130, 40, 5) for _ in range(2)]
    stacked, _ = torch.func.stack_module_state(copies)
    x, bits = torch.randn(3, 130), pack_bits(torch.rand(3, 40) < 0.1)

    def each(stacked, x, bits):
        return torch.vmap(lambda given: torch.func.functional_call(copies[0], given, (x,), {"bits": bits}))(stacked)

    call = torch.compile(each, backend="aot_eager") if compiled else each
    with torch.no_grad():
        torch.testing.assert_close(call(stacked, x, bits), torch.stack([layer(x, bits=bits) for layer in copies]))


@pytest.mark.parametrize("strict", [False, True])
def test_exported_predictions_take_any_number_of_rows(strict):
    net, x = model(0.2, widths=WIDE).requires_grad_(False), torch.randn(9, 130)
    with torch.no_grad():
        compiled = torch.compile(net, fullgraph=True, backend="aot_eager", dynamic=True)
        torch.testing.assert_close(compiled(x), net(x))
        rows = torch.export.Dim("rows", min=2, max=4096)
        exported = torch.export.export(net, (x,), dynamic_shapes=({0: rows},), strict=strict).module()
        more = torch.randn(1000, 130)
        torch.testing.assert_close(exported(more), net(more))


def test_flops_of_a_prediction_are_those_of_winners():
    """COMET fixed routing's layers of 3000 with p = 0.1; the output layer, never masked, is the rest."""
    widths, counts = (300, 3000, 3000, 10), {}
    for p in (0.1, 1.0):
        net = model(p, widths=widths)
        bits = net.router(torch.randn(2, 300)) if p < 1 else None
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            net(torch.randn(2, 300), bits)
        counts[p] = counter.get_total_flops()
    products = 300 * 3000 + 3000 * 3000
    assert counts[1.0] == 4 * (products + 30_000)
    assert counts[0.1] == 4 * (products // 10 + 30_000) <= 1.15 * 0.1 * counts[1.0]
