"""Recording and replaying the experts that gates choose, by the names of modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from moe_kernels.nn._replay import Recording, Replay, Routes
from moe_kernels.nn.gates.gate import Gate
from moe_kernels.nn.gates.topk import TopKGate
from moe_kernels.ops._checks import check_module
from moe_kernels.ops.topk_gate import RECORDED


@contextmanager
def record_routing(model: nn.Module) -> Iterator[Routes]:
    """Records the experts that every TopKGate of the model chooses in the block.

    Yields a dict, filled as gates run: the module's name -> (T, K), the gate's choice before the policy, int16 (int32
    above 32767 experts) on the gate's device, -1 in rows that are masked. If a gate runs more than once, its entry
    is a list in the order of calls. Names are those of model.named_modules() without prefixes of wrappers
    (`_orig_mod.`, `module.`, `_checkpoint_wrapped_module.`, `base_model.model.`); a gate in a Router of
    integrations.transformers has the Router's name. A forward that torch.utils.checkpoint repeats is not recorded
    again.

    Raises:
        TypeError: the model has other gates, which have no such choice, or none.
        ValueError: two gates have the same name without prefixes.

    Example:
        >>> model = MoE(TopKGate(16, 4, 2), ExpertMLP(4, 16, 32))
        >>> x = torch.randn(8, 16)
        >>> with record_routing(model) as routes:
        ...     y = model(x).y
        >>> {name: (choices.shape, choices.dtype) for name, choices in routes.items()}
        {'gate': (torch.Size([8, 2]), torch.int16)}
        >>> with replay_routing(model, routes):
        ...     torch.equal(model(x).y, y)
        True
    """
    gates = _gates("record_routing", model)
    routes: Routes = {}
    before = {name: gate.recording for name, gate in gates.items()}
    try:
        for name, gate in gates.items():
            gate.recording = Recording(routes, name, gate.num_experts)
        yield routes
    finally:
        for name, gate in gates.items():
            gate.recording = before[name]


@contextmanager
def replay_routing(model: nn.Module, routes: Mapping[str, Tensor | Sequence[Tensor]]) -> Iterator[None]:
    """In the block every TopKGate of the model chooses the experts of its record; weights come from live logits.

    An element of -1 is filled with the token's best expert that is not recorded; masked rows stay masked. Where a
    record is a list, each call of the gate takes the next element. A record on another device is copied to that of the
    gate at each call.

    Gradients are those of topk_gate's `forced`: exact through the weights. A backward that repeats forwards
    (torch.utils.checkpoint) belongs inside the block; outside it raises RuntimeError.

    Args:
        model: a model with the names of modules and numbers of choices of the recorded one, wrapped or not.
        routes: the dict of record_routing.

    Raises:
        TypeError: the model has other gates than TopKGate, or none; a record is no integer tensor.
        ValueError: names, numbers of choices or, when a gate runs, numbers of tokens do not fit; a gate runs more often
            than it was recorded.

    Example:
        >>> gate = TopKGate(16, 4, 2)
        >>> with replay_routing(gate, {"": torch.tensor([[3, 0], [2, 1]])}):
        ...     gate(torch.randn(2, 16)).experts
        tensor([[3, 0],
                [2, 1]], dtype=torch.int32)
    """
    gates = _gates("replay_routing", model)
    replays = _replays(gates, routes)
    before = {name: gate.replay for name, gate in gates.items()}
    try:
        for name, gate in gates.items():
            gate.replay = replays[name]
        yield
    finally:
        for name, gate in gates.items():
            replays[name].end()
            # An ended replay stays: it refuses to repeat forwards that began in the block.
            outer = before[name]
            gate.replay = replays[name] if outer is None or outer.ended else outer


def _replays(gates: dict[str, TopKGate], routes: Mapping[str, Any]) -> dict[str, Replay]:
    missing, unknown = sorted(gates.keys() - routes.keys()), sorted(routes.keys() - gates.keys())
    if missing or unknown:
        raise ValueError(
            "replay_routing: the routes must have the names of the model's gates; "
            f"missing: {', '.join(map(repr, missing)) or 'none'}; unknown: {', '.join(map(repr, unknown)) or 'none'}"
        )
    replays, wrong = {}, []
    for name, gate in gates.items():
        entries = [routes[name]] if isinstance(routes[name], Tensor) else list(routes[name])
        for each in entries:
            if not isinstance(each, Tensor) or each.dtype not in RECORDED:
                kind = each.dtype if isinstance(each, Tensor) else type(each).__name__
                raise TypeError(f"replay_routing: the record of {name!r} must be int16, int32 or int64; got {kind}")
            if each.dim() != 2 or each.shape[1] != gate.k:
                wrong.append(f"{name!r} has {tuple(each.shape)}, expected (T, {gate.k})")
        replays[name] = Replay(name, entries)
    if wrong:
        raise ValueError(f"replay_routing: records must fit the gates: {'; '.join(wrong)}")
    return replays


def _gates(op: str, model: nn.Module) -> dict[str, TopKGate]:
    """The TopKGates of the model by name; raises TypeError if there are none, or other gates outside of them."""
    check_module(op, "model", model, nn.Module)
    named, others, inside = list[tuple[str, TopKGate]](), [], set[nn.Module]()
    for name, module in model.named_modules():
        held = getattr(module, "gate", None)
        if getattr(module, "names_its_gate", False) and isinstance(held, TopKGate):
            named.append((unwrapped(name), held))
            inside |= set(held.modules())
    for name, module in model.named_modules():
        if not isinstance(module, Gate) or module in inside:
            continue
        inside |= set(module.modules())
        if isinstance(module, TopKGate):
            named.append((unwrapped(name), module))
        else:
            others.append(f"{unwrapped(name)!r} ({type(module).__name__})")
    if others:
        raise TypeError(f"{op}: only TopKGate can be recorded and replayed; the model has {', '.join(others)}")
    gates = dict(named)
    if len(gates) < len(named):
        twice = sorted({name for name, gate in named if gates[name] is not gate})
        raise ValueError(f"{op}: gates must have names of their own without prefixes of wrappers; twice: {twice}")
    if not gates:
        raise TypeError(
            f"{op}: expected a model with gates of the class TopKGate, found none in {type(model).__name__}"
        )
    return gates


def unwrapped(name: str) -> str:
    """A module's name without what torch.compile, checkpoint_wrapper and, at the front, DDP, PEFT and the like add."""
    parts = [each for each in name.split(".") if each not in ("_orig_mod", "_checkpoint_wrapped_module")]
    while parts[:1] == ["module"] or parts[:2] == ["base_model", "model"]:
        parts = parts[1:] if parts[0] == "module" else parts[2:]
    return ".".join(parts)
