"""Runs the experts of transformers' models on the kernels of this package.

    from moe_kernels.integrations import transformers as mk_transformers

    mk_transformers.register()
    model.set_experts_implementation("moe_kernels")    # or from_pretrained(..., experts_implementation="moe_kernels")

A model with this implementation calls `experts_forward(module, hidden_states, top_k_index, top_k_weights)` for its
experts, if transformers decorates their class with `use_experts_implementation`.
Parameters keep their names, shapes and strides, so checkpoints, optimizers and adapters work as before.

* `expert_mlp` runs three kinds of experts: act(gate) * up from the columns [gate, up], with SiLU or GELU (erf); experts
  without a gate, with SiLU, GELU (erf), ReLU or tanh; and experts with the clamped gate of gpt_oss.
* Other experts, and all experts with a norm after them, run as `grouped_gemm`, the module's own gate or activation,
  `grouped_gemm`, the norm if there is one, `combine`.

`Router` replaces the model's own router by a gate and a policy of moe_kernels.nn, `router_loss` is the sum of the
losses of all Routers, and with `use_attention_mask` Routers do not count padding.
"""

from __future__ import annotations

import sys
import weakref
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

try:
    from packaging.version import Version
    from transformers import __version__ as _installed
    from transformers.activations import GELUActivation, SiLUActivation
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface, _default_apply_gate

    if Version(_installed) < Version("5.8.1"):
        raise ImportError("models of older versions refuse experts implementations that others register")
except ImportError as error:
    found = getattr(sys.modules.get("transformers"), "__version__", "no transformers")
    raise ImportError(
        f"moe_kernels.integrations.transformers needs transformers 5.8.1 or later, found {found}: "
        f"pip install 'transformers>=5.8.1'; importing it gave: {error}"
    ) from error

from moe_kernels.integrations._router import Router, router_loss, use_attention_mask
from moe_kernels.ops._autocast import as_autocast, autocast_on
from moe_kernels.ops._checks import HALF_AND_SINGLE
from moe_kernels.ops.combine import combine
from moe_kernels.ops.expert_mlp import expert_mlp_of_choices
from moe_kernels.ops.grouped_gemm import grouped_gemm
from moe_kernels.ops.plan import make_plan
from moe_kernels.plan import RoutingPlan
from python_ref.grouped_gemm import activate

__all__ = ["Router", "experts_forward", "register", "router_loss", "use_attention_mask"]

# Class of a module's act_fn -> the name of this activation in expert_mlp.
ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    SiLUActivation: "silu",
    GELUActivation: "gelu",
    nn.Tanh: "tanh",
}
GATED = {"silu": "swiglu", "gelu": "geglu"}


