"""Measures MixtralExperts, a module of transformers, on our kernels and on transformers' own implementations.

Prefill is a forward pass of many tokens without gradients, decode one of few tokens. Training is a forward and a
backward pass, with gradients of tokens, gate weights and parameters.
"""

from __future__ import annotations

import csv
import importlib.util
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import ledger, timing
from bench.entry import Shape, label
from moe_kernels import info
from moe_kernels.verify import dtype_name, threads

OURS = "moe_kernels"
PEERS = ("eager", "batched_mm", "grouped_mm")

# T tokens, model dim D, hidden dim H, E experts, K choices a token.
SHAPES: dict[str, tuple[torch.dtype, Shape]] = {
    "few wide experts": (torch.bfloat16, {"T": 2048, "D": 512, "H": 1024, "E": 8, "K": 2}),
    "many narrow experts": (torch.bfloat16, {"T": 2048, "D": 256, "H": 128, "E": 64, "K": 8}),
    "float32": (torch.float32, {"T": 512, "D": 256, "H": 512, "E": 8, "K": 2}),
}
# Only on a GPU: one call would take a CPU minutes.
GPU_SHAPES: dict[str, tuple[torch.dtype, Shape]] = {
    "as Mixtral 8x7B": (torch.bfloat16, {"T": 8192, "D": 4096, "H": 14336, "E": 8, "K": 2}),
    "as Qwen3-30B-A3B": (torch.bfloat16, {"T": 8192, "D": 2048, "H": 768, "E": 128, "K": 8}),
}
DECODED = (1, 4, 16)  # tokens of a decode step, one for each sequence
MAX_COPIED_BYTES = 2**31  # of weights; batched_mm, which copies them for every choice, is skipped beyond it

Figure = dict[str, Any]
Calls = dict[str, Callable[[], object]]  # by implementation

RATIOS = tuple(f"x as fast as {peer}" for peer in PEERS)
HEADER = ("experts", "mode", "shape", "dtype", "us", *RATIOS, "not measured", "device", "transformers", "torch")


class Failed(Exception):
    """A call raised an exception; args: the name of its implementation and the reason."""


