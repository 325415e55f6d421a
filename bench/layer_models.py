"""Sizes of a layer of experts: of models by name, and from the configuration file of a transformers model."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.shapes import LLM
from moe_kernels.ops.topk_gate import ORDERS


@dataclass(frozen=True)
class Sizes:
    """T tokens, model dim D, hidden dim H, E experts, K choices a token; activation as in nn's layers.

    router: an order of topk_gate, or "sigmoid": sigmoid scores with a balance bias, renormalised. groups: with
    "sigmoid" those of topk_gate.
    """

    tokens: int = 2048
    dim: int = 256
    hidden: int = 512
    experts: int = 16
    k: int = 2
    activation: str = "gelu"
    router: str = "topk_softmax"
    bias: bool = True
    groups: tuple[int, int] | None = None

    @property
    def rule(self) -> dict[str, Any]:
        """Arguments of topk_gate, but the bias, and of TopKGate."""
        if self.router != "sigmoid":
            return {"order": self.router}
        return {"scores": "sigmoid", "groups": self.groups, "renormalise": True}


ROUTERS = (*ORDERS, "sigmoid")

# Activation, router, whether experts and router have biases, and groups.
_KINDS: dict[str, tuple[Any, ...]] = {
    "OLMoE": ("swiglu", "softmax_topk", False),
    "Qwen3-30B": ("swiglu", "topk_softmax", False),
    "Qwen3-235B": ("swiglu", "topk_softmax", False),
    "Mixtral": ("swiglu", "topk_softmax", False),
    "DeepSeek-V3": ("swiglu", "sigmoid", False, (8, 4)),
    "gpt-oss": ("swiglu_clamped", "topk_softmax", True),
}
MODELS = {name: Sizes(*LLM[name], *kind) for name, kind in _KINDS.items()}

# Names of a size in configurations of transformers models, the first that is there counts.
_NAMES = {
    "dim": ("hidden_size", "d_model", "n_embd"),
    "hidden": ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_dim"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "k": ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k"),
}
_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu", "relu": "relu"}


def of_model(name: str) -> Sizes:
    """The sizes of a known model or of a configuration file.

    Raises:
        ValueError: the name is unknown, or the file is missing, no JSON object, or lacks a size.
    """
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"--model must be one of {', '.join(MODELS)} or a transformers config.json; got {name!r}")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"--model: {path} is no JSON ({error})") from None
    if not isinstance(config, dict):
        raise ValueError(f"--model: {path} must hold a JSON object, got {type(config).__name__}")
    return _of_config(config.get("text_config") or config, path)


def _of_config(config: dict[str, Any], path: Path) -> Sizes:
    found: dict[str, Any] = {}
    for size, names in _NAMES.items():
        value = next((config[name] for name in names if config.get(name) is not None), None)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"--model: {path} must give {size} as a positive int, as one of {', '.join(names)}")
        found[size] = value
    clamped = "swiglu_limit" in config or config.get("model_type") == "gpt_oss"
    act = str(config.get("hidden_act", "silu"))
    activation = "swiglu_clamped" if clamped else _ACTIVATIONS.get(act)
    if activation is None:
        known = ", ".join(_ACTIVATIONS)
        raise ValueError(f"--model: {path} has hidden_act {act!r}, not one of {known}: give --activation")
    router = "topk_softmax" if config.get("norm_topk_prob", True) else "softmax_topk"
    groups = None
    if config.get("scoring_func") == "sigmoid" or config.get("n_group") is not None:  # DeepSeek-V3's and GLM's
        router, groups = "sigmoid", (config.get("n_group") or 1, config.get("topk_group") or 1)
    return replace(Sizes(), **found, tokens=8192, activation=activation, router=router, bias=clamped, groups=groups)