def register(name: str = "moe_kernels") -> None:
    """Registers the kernels in transformers as experts implementation `name`; calling it again changes nothing.

    Raises:
        ValueError: another implementation has that name already.
    """
    existing = ALL_EXPERTS_FUNCTIONS.get(name)
    if name == "eager" or (existing is not None and existing is not experts_forward):
        raise ValueError(
            f"register: transformers has another experts implementation called {name!r}; choose a new name"
        )
    ExpertsInterface.register(name, experts_forward)


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The weighted sum of each token's experts, (T, D) -> (T, D), in the dtype of hidden_states.

    Args:
        module: experts of transformers with gate_up_proj or up_proj, down_proj, their biases if has_bias, and the flags
            of `use_experts_implementation`. The parameters are float32, bfloat16 or float16.
        hidden_states: (T, D), cast to the parameters' dtype. Under autocast hidden_states and parameters are cast to
            autocast's dtype instead.
        top_k_index: (T, K), int32 or int64: experts; num_experts or more means no expert.
        top_k_weights: (T, K) gate weights, float32, bfloat16, float16 or float64. The weights are read and the rows are
            summed as float32.

    Gradient: to hidden_states, top_k_weights and the parameters.

    Raises:
        TypeError: a parameter is missing or has another dtype.
    """
    w_in, w_out, b_in, b_out = _parameters(module)
    x, dtype = hidden_states, hidden_states.dtype
    if autocast_on(x.device.type):
        x, w_in, w_out, b_in, b_out = as_autocast(x, w_in, w_out, b_in, b_out)
    elif dtype != w_in.dtype:
        x = x.to(w_in.dtype)
    activation = _fused_activation(module)
    if activation is not None:
        given = x, top_k_index, module.num_experts, w_in, w_out
        y = expert_mlp_of_choices(*given, weights=top_k_weights, b_in=b_in, b_out=b_out, **activation)
    else:
        plan = make_plan(torch.where(top_k_index < module.num_experts, top_k_index, -1), module.num_experts)
        rows = _rows(module, x, plan, w_in, w_out, b_in, b_out)
        y = combine(rows, plan, top_k_weights)
    return y if y.dtype == dtype else y.to(dtype)


def _rows(
    module: Any,
    x: Tensor,
    plan: RoutingPlan,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None,
    b_out: Tensor | None,
) -> Tensor:
    """The experts' outputs (R, D) without gate weights; the module's own code computes gate, activation and norm."""
    pre = grouped_gemm(x, w_in, plan.expert_offsets, bias=b_in, row_token=plan.row_token)
    hidden = module._apply_gate(pre) if module.has_gate else module.act_fn(pre)
    rows = grouped_gemm(hidden.to(pre.dtype), w_out, plan.expert_offsets, bias=b_out)
    return module.post_expert_norm(rows) if _has_norm(module) else rows


def _has_norm(module: Any) -> bool:
    """Whether a norm follows the experts; transformers 5.17 has neither such experts nor the flag."""
    return getattr(module, "has_post_expert_norm", False)


def _parameters(module: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """w_in (E, D, H or 2 H), w_out (E, H, D) and their biases or None; none of them is a copy."""
    name = "gate_up_proj" if module.has_gate else "up_proj"
    w_in, w_out = (_parameter(module, each) for each in (name, "down_proj"))
    if w_in.dtype not in HALF_AND_SINGLE:
        raise TypeError(
            f"{type(module).__name__}: {name} has dtype {w_in.dtype}; moe_kernels takes float32, bfloat16 and float16: "
            "load the model in one of them (dequantized) or choose another experts implementation"
        )
    if not module.is_transposed:  # then transformers stores (E, out, in)
        w_in, w_out = w_in.mT, w_out.mT
    if not module.has_bias:
        return w_in, w_out, None, None
    return w_in, w_out, _parameter(module, f"{name}_bias"), _parameter(module, "down_proj_bias")


def _parameter(module: Any, name: str) -> Tensor:
    found = getattr(module, name, None)
    if not isinstance(found, Tensor):
        raise TypeError(
            f"{type(module).__name__}: expected a tensor {name}, found {type(found).__name__}; moe_kernels takes the "
            "layout that transformers' use_experts_implementation describes"
        )
    return found


def _fused_activation(module: Any) -> dict[str, Any] | None:
    """Arguments of expert_mlp for the module's gate or activation; None if expert_mlp lacks it or a norm follows."""
    if _has_norm(module):
        return None
    if module.has_gate and type(module)._apply_gate is not _default_apply_gate:
        clamped = not module.is_concatenated and _is_clamped(type(module))
        return {"activation": "swiglu_clamped", "alpha": module.alpha, "limit": module.limit} if clamped else None
    name = ACTIVATIONS.get(type(module.act_fn))
    if module.has_gate:
        name = GATED.get(name or "") if module.is_concatenated else None
    return None if name is None else {"activation": name}


def _is_clamped(kind: type[nn.Module]) -> bool:
    """Whether `_apply_gate` of a class is the clamped gate of gpt_oss."""
    return _computes_clamped(kind)


# Lets torch.compile replace a call of _is_clamped by its result. The decorator for this purpose,
# torch.compiler.assume_constant_result, would import the compiler.
_is_clamped._dynamo_marked_constant = True  # type: ignore[attr-defined]


# By the function, which classes share that wrappers make anew for each forward, as PEFT does. Weak: nothing is kept.
_clamped: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _computes_clamped(kind: Any) -> bool:
    """Compares the gate of a class with the definition, on numbers below -limit, from -limit to limit and above."""
    function = kind._apply_gate
    if function not in _clamped:
        _clamped[function] = _same_as_clamped(kind)
    return _clamped[function]


def _same_as_clamped(kind: Any) -> bool:
    pre, alpha, limit = torch.linspace(-3, 3, 14), 1.5, 1.0
    try:
        gate = kind._apply_gate(SimpleNamespace(alpha=alpha, limit=limit), pre)
    except AttributeError:  # the gate uses other attributes of its module
        return False
    return gate.shape == (7,) and torch.allclose(gate, activate(pre, "swiglu_clamped", alpha, limit))
