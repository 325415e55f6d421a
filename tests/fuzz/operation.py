"""The fuzzer's entry of an operation."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.values import Spec

Inputs = dict[str, Any]
Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Fuzzed:
    """One operation.

    draw(draw): a spec without op, on, dtype and seed. build(spec): the inputs. run(inputs, backend): outputs by name,
    gradients among them. kernels: the operation's name for backends, "" if it has no kernel. exact: outputs that must
    be the reference's elements. floor: as of moe_kernels.verify, in epsilons. dtypes: those that are drawn. fits(spec):
    whether a simplified spec is still one of the operation's. loose(spec): a
    factor of the floor. weight: how often it is drawn.
    """

    draw: Callable[[random.Random], Spec]
    build: Callable[[Spec], Inputs]
    run: Callable[[Inputs, str], Outputs]
    kernels: str
    exact: frozenset[str] = frozenset()
    floor: float = 0.0
    loose: Callable[[Spec], float] = lambda spec: 1.0
    dtypes: tuple[str, ...] = ("float32", "float32", "bfloat16", "float16", "float64")
    fits: Callable[[Spec], bool] = lambda spec: True
    weight: int = 1


def differentiated(
    call: Callable[..., Any], inputs: Inputs, leaves: tuple[str, ...], names: tuple[str, ...], **fixed: Any
) -> Outputs:
    """Outputs of call(**inputs, **fixed) by `names` and the gradients of its tensors `leaves`, as "d" and the name.

    Inputs whose name begins with "grad" are the gradients of the outputs in order, and no arguments.
    """
    leaf = {name: inputs[name].detach().requires_grad_() for name in leaves if inputs.get(name) is not None}
    given = {name: value for name, value in inputs.items() if not name.startswith("grad")}
    found = call(**(given | leaf), **fixed)
    outputs = dict(zip(names, found if isinstance(found, tuple) else (found,), strict=True))
    grads = [inputs[name] for name in sorted(inputs) if name.startswith("grad")]
    roots = [each for each in outputs.values() if each.requires_grad]
    if roots and leaf:
        gradients = torch.autograd.grad(roots, list(leaf.values()), grads[: len(roots)], allow_unused=True)
        pairs = zip(leaf, gradients, strict=True)
        outputs |= {f"d{name}": torch.zeros_like(leaf[name]) if each is None else each for name, each in pairs}
    return {name: each.detach() for name, each in outputs.items()}
