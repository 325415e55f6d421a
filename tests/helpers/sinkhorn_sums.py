"""sinkhorn and its gradients on a target and by the definition."""

from __future__ import annotations

import torch

import moe_kernels as mk
from tests.helpers.targets import Target


def both(
    target: Target, leaves: dict, grad: torch.Tensor, iterations: int, place=torch.clone, place_grad=None, **settings
):
    """(p, *gradients) on the target, then by the definition in float64. `place` and `place_grad` copy the target's
    scores and grad into another memory layout."""
    found = []
    for backend, dtype in ((target.backend, torch.float32), ("reference", torch.float64)):
        put, put_grad = (place, place_grad or place) if backend == target.backend else (torch.clone, torch.clone)
        given = {name: each.to(target.device, dtype) for name, each in leaves.items()}
        given["scores"] = put(given["scores"])
        given = {name: each.requires_grad_() for name, each in given.items()}
        p = mk.sinkhorn(iterations=iterations, backend=backend, **given, **settings)
        to = torch.autograd.grad(p, list(given.values()), put_grad(grad.to(target.device, dtype)))
        found.append((p.detach().cpu(), *(each.cpu() for each in to)))
    return found


def assert_same(found, what: object, atol: float = 2e-6) -> None:
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=atol, msg=lambda m: f"{what}: {m}")
