"""Peers: implementations of operations in other packages, as functions `inputs -> output`.

The report lists peers that cannot run, with the reason. Peers made of PyTorch's operations are in Entry.peers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from bench.entry import Calls, Entry, Inputs, through_autograd
from moe_kernels.verify import dtype_name


@dataclass(frozen=True)
class Peer:
    """One implementation, which needs the package `module`.

    device: the only device type that the peer takes; empty: all. reason: why it cannot be compared on any machine.
    """

    name: str
    module: str
    forward: Callable[[Inputs], object] | None = None
    device: str = ""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    reason: str = ""

    def missing(self, device: str, dtype: torch.dtype) -> str:
        """The reason why the peer cannot run here; empty if it can."""
        if self.reason:
            return self.reason
        if self.device and self.device != device:
            return f"takes {self.device} tensors only"
        if dtype not in self.dtypes:
            return f"does not take {dtype_name(dtype)}"
        return "" if importlib.util.find_spec(self.module) else f"{self.module} is not installed"


PACKAGES: dict[str, list[Peer]] = {
    "sinkhorn": [Peer("flash-sinkhorn", "flash_sinkhorn", reason="takes point clouds, not a matrix of scores")],
    "expert_mlp": [
        Peer("sonic-moe", "sonicmoe", reason="its layer has its own router and takes no plan"),
        Peer("liger-kernel", "liger_kernel", reason="its experts use SwiGLU, those measured here use GELU"),
    ],
}


def peer(op: str, name: str, module: str, **more: object) -> Callable[[Callable[[Inputs], object]], object]:
    """Decorator: registers a function as a peer of `op`. more: other fields of Peer."""

    def register(forward: Callable[[Inputs], object]) -> Callable[[Inputs], object]:
        PACKAGES.setdefault(op, []).append(Peer(name, module, forward, **more))  # type: ignore[arg-type]
        return forward

    return register


def available(
    op: str, entry: Entry, device: str, dtype: torch.dtype, wanted: Iterable[str] | None = None
) -> tuple[dict[str, Calls], dict[str, str]]:
    """The calls of the peers of `op` that can run here, and the reasons why others cannot, both by name of the peer.

    wanted: parts of names, such as "torch" or "pot"; None: all peers; empty: none.
    """
    chosen = None if wanted is None else [part.lower() for part in wanted]

    def is_wanted(name: str) -> bool:
        return chosen is None or any(part in name.lower() for part in chosen)

    calls = {name: each for name, each in entry.peers.items() if is_wanted(name)}
    missing = {}
    for each in PACKAGES.get(op, []):
        if not is_wanted(each.name):
            continue
        reason = each.missing(device, dtype)
        if reason or each.forward is None:
            missing[each.name] = reason
            continue
        calls[each.name] = through_autograd(each.forward, entry.leaves, entry.grad)
    return calls, missing


def known(entries: dict[str, Entry]) -> set[str]:
    own = {name for entry in entries.values() for name in entry.peers}
    return own | {each.name for packages in PACKAGES.values() for each in packages}


@peer("sinkhorn", "POT", "ot", dtypes=(torch.float32,))
def _pot(inputs: Inputs) -> object:
    from ot.batch import bregman_log_projection_batch

    log_k = inputs["scores"] / inputs["tau"]
    options = {"max_iter": inputs["iterations"], "tol": 0.0, "grad": "autodiff"}
    return (
        bregman_log_projection_batch(log_k, **options)["T"] * log_k.shape[-1]
    )  # in POT's result rows and columns sum to 1 / n


@peer("dispatch", "megablocks gather", "megablocks", device="cuda")
def _megablocks_gather(inputs: Inputs) -> object:
    from megablocks import ops

    offsets = inputs["plan"].expert_offsets[1:]
    return ops.gather(inputs["x"], inputs["row_slot"], inputs["row_expert"], offsets, inputs["k"])


@peer("combine", "megablocks scatter", "megablocks", device="cuda")
def _megablocks_scatter(inputs: Inputs) -> object:
    from megablocks import ops

    weights, offsets = inputs["weights"].flatten(), inputs["plan"].expert_offsets[1:]
    slots, experts = inputs["row_slot"], inputs["row_expert"]
    return ops.scatter(inputs["rows"], slots, experts, weights, offsets, inputs["k"])
