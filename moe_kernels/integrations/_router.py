"""Routers of moe_kernels in models of transformers: their losses, and the padding that they must not count."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from moe_kernels.nn._mask import call_with_mask, check_mask
from moe_kernels.nn._recompute import Remembered, is_recomputing
from moe_kernels.nn.gates.gate import Gate, GateOutput
from moe_kernels.nn.gates.topk import TopKGate
from moe_kernels.nn.policies import TokenChoice

try:  # where transformers collects what models record; older versions do it elsewhere
    from transformers.utils.output_capturing import _active_collector
except ImportError:
    _active_collector = None  # type: ignore[assignment]

# Experts implementations of transformers that compute an expert for index num_experts too, from memory past the last.
WITHOUT_NONE = ("grouped_mm", "batched_mm")
LOSS = "moe_kernels.router_loss"  # the key of a loss in the metadata of a node of autograd's graph


class Router(nn.Module):
    """A gate and a policy of moe_kernels.nn in place of a router of transformers.

        block.gate = Router(TreeGate(hidden_size, num_experts, trees=2), NonzeroWeights())

    For blocks that call `logits, weights, index = gate(hidden_states)` and pass weights and index to their experts, as
    Mixtral's and Qwen3-MoE's do. Choices that the policy drops have index num_experts, which means no expert.

    Args:
        gate: with the block's hidden size as input and the block's number of experts.
        policy: one of moe_kernels.nn.policies; None is TokenChoice(), which keeps every choice.

    Input: hidden_states (..., D); mask (...) bool, True for real tokens, as in nn.MoE. Blocks pass no mask:
    `use_attention_mask(model)` makes the model's attention mask reach its Routers.

    Output: logits (T, E), weights (T, K) and index (T, K) int64. The logits are the logarithms of the gates; a gate
    below the smallest normal number counts as this number, since log(0) has no finite gradient.

    With output_router_logits=True transformers gets the logits from which a gate chooses (without noise), so that the
    model's own balance loss works, or the logarithms of the gates for a gate that has no such logits.
    """

    names_its_gate = True  # nn.record_routing has the choices under the Router's name

    def __init__(self, gate: Gate, policy: Any = None) -> None:
        super().__init__()
        self.gate, self.policy = gate, TokenChoice() if policy is None else policy
        self._loss: Any = None
        self._without_gradients = False  # whether the last forward had losses, but no gradients
        self._mask: Tensor | None = None  # the attention mask of the forward of the model that runs
        self._masks, self._takes_masks = Remembered(), False

    @classmethod
    def of(cls, router: Any, policy: Any = None, **options: Any) -> Router:
        """A Router with a TopKGate that has a transformers router's weights and chooses as it does.

            block.gate = Router.of(block.gate)

        For routers with a `weight` (E, D) and `top_k`: those of DeepSeek-V3 and GLM (sigmoid scores, a correction bias,
        which becomes `balance_bias`, and groups) and of Mixtral, OLMoE and Qwen3 (softmax). The weights are copied, in
        float32, in which the gate computes: a router of transformers that computes in bfloat16 rounds its logits, and
        may choose otherwise where they nearly tie.

        Args:
            router: the module that `Router` is to replace.
            policy: as in Router.
            options: further options of TopKGate, such as balance or balance_rate (0.001 for a router with a bias).

        Raises:
            TypeError: the router is of another kind.
        """
        weight, k = getattr(router, "weight", None), getattr(router, "top_k", None)
        correction = getattr(router, "e_score_correction_bias", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2 or not isinstance(k, int) or hasattr(router, "bias"):
            raise TypeError(
                f"Router.of: expected a router of transformers with weight (E, D), top_k and no bias of its logits, "
                f"got {type(router).__name__}; make Router(TopKGate(...)) yourself"
            )
        normalised = getattr(router, "norm_topk_prob", True)
        rule: dict[str, Any] = {"order": "topk_softmax" if normalised else "softmax_topk"}
        if correction is not None:
            rule = {"scores": "sigmoid", "renormalise": normalised, "balance_rate": 0.001}
            rule |= {"groups": (router.num_group, router.topk_group), "scale": float(router.routed_scaling_factor)}
        num_experts, dim = weight.shape
        given: dict[str, Any] = {"bias": False, "device": weight.device, "dtype": torch.float32} | rule | options
        gate = TopKGate(dim, num_experts, k, **given)
        with torch.no_grad():
            gate.linear.weight.copy_(weight)
            if correction is not None:
                gate.balance_bias.copy_(correction)
        return cls(gate, policy)

    @property
    def loss(self) -> Tensor | None:
        """(): the sum of the gate's losses of the last forward, to be added to the task's loss (see `router_loss`).

        The loss lives as long as the graph of that forward's outputs, so that a Router keeps no activations; None
        before the first forward and after the graph is gone.

        Raises:
            RuntimeError: gradients were disabled in a forward with losses, as torch.utils.checkpoint(use_reentrant=
                True) does, and are enabled now: the loss has no gradient.
        """
        if self._without_gradients and torch.is_grad_enabled():
            raise RuntimeError(
                "Router: the loss has no gradient, since the last forward ran with gradients disabled; with gradient "
                "checkpointing pass gradient_checkpointing_kwargs={'use_reentrant': False}, or read it under no_grad"
            )
        return self._loss() if isinstance(self._loss, weakref.ref) else self._loss

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        x = hidden_states.flatten(0, -2)
        mask = self._own_mask(x.shape[0]) if mask is None else _flat(mask, hidden_states)
        recorded = _recorded()
        before = 0 if recorded is None else len(recorded)
        out = call_with_mask("Router", self.gate, x, mask=mask)
        plan, weights = call_with_mask("Router", self.policy, out, self.training, mask=mask)
        index = torch.where(plan.slot_row >= 0, plan.slot_expert, plan.num_experts)
        logits = out.gates.clamp(min=torch.finfo(out.gates.dtype).tiny).log()
        if recorded is not None:
            found = self.gate._logits(x)
            recorded[before:] = [logits if found is None or found.shape != logits.shape else found]
        return logits, self._keep_loss(out, weights), index.long()

    def _keep_loss(self, out: GateOutput, weights: Tensor) -> Tensor:
        """The weights. The new node of their graph holds the loss: an attribute would keep the graph alive, and make
        copies of the model fail."""
        if not is_compiling() and is_recomputing():
            return weights
        loss = out.loss
        self._without_gradients = bool(out.losses) and not torch.is_grad_enabled()
        if is_compiling() or not (loss.requires_grad and weights.requires_grad):
            self._loss = loss
            return weights
        weights = weights.view_as(weights)  # a node on which the loss does not depend: no cycle
        metadata: Any = weights.grad_fn.metadata  # type: ignore[union-attr]
        metadata[LOSS] = loss
        self._loss = weakref.ref(loss)
        return weights

    def _own_mask(self, tokens: int) -> Tensor | None:
        """The part (T,) for these tokens of the attention mask of the model's forward; of the forward that a checkpoint
        repeats, its own."""
        mask = self._mask
        if self._takes_masks and not is_compiling() and (self.training or torch.is_grad_enabled()):
            mask = self._masks.take("Router", lambda: self._mask)
        if mask is None:
            return None
        batch, total = mask.shape
        length = tokens // batch if batch else 0
        if length * batch != tokens or length > total:
            raise ValueError(
                f"Router: attention_mask must have a row for each sample and a column for each token, the last ones of "
                f"this forward; got {tuple(mask.shape)} for {tokens} tokens"
            )
        return mask[:, total - length :].reshape(-1)  # the first columns are of tokens in a cache

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_loss": None, "_mask": None, "_without_gradients": False}


def _flat(mask: Tensor, hidden_states: Tensor) -> Tensor:
    check_mask("Router", mask, hidden_states.shape[:-1], hidden_states.device)
    return mask.reshape(-1)


def routers_of(name: str, model: nn.Module) -> list[Router]:
    found = [module for module in model.modules() if isinstance(module, Router)]
    if not found:
        raise ValueError(f"{name}: the model has no Router; put them in place of its own routers first")
    return found


def router_loss(model: nn.Module, micro_batches: int = 1) -> Tensor:
    """(): the sum of the losses of all Routers of a model in its last forward, over `micro_batches`.

    Add it once to the loss of each forward. micro_batches: 1, if what runs backward divides the loss by the number of
    micro-batches of a step, as accelerate's `accelerator.backward` does, and transformers' Trainer for models that take
    no num_items_in_batch. Else their number, as for a loss that is divided by num_items_in_batch, the tokens of all
    micro-batches: such losses are summed, and the sum of n balance losses would be n times too large. Then the gradient
    is the mean over the micro-batches in both cases.

    Raises:
        ValueError: the model has no Router, or micro_batches is below 1.
        RuntimeError: a Router has run no forward, the graph of its last forward is gone, or that forward ran with
            gradients disabled (see Router.loss).

    Example: docs/tutorials/transformers.md has a Trainer with this loss.
    """
    if micro_batches < 1:
        raise ValueError(f"router_loss: micro_batches must be at least 1, got {micro_batches}")
    losses = [router.loss for router in routers_of("router_loss", model)]
    kept = [loss for loss in losses if loss is not None]
    if len(kept) < len(losses):
        raise RuntimeError(
            "router_loss: a Router has no loss, as it has run no forward, or the outputs of its last forward are gone; "
            "call router_loss after the model's forward, before backward, while the model's loss exists"
        )
    return torch.stack([loss.to(kept[0].device) for loss in kept]).sum() / micro_batches


def use_attention_mask(model: nn.Module) -> nn.Module:
    """Makes the `attention_mask` of each forward of `model` reach its Routers; returns the model.

        model = use_attention_mask(model)     # once, after the Routers are in place
        model(input_ids, attention_mask=attention_mask, labels=labels)

    Padding then has no expert and is in no capacity and no loss: real tokens get the experts and losses that they get
    without it, on the left or on the right. attention_mask is (B, S), not 0 for real tokens; with a cache its last
    columns are those of this forward's tokens. None means that all tokens are real. Works under gradient
    checkpointing, generation with a dynamic cache and torch.compile. Call it on the module that is called with
    attention_mask, inside wrappers such as DDP or PEFT. Calling it again changes nothing.

    Raises:
        ValueError: the model has no Router, or its forward no argument attention_mask; in a forward, a mask that is not
            (B, S), such as the 4-dimensional masks of static caches, in which padding cannot be told, or an experts
            implementation of transformers that has no tokens without an expert.
    """
    for router in routers_of("use_attention_mask", model):
        router._takes_masks = True
    if any(isinstance(each, _GiveMask) for each in model._forward_pre_hooks.values()):
        return model
    names = list(inspect.signature(model.forward).parameters)
    if "attention_mask" not in names:
        raise ValueError(f"use_attention_mask: {type(model).__name__}.forward has no argument attention_mask")
    model.register_forward_pre_hook(_GiveMask(names.index("attention_mask")), with_kwargs=True)
    model.register_forward_hook(_take_mask_back, always_call=True)
    return model


def _recorded() -> list[Tensor] | None:
    """The list to which routers append their logits in a forward with output_router_logits=True, else None."""
    if _active_collector is None:
        return None
    # torch.compile cannot trace a ContextVar, in place of which transformers then uses this attribute.
    found = _active_collector.global_var if is_compiling() else _active_collector.get()
    return None if found is None else found.get("router_logits")


class _GiveMask:
    """A hook that gives the attention mask to the Routers. A class of the module, so that models can be pickled."""

    def __init__(self, position: int) -> None:
        self.position = position

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[self.position] if len(args) > self.position else kwargs.get("attention_mask")
        if given is not None and not (isinstance(given, Tensor) and given.dim() == 2):
            got = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise ValueError(
                f"use_attention_mask: attention_mask must be (B, S), not 0 for real tokens; got {got}, in which "
                "padding cannot be told; use a dynamic cache, or call the Routers with mask="
            )
        implementation = getattr(getattr(model, "config", None), "_experts_implementation", None)
        if given is not None and implementation in WITHOUT_NONE:
            raise ValueError(
                f"use_attention_mask: padding has no expert, but the experts implementation {implementation!r} runs "
                "one for every token; call model.set_experts_implementation('moe_kernels')"
            )
        mask = given if given is None or given.dtype == torch.bool else given != 0
        for module in model.modules():
            if isinstance(module, Router):
                module._mask = mask


def _take_mask_back(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    for module in model.modules():
        if isinstance(module, Router):
            module._mask = None
