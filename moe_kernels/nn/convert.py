"""Converts the state dict of an ExpertMLP from and to two layouts: nn.Linear of single experts, or stacked tensors.

    ExpertMLP  w_in (E, D, H or 2 H), b_in (E, H or 2 H), w_out (E, H, Dout), b_out (E, Dout)
    linear     {e}.w1.weight (H, D), {e}.w3.weight (H, D), {e}.w2.weight (Dout, H), as Mixtral's; biases, if any
    stacked    gate_up_proj (E, 2 H, D), down_proj (E, Dout, H), as in transformers 5; biases, if any, end in "_bias"

    layer.experts.load_state_dict(from_linear(checkpoint, "model.layers.0.block_sparse_moe.experts."))

w1 is the gate, w3 up, w2 down. The 2 H columns of w_in are those of the gate, then those of up, as the activations
"swiglu" and "geglu" read them. "swiglu_clamped" reads alternating columns, as gpt_oss stores them: from_stacked with
interleaved=False keeps them so.

The functions from_* read the keys that begin with `prefix`; the functions to_* put `prefix` before their keys. All
return new contiguous tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

State = Mapping[str, Tensor]
MIXTRAL = ("w1", "w3", "w2")
OURS = ("w_in", "w_out", "b_in", "b_out")


def from_linear(state: State, prefix: str = "", names: Sequence[str] = MIXTRAL) -> dict[str, Tensor]:
    """The state dict of an ExpertMLP, from nn.Linear layers: keys prefix + "{e}.{name}.weight" and, if any, ".bias".

    Args:
        names: (gate, up, down) of gated experts, as Mixtral's, or (in, out) of others.

    Raises:
        KeyError: there is no expert, one before the last or a layer is missing, or a key is unknown.
        ValueError: tensors do not fit each other, or `names` does not have 2 or 3 entries.

    Example:
        >>> state = convert.to_linear(ExpertMLP(2, 4, 8, activation="swiglu", bias=False).state_dict())
        >>> {name: tuple(each.shape) for name, each in convert.from_linear(state).items()}
        {'w_in': (2, 4, 16), 'w_out': (2, 8, 4)}
    """
    names = _names("from_linear", names)
    tensors = _without_prefix(state, prefix)
    count = 1 + max((int(key.split(".")[0]) for key in tensors if key.split(".")[0].isdecimal()), default=-1)
    if not count:
        raise KeyError(f"from_linear: expected keys {prefix}0.{names[0]}.weight, ...; got {_first_keys(state, '')}")
    kinds = ("weight", "bias") if f"0.{names[0]}.bias" in tensors else ("weight",)
    expected_keys = {f"{e}.{name}.{kind}" for e in range(count) for name in names for kind in kinds}
    _check_keys("from_linear", expected_keys, set(tensors), prefix)

    def stack(name: str, kind: str) -> Tensor:
        each = [tensors[f"{e}.{name}.{kind}"] for e in range(count)]
        rank = 2 if kind == "weight" else 1
        for e, value in enumerate(each):
            if value.dim() != rank or value.shape != each[0].shape:
                expected = f"have the shape of expert 0, {tuple(each[0].shape)}" if e else f"be {rank}-dimensional"
                got = f"{prefix}{e}.{name}.{kind} must {expected}; got {tuple(value.shape)}"
                raise ValueError(f"from_linear: {got}")
        return torch.stack(each)

    weights = [stack(name, "weight") for name in names]
    hidden, dim = weights[0].shape[1:]
    for name, weight in zip(names[1:], weights[1:], strict=True):
        fits = weight.shape[2] == hidden if name == names[-1] else weight.shape[1:] == (hidden, dim)
        if not fits:
            expected = f"(Dout, {hidden})" if name == names[-1] else f"({hidden}, {dim})"
            got = tuple(weight.shape[1:])
            raise ValueError(f"from_linear: {prefix}0.{name}.weight must be {expected} beside {names[0]}; got {got}")
    found = {"w_in": torch.cat(weights[:-1], 1).mT.contiguous(), "w_out": weights[-1].mT.contiguous()}
    if "bias" in kinds:
        *inner, outer = (stack(name, "bias") for name in names)
        for name, bias in zip(names, inner, strict=False):
            if bias.shape[1] != hidden:
                expected = f"{prefix}0.{name}.bias must be ({hidden},)"
                raise ValueError(f"from_linear: {expected}; got {tuple(bias.shape[1:])}")
        found |= {"b_in": torch.cat(inner, 1), "b_out": outer}
        _check_shapes("from_linear", found)
    return found


def to_linear(state: State, prefix: str = "", names: Sequence[str] = MIXTRAL) -> dict[str, Tensor]:
    """The inverse of `from_linear`: the state dict of an ExpertMLP -> keys prefix + "{e}.{name}.weight" and ".bias".

    Raises KeyError for missing or unknown keys, ValueError for tensors that do not fit each other or `names`.

    Example:
        >>> sorted(convert.to_linear(ExpertMLP(1, 4, 8, activation="swiglu", bias=False).state_dict()))
        ['0.w1.weight', '0.w2.weight', '0.w3.weight']
    """
    names = _names("to_linear", names)
    _check("to_linear", state, gated=len(names) == 3)
    if len(names) == 2 and state["w_in"].shape[2] != state["w_out"].shape[1]:
        raise ValueError(f"to_linear: names must be (gate, up, down) for the gated experts of this state; got {names}")
    found = {}
    for kind, inner, outer in (("weight", "w_in", "w_out"), ("bias", "b_in", "b_out")):
        if inner in state:
            parts = [*state[inner].chunk(len(names) - 1, -1), state[outer]]
            for name, part in zip(names, parts, strict=True):
                for e, each in enumerate(part):
                    found[f"{prefix}{e}.{name}.{kind}"] = (each.t() if kind == "weight" else each).clone(
                        memory_format=torch.contiguous_format
                    )
    return found


def from_stacked(
    state: State,
    prefix: str = "",
    names: Sequence[str] = ("gate_up_proj", "down_proj"),
    *,
    transposed: bool = False,
    interleaved: bool = False,
) -> dict[str, Tensor]:
    """The state dict of an ExpertMLP, from gate_up_proj (E, 2 H, D), down_proj (E, Dout, H) and, if any, their biases.

    Args:
        names: names of the two weights; ("up_proj", "down_proj") for experts without a gate. A bias is name + "_bias".
        transposed: gate_up_proj is (E, D, 2 H) and down_proj (E, H, Dout), as in Llama 4 and gpt_oss.
        interleaved: gate and up alternate along the dimension of size 2 H, as in gpt_oss; they become gate, then up.

    Raises KeyError for missing or unknown keys, ValueError for tensors that do not fit each other.

    Example:
        >>> state = {"gate_up_proj": torch.randn(2, 16, 4), "down_proj": torch.randn(2, 4, 8)}
        >>> ExpertMLP(2, 4, 8, activation="swiglu", bias=False).load_state_dict(convert.from_stacked(state))
        <All keys matched successfully>
    """
    inner, outer = names
    tensors = _without_prefix(state, prefix)
    biases = {f"{inner}_bias", f"{outer}_bias"}
    biased = not biases.isdisjoint(tensors)
    _check_keys("from_stacked", {inner, outer} | (biases if biased else set()), set(tensors), prefix)
    found = {"w_in": tensors[inner], "w_out": tensors[outer]}
    for name, value in zip((inner, outer), found.values(), strict=True):
        if value.dim() != 3:
            raise ValueError(f"from_stacked: {prefix}{name} must have 3 dimensions, got shape {tuple(value.shape)}")
    if not transposed:
        found = {name: value.mT for name, value in found.items()}
    if biased:
        found |= {"b_in": tensors[f"{inner}_bias"], "b_out": tensors[f"{outer}_bias"]}
    _check_shapes("from_stacked", found)
    if interleaved:
        _check_gated("from_stacked", found)
        found |= {name: _deinterleave(found[name]) for name in ("w_in", "b_in") if name in found}
    return {name: value.clone(memory_format=torch.contiguous_format) for name, value in found.items()}


def to_stacked(
    state: State,
    prefix: str = "",
    names: Sequence[str] = ("gate_up_proj", "down_proj"),
    *,
    transposed: bool = False,
    interleaved: bool = False,
) -> dict[str, Tensor]:
    """The inverse of `from_stacked`, with the same arguments and errors.

    Example:
        >>> state = ExpertMLP(2, 4, 8, activation="swiglu", bias=False).state_dict()
        >>> {name: tuple(each.shape) for name, each in convert.to_stacked(state).items()}
        {'gate_up_proj': (2, 16, 4), 'down_proj': (2, 4, 8)}
    """
    inner, outer = names
    _check("to_stacked", state, gated=interleaved)
    found = {inner: state["w_in"], outer: state["w_out"]}
    if "b_in" in state:
        found |= {f"{inner}_bias": state["b_in"], f"{outer}_bias": state["b_out"]}
    if interleaved:
        found |= {name: _interleave(found[name]) for name in (inner, f"{inner}_bias") if name in found}
    if not transposed:
        found |= {name: found[name].mT for name in names}
    return {prefix + name: value.clone(memory_format=torch.contiguous_format) for name, value in found.items()}


def _without_prefix(state: State, prefix: str) -> dict[str, Tensor]:
    return {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}


def _deinterleave(columns: Tensor) -> Tensor:
    """(..., 2 H), alternating columns of gate and up -> all of gate, then all of up."""
    return torch.cat([columns[..., ::2], columns[..., 1::2]], -1)


def _interleave(columns: Tensor) -> Tensor:
    return torch.stack(columns.chunk(2, -1), -1).flatten(-2)


def _names(function: str, names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str) or len(names) not in (2, 3):
        raise ValueError(f"{function}: names must be (gate, up, down) or (in, out), got {names!r}")
    return tuple(names)


def _check_keys(function: str, expected: set[str], got: set[str], prefix: str) -> None:
    if missing := expected - got:
        raise KeyError(f"{function}: {prefix}{min(missing)} is missing; got {_first_keys(got, prefix)}")
    if unknown := got - expected:
        raise KeyError(f"{function}: {prefix}{min(unknown)} is unknown; expected {_first_keys(expected, prefix)}")


def _first_keys(keys: Iterable[str], prefix: str) -> str:
    names = [prefix + key for key in sorted(keys)]
    return ", ".join(names[:6] + ["..."] * (len(names) > 6)) or "no keys"


def _check(function: str, state: State, gated: bool) -> None:
    """Raises unless the state is an ExpertMLP's, and w_in has 2 H columns if `gated`."""
    _check_keys(function, set(OURS if {"b_in", "b_out"} & set(state) else OURS[:2]), set(state), "")
    for name in OURS[:2]:
        if state[name].dim() != 3:
            raise ValueError(f"{function}: {name} must have 3 dimensions, got shape {tuple(state[name].shape)}")
    _check_shapes(function, state)
    if gated:
        _check_gated(function, state)


def _check_gated(function: str, state: State) -> None:
    expected, got = 2 * state["w_out"].shape[1], state["w_in"].shape[2]
    if got != expected:
        raise ValueError(f"{function}: w_in of gated experts must have 2 H = {expected} columns, got {got}")


def _check_shapes(function: str, state: State) -> None:
    """Raises unless w_in (E, D, H or 2 H), w_out (E, H, Dout) and the biases agree in E, H and Dout."""
    (experts, _, columns), (experts_out, hidden, out) = state["w_in"].shape, state["w_out"].shape
    if experts_out != experts or columns not in (hidden, 2 * hidden):
        raise ValueError(
            f"{function}: expected w_in (E, D, H or 2 H) and w_out (E, H, Dout), got {tuple(state['w_in'].shape)} and "
            f"{tuple(state['w_out'].shape)}"
        )
    for name, shape in (("b_in", (experts, columns)), ("b_out", (experts, out))):
        if name in state and state[name].shape != shape:
            raise ValueError(f"{function}: {name} must be {shape}, got {tuple(state[name].shape)}")