def missing() -> str:
    """Why nothing can be measured here; empty if something can."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed: pip install transformers"
    try:
        importlib.import_module("moe_kernels.integrations.transformers")
    except ImportError as error:
        return str(error)
    return ""


def jobs(device: str) -> Iterator[tuple[str, str, torch.dtype, Shape]]:
    """(name of the shape, mode, dtype, sizes) of every figure."""
    for name, (dtype, shape) in (SHAPES | (GPU_SHAPES if device == "cuda" else {})).items():
        yield name, "prefill", dtype, shape
        yield name, "training", dtype, shape
        for tokens in DECODED:
            yield name, "decode", dtype, {**shape, "T": tokens}


def run(budget: float, device: str) -> Iterator[Figure]:
    """A figure for every shape and mode, from `budget` seconds of samples on one CPU thread or on the GPU.

    us: median microseconds on our kernels, None if they failed. peers: how many times as fast our kernels are as each
    other implementation. left_out: by name, the reason why an implementation has no figure.
    """
    for name, mode, dtype, shape in jobs(device):
        figure: Figure = {"name": name, "mode": mode, "shape": label(shape), "dtype": dtype_name(dtype)}
        figure |= {"us": None, "peers": {}, "left_out": {}}
        try:
            with threads(1):
                calls, figure["left_out"] = _calls(shape, dtype, device, mode)
                samples = _samples(calls, budget, device, figure["left_out"])
        except Failed as failure:
            figure["left_out"][OURS] = failure.args[1]
        except Exception as error:  # of building the module or its inputs, or of taking times
            figure["left_out"][OURS] = _reason(error)
        else:
            ours = samples.pop(OURS).median
            figure |= {"us": ours * 1e6, "peers": {peer: sample.median / ours for peer, sample in samples.items()}}
        yield figure


def _samples(calls: Calls, budget: float, device: str, left_out: dict[str, str]) -> dict[str, timing.Sample]:
    """Samples of all calls but the peers that raise, whose reasons are added to `left_out`.

    Raises:
        Failed: our own call raised.
    """
    calls = dict(calls)
    while True:
        try:
            named: Calls = {name: partial(_named, name, call) for name, call in calls.items()}
            if device == "cpu":
                return timing.time_cpu(named, budget)
            for name, call in calls.items():  # warms up, and shows an error in a kernel beside the call it comes from
                _named(name, call)
                _named(name, torch.cuda.synchronize)
            return timing.time_gpu(named, 1, budget)
        except Failed as failure:
            name, reason = failure.args
            if name == OURS:
                raise
            left_out[name] = reason
            del calls[name]


def _named(name: str, call: Callable[[], object]) -> object:
    try:
        return call()
    except Exception as error:
        raise Failed(name, _reason(error)) from error


def _reason(error: Exception) -> str:
    first_line = (str(error).strip().splitlines() or [""])[0]
    return textwrap.shorten(f"{type(error).__name__}: {first_line}", 200, placeholder=" ...")


def _calls(shape: Shape, dtype: torch.dtype, device: str, mode: str) -> tuple[Calls, dict[str, str]]:
    """One call for each implementation, with the same module and inputs; the reasons why some have none."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    from moe_kernels.integrations import transformers as mk_transformers

    mk_transformers.register(OURS)
    num_tokens, dim, hidden, num_experts, k = (shape[name] for name in "TDHEK")
    config = MixtralConfig(hidden_size=dim, intermediate_size=hidden, num_local_experts=num_experts)
    with torch.device("meta"):  # no copy in float32, nor one on the CPU
        module = MixtralExperts(config).to(dtype)
    module.to_empty(device=device)
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

    calls: Calls = {name: partial(call, name) for name in (*PEERS, OURS)}
    copied = 3 * num_tokens * k * dim * hidden * dtype.itemsize
    if copied <= MAX_COPIED_BYTES:
        return calls, {}
    del calls["batched_mm"]
    return calls, {"batched_mm": f"would copy {copied / 1e9:.3g} GB of weights, limit {MAX_COPIED_BYTES / 1e9:.3g} GB"}


def new_file(out: Path) -> Path:
    """A new CSV file in `out` with the header alone."""
    path = ledger.free_path(out, "transformers", ".csv")
    _append(path, HEADER)
    return path


def append(path: Path, figure: Figure, machine: tuple[str, ...]) -> None:
    """Adds a line to the file, which is closed after it: a run that is cut off leaves what it has measured."""
    _append(path, (*cells(figure), _left_out(figure), *machine))


def _append(path: Path, row: tuple[str, ...]) -> None:
    with path.open("a", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerow(row)


def machine(device: str) -> tuple[str, str, str]:
    """The GPU or the CPU, and the versions of transformers and torch."""
    from transformers import __version__ as version

    return torch.cuda.get_device_name() if device == "cuda" else info.cpu_model(), version, str(torch.__version__)


def cells(figure: Figure) -> tuple[str, ...]:
    """Name, mode, shape, dtype, microseconds on our kernels and the ratio to every peer, as in HEADER."""
    us = "failed" if figure["us"] is None else f"{figure['us']:.1f}"
    ratios = (figure["peers"].get(peer) for peer in PEERS)
    names = (figure[name] for name in ("name", "mode", "shape", "dtype"))
    return (*names, us, *("-" if ratio is None else f"{ratio:.3g}" for ratio in ratios))


def line(figure: Figure) -> str:
    """The figure as a line of text."""
    what = ", ".join(figure[name] for name in ("name", "mode", "shape", "dtype"))
    us = "failed" if figure["us"] is None else f"{figure['us']:.1f} us"
    ratios = ", ".join(f"{ratio:.3g} x as fast as {peer}" for peer, ratio in figure["peers"].items())
    return "; ".join(part for part in (f"{what}: {us}", ratios, _left_out(figure)) if part)


def _left_out(figure: Figure) -> str:
    return "; ".join(f"no {name}: {reason}" for name, reason in figure["left_out"].items())
