"""Measures MixtralExperts, a module of transformers, on our kernels and on transformers' own implementations.

Prefill is a forward pass of many tokens without gradients, decode one of few tokens. Training is a forward and a
backward pass, with gradients of tokens, gate weights and parameters.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import timing
from bench.entry import Shape, label
from moe_kernels.verify import dtype_name, threads

OURS = "moe_kernels"
PEERS = ("eager", "batched_mm", "grouped_mm")

# T tokens, model dim D, hidden dim H, E experts, K choices a token.
SHAPES: dict[str, tuple[torch.dtype, Shape]] = {
    "few wide experts": (torch.bfloat16, {"T": 2048, "D": 512, "H": 1024, "E": 8, "K": 2}),
    "many narrow experts": (torch.bfloat16, {"T": 2048, "D": 256, "H": 128, "E": 64, "K": 8}),
    "float32": (torch.float32, {"T": 512, "D": 256, "H": 512, "E": 8, "K": 2}),
}
DECODED = (1, 4, 16)  # tokens of a decode step, one for each sequence
MAX_COPIED_BYTES = 2**31  # of weights; batched_mm, which copies them for every choice, is skipped beyond it

Figure = dict[str, Any]


def missing() -> str:
    return "" if importlib.util.find_spec("transformers") else "transformers is not installed"


def run(budget: float, device: str) -> Iterator[Figure]:
    """A figure for every shape and mode, from `budget` seconds of samples on one CPU thread or on the GPU.

    us: median microseconds on our kernels. peers: how many times as fast our kernels are as each other implementation.
    """
    for name, (dtype, shape) in SHAPES.items():
        jobs = [
            ("prefill", shape),
            ("training", shape),
            *(("decode", {**shape, "T": tokens}) for tokens in DECODED),
        ]
        for mode, sizes in jobs:
            with threads(1):
                calls = _calls(sizes, dtype, device, mode)
                samples = timing.time_cpu(calls, budget) if device == "cpu" else timing.time_gpu(calls, 1, budget)
            ours = samples.pop(OURS).median
            peers = {peer: sample.median / ours for peer, sample in samples.items()}
            found = {"name": name, "mode": mode, "shape": label(sizes), "dtype": dtype_name(dtype)}
            yield {**found, "us": ours * 1e6, "peers": peers}


def _calls(shape: Shape, dtype: torch.dtype, device: str, mode: str) -> dict[str, Callable[[], object]]:
    """One call for each implementation, with the same module and inputs."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    from moe_kernels.integrations import transformers as mk_transformers

    mk_transformers.register(OURS)
    num_tokens, dim, hidden, num_experts, k = (shape[name] for name in "TDHEK")
    config = MixtralConfig(hidden_size=dim, intermediate_size=hidden, num_local_experts=num_experts)
    module = MixtralExperts(config).to(device, dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=dim**-0.5)
    trains = mode == "training"
    x = torch.randn(num_tokens, dim, device=device).to(dtype).requires_grad_(trains)
    scores, experts = torch.rand(num_tokens, num_experts, device=device).topk(k, dim=-1)
    weights = (scores / scores.sum(-1, keepdim=True)).to(dtype).requires_grad_(trains)
    grad = torch.randn_like(x)

    def call(implementation: str) -> Tensor:
        config._experts_implementation_internal = implementation
        if not trains:
            with torch.no_grad():
                return module(x, experts, weights)
        for leaf in (x, weights, *module.parameters()):
            leaf.grad = None
        y = module(x, experts, weights)
        y.backward(grad)
        return y

    copied = 3 * num_tokens * k * dim * hidden * dtype.itemsize
    names = [name for name in PEERS if name != "batched_mm" or copied <= MAX_COPIED_BYTES] + [OURS]
    return {name: partial(call, name) for name in names}
