"""Experts converted from another layout give the outputs of the originals; converted back, they equal the originals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moe_kernels as mk
from moe_kernels import nn as mnn
from moe_kernels.nn import convert

E, D, H, OUT, T = 12, 6, 5, 4, 40  # over ten experts: as text, 10 comes before 2


class Mixtral(nn.Module):
    """An expert of Mixtral as in transformers before version 5."""

    def __init__(self, bias):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(D, H, bias=bias) for _ in range(2))
        self.w2 = nn.Linear(H, OUT, bias=bias)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Plain(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(D, H, bias=bias), nn.Linear(H, OUT, bias=bias)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("kind", [Mixtral, Plain])
def test_experts_of_linear_layers(kind, bias):
    torch.manual_seed(0)
    theirs = nn.ModuleDict({"experts": nn.ModuleList(kind(bias) for _ in range(E)), "other": nn.Linear(2, 2)})
    names = convert.MIXTRAL if kind is Mixtral else ("fc1", "fc2")
    ours = mnn.ExpertMLP(E, D, H, OUT, activation="swiglu" if kind is Mixtral else "gelu", bias=bias)
    ours.load_state_dict(convert.from_linear(theirs.state_dict(), "experts.", names))
    x, experts = torch.randn(T, D), torch.randint(E, (T, 1))
    y = ours(x, mk.make_plan(experts, E), None)
    expected = torch.stack([theirs["experts"][int(e)](row) for row, e in zip(x, experts, strict=True)])
    torch.testing.assert_close(y, expected)
    back = convert.to_linear(ours.state_dict(), "experts.", names)
    state = {key: value for key, value in theirs.state_dict().items() if key.startswith("experts.")}
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], state[key]) and back[key].is_contiguous() for key in state)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "transposed"])
def test_experts_of_stacked_layouts(transposed, interleaved, bias):
    torch.manual_seed(0)
    gate_up, down = torch.randn(E, 2 * H, D), torch.randn(E, OUT, H)
    biases = torch.randn(E, 2 * H), torch.randn(E, OUT)
    state = {"gate_up_proj": gate_up.mT if transposed else gate_up, "down_proj": down.mT if transposed else down}
    if bias:
        state |= {"gate_up_proj_bias": biases[0], "down_proj_bias": biases[1]}
    state = {f"mlp.experts.{key}": value for key, value in state.items()}
    options = {"transposed": transposed, "interleaved": interleaved}
    found = convert.from_stacked(state, "mlp.experts.", **options)
    ours = mnn.ExpertMLP(E, D, H, OUT, activation="swiglu", bias=bias)
    ours.load_state_dict(found)
    x, experts = torch.randn(T, D), torch.randint(E, (T,))
    y = ours(x, mk.make_plan(experts[:, None], E), None)
    for row, e, got in zip(x, experts, y, strict=True):
        pre = gate_up[e] @ row + (biases[0][e] if bias else 0)
        gate, up = (pre[::2], pre[1::2]) if interleaved else pre.chunk(2)
        torch.testing.assert_close(got, down[e] @ (F.silu(gate) * up) + (biases[1][e] if bias else 0))
    back = convert.to_stacked(found, "mlp.experts.", **options)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], state[key]) for key in state)


def linear():
    return nn.ModuleList(Mixtral(False) for _ in range(E)).state_dict()


def without(state, key):
    return {name: value for name, value in state.items() if name != key}


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: convert.from_linear({}, "a."), KeyError, "from_linear: expected keys a.0.w1.weight"),
        (lambda: convert.from_linear(without(linear(), "1.w2.weight")), KeyError, "1.w2.weight is missing"),
        (lambda: convert.from_linear(linear() | {"0.w4.weight": torch.ones(1)}), KeyError, "0.w4.weight is unknown"),
        (
            lambda: convert.from_linear(linear() | {"2.w1.weight": torch.ones(H, D + 1)}),
            ValueError,
            r"2.w1.weight must have the shape of expert 0, \(5, 6\); got \(5, 7\)",
        ),
        (
            lambda: convert.from_linear(linear() | {f"{e}.w2.weight": torch.ones(OUT, H + 1) for e in range(E)}),
            ValueError,
            r"0.w2.weight must be \(Dout, 5\) beside w1; got \(4, 6\)",
        ),
        (
            lambda: convert.from_linear(
                linear()
                | {f"{e}.{name}.bias": torch.ones(n) for e in range(E) for name, n in (("w1", H + 1), ("w3", H - 1))}
                | {f"{e}.w2.bias": torch.ones(OUT) for e in range(E)}
            ),
            ValueError,
            r"0.w1.bias must be \(5,\); got \(6,\)",
        ),
        (
            lambda: convert.from_linear(
                linear()
                | {f"{e}.{name}.bias": torch.ones(H) for e in range(E) for name in ("w1", "w3")}
                | {f"{e}.w2.bias": torch.ones(OUT + 1) for e in range(E)}
            ),
            ValueError,
            rf"^from_linear: b_out must be \({E}, {OUT}\), got \({E}, {OUT + 1}\)",
        ),
        (lambda: convert.from_linear(linear(), names="w1"), ValueError, "names must be"),
        (
            lambda: convert.to_linear(mnn.ExpertMLP(E, D, H).state_dict()),
            ValueError,
            "to_linear: w_in of gated experts must have 2 H = 10 columns, got 5",
        ),
        (
            lambda: convert.to_linear(
                mnn.ExpertMLP(E, D, H).state_dict() | {"b_out": torch.ones(E, D + 1)}, "", ("a", "b")
            ),
            ValueError,
            rf"to_linear: b_out must be \({E}, {D}\), got \({E}, {D + 1}\)",
        ),
        (lambda: convert.to_linear({"w_in": torch.ones(1)}), KeyError, "to_linear: w_out is missing"),
        (
            lambda: convert.to_linear(mnn.ExpertMLP(E, D, H, activation="swiglu").state_dict(), names=("a", "b")),
            ValueError,
            r"to_linear: names must be \(gate, up, down\) for the gated experts",
        ),
        (
            lambda: convert.from_stacked({"gate_up_proj": torch.ones(E, 8, D), "down_proj": torch.ones(E, D, H)}),
            ValueError,
            "from_stacked: expected w_in",
        ),
        (lambda: convert.from_stacked({"gate_up_proj": torch.ones(E, 8, D)}), KeyError, "down_proj is missing"),
        (
            lambda: convert.from_stacked(
                {"a.gate_up_proj": torch.ones(8, D), "a.down_proj": torch.ones(E, D, 4)}, "a."
            ),
            ValueError,
            r"^from_stacked: a\.gate_up_proj must have 3 dimensions, got shape \(8, 6\)$",
        ),
        (
            lambda: convert.from_stacked({"gate_up_proj": torch.ones(E, 8, D), "down_proj": torch.ones(1, E, D, 4)}),
            ValueError,
            r"^from_stacked: down_proj must have 3 dimensions, got shape \(1, 12, 6, 4\)$",
        ),
        (
            lambda: convert.from_stacked(
                {"up_proj": torch.ones(E, H, D), "down_proj": torch.ones(E, D, H)},
                names=("up_proj", "down_proj"),
                interleaved=True,
            ),
            ValueError,
            "from_stacked: w_in of gated experts must have 2 H = 10 columns, got 5",
        ),
        (
            lambda: convert.from_linear(linear() | {"0.w1.weight": torch.ones(1, H, D)}),
            ValueError,
            r"0.w1.weight must be 2-dimensional; got \(1, 5, 6\)",
        ),
        (lambda: convert.to_stacked({"w_in": torch.ones(1), "w_out": torch.ones(1)}), ValueError, "3 dimensions"),
        (
            lambda: convert.to_stacked({"w_in": torch.ones(1, 2, 4), "w_out": torch.ones(2, 2)}),
            ValueError,
            "w_out must have 3 dimensions",
        ),
    ],
)
def test_mismatched_layouts_are_errors(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_wrong_keys_are_told_beside_six_others():
    of_twelve = {f"a.{key}": value for key, value in without(linear(), "1.w2.weight").items()}
    first = ", ".join(f"a.{key}.weight" for key in ("0.w1", "0.w2", "0.w3", "1.w1", "1.w3", "10.w1"))
    of_two = nn.ModuleList(Mixtral(False) for _ in range(2)).state_dict()
    others = of_two | {"0.w4.weight": 0, "1.w0.weight": 0}
    for state, prefix, message in (
        (of_twelve, "a.", f"a.1.w2.weight is missing; got {first}, ..."),
        (others, "", f"0.w4.weight is unknown; expected {', '.join(sorted(of_two))}"),
    ):
        with pytest.raises(KeyError) as caught:
            convert.from_linear(state, prefix)
        assert caught.value.args == (f"from_linear: {message}",)
    with pytest.raises(KeyError, match=r"^'to_linear: w_in is missing; got no keys'$"):
        convert.to_linear({})
