"""The MLP of COMET fixed routing, section 4.2.1 and appendix A.1, and its dense twin."""

from __future__ import annotations

from typing import Any

import torch

from moe_kernels.nn.comet import CometMLP


def comet_mlp(
    inputs: int,
    width: int,
    classes: int,
    *,
    layers: int = 4,
    p: float = 0.5,
    activation: str = "softplus",
    ties: str = "index",
    backend: str | None = None,
    seed: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    kind: type[CometMLP] = CometMLP,
) -> CometMLP:
    """A CometMLP with `layers` linear layers, `width` neurons in each hidden one: (..., inputs) -> (..., classes).

    Args:
        seed: of the generator that draws backbone and routing; None: torch's own generator draws them.
        kind: CometMLP or a subclass of it.
        p, activation, ties, backend: as in CometMLP.

    The paper (A.1): 4 layers, widths 100, 500, 1000, 3000 and keep fractions 0.1, 0.5, 0.9; p = 1 is its "standard
    model". softplus is the default of a public fork of its code.
    """
    generator = None
    if seed is not None:
        generator = torch.Generator(device or torch.get_default_device()).manual_seed(seed)
    widths = (inputs, *[width] * (layers - 1), classes)
    options: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
    return kind(widths, p, activation=activation, ties=ties, backend=backend, **options)


def dense_twin(model: CometMLP) -> CometMLP:
    """A dense CometMLP (p = 1) with the weights of `model`."""
    options = {name: getattr(model, name) for name in ("activation", "bias", "ties", "backend")}
    twin = CometMLP(model.widths, 1.0, **options).to(model.output.weight)
    twin.load_state_dict(model.state_dict())
    return twin
