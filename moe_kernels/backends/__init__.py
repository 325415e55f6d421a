"""Chooses the backend of an operation, and explains the choice.

Backend "cpu", "triton" or "cuda" implements operation f if its module (see load) has a function f_fwd. In that module,
f_supports(target, dtype) returns None, or the reason why f cannot run; f_limits(target), if it exists, returns the
largest sizes that f takes, by their names in SIZES. The module of backend "reference" has f itself. A target is a
device type; for a GPU, the compute capability follows if it is known: "cuda:8.0". Operations in MADE_OF use the
functions of another operation.

The argument backend= names the backend; without it use_backend() does, else MOE_KERNELS_BACKEND. A named backend never
falls back to another one. Without a name the choice is automatic.
"""

from __future__ import annotations

import importlib
import os
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import ModuleType
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from moe_kernels._names import DEFINITIONS

KERNELS = ("cpu", "triton", "cuda")
NAMES = ("reference", *KERNELS)

# Order of the automatic choice, by device type. On a GPU the backend that PREFERRED names comes first.
AUTOMATIC = {"cpu": ("cpu", "reference"), "cuda": ("cuda", "triton", "reference")}


class Preference(NamedTuple):
    """Which backend's kernels the automatic choice takes for CUDA tensors, and why."""

    op: str
    major: int | None  # of the compute capability; None: every other
    first: str
    why: str


# The first line that fits decides; other operations take cuda, whose launches cost the host .02 ms, Triton's .06. No
# backend was timed on a GPU: counts are PTX instructions, and times predictions of `python -m bench predict` for
# Qwen3-30B's sizes (T = 32768, E = 128, K = 8, bfloat16).
PREFERRED = (
    Preference("grouped_gemm", 9, "triton", "wgmma, CUDA mma.sync: product on an H100 1186 us, CUDA 1564"),
    Preference(
        "grouped_gemm", None, "cuda", "equal loops: 204 instructions for 64 products in Triton, CUDA 175 to 193"
    ),
    Preference("topk_gate", None, "triton", "A100: forward 16.8 us, CUDA 20.1; with backward 22.7, CUDA 31.7"),
    Preference(
        "tree_gate", None, "triton", "backward, E = 64: 8.4 instructions an element, CUDA 21.6; E = 48: 13.6, 42.7"
    ),
    Preference("tree_route", None, "triton", "A100, E = 64, P = 768: 41 us, CUDA 65; float32 75 and 130"),
)

# The basename of an operation's file, if it is not the name of the operation.
FILES = {
    "make_plan": "plan",
    "plan_expert_choice": "plan",
    "plan_priority": "plan",
    "smooth_step": "tree_gate",
    "tree_route": "tree_gate",
}
# Other names of operations, which `choose` and `explain` accept.
ALIASES = {"plan": "make_plan", "kwta_mask": "kwta", "kwta_bits": "kwta", "kwta_apply": "kwta"}

# Operations that run on the kernels of another operation: a backend that supports the other one supports them.
MADE_OF = {"expert_mlp": "grouped_gemm", "expert_norms": "grouped_gemm"}

# Functions that return the sizes that kernels may limit. Their arguments are the first tensors of a call.
SIZES: dict[str, Callable[..., dict[str, int]]] = {
    "sinkhorn": lambda scores: {"n": scores.shape[-1]},
    "topk_gate": lambda logits: {"E": logits.shape[-1]},
    "tree_gate": lambda x, split_weight: {"K": split_weight.shape[0], "E": split_weight.shape[1] + 1},
    "tree_route": lambda x, split_weight: {"K": split_weight.shape[0], "E": split_weight.shape[1] + 1},
}

# Operations whose definitions only choose or copy, or compute elementwise what IEEE rounds in one way: their bits do
# not depend on other tokens. Other definitions sum with torch, in an order that does, or use its vectorised functions.
EXACT = ("kwta", "make_plan", "plan", "plan_expert_choice", "plan_priority", "dispatch", "smooth_step", "harden")

VARIABLE = "MOE_KERNELS_BACKEND"

_requested: ContextVar[str | None] = ContextVar("moe_kernels_backend", default=None)


def constant(function: _Function) -> _Function:
    """Marks a function whose result torch.compile treats as a constant. torch.compiler.assume_constant_result does the
    same, but imports torch._dynamo, which takes seconds."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_Function = TypeVar("_Function", bound=Callable[..., object])


class BackendError(RuntimeError):
    """The named backend cannot run the operation on these arguments, or no backend can.

    Example:
        >>> mk.harden(torch.eye(2), backend="cpu")
        Traceback (most recent call last):
            ...
        moe_kernels.backends.BackendError: harden: backend 'cpu' cannot run here: cpu does not implement harden
    """


class Candidate(NamedTuple):
    """Whether a backend can run an operation, and if not, why."""

    backend: str
    available: bool
    reason: str


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Inside the block every operation without backend= runs on backend `name`, or raises BackendError.

    Blocks may be nested. A block applies only to its own thread.

    Example:
        >>> with mk.use_backend("reference"):
        ...     mk.kwta(torch.tensor([1.0, 2.0]), 1)
        tensor([0., 2.])
    """
    _check_name(name)
    token = _requested.set(name)
    try:
        yield
    finally:
        _requested.reset(token)


def choose(op: str, backend: str | None, x: Tensor, *more: Tensor) -> str:
    """The backend that runs `op` on tensors with the device and dtype of x. torch.compile stores the choice.

    For an operation in SIZES, x and `more` are the arguments of the function in SIZES. If a backend's kernels cannot
    take these sizes, the automatic choice skips the backend; if it was named, BackendError is raised. For a grouped
    product `more` are its weights.
    """
    device, index = ("cpu", None) if x.is_cpu else (x.device.type, x.device.index)
    chosen = _choose(op, backend, device, index, x.dtype, ())
    if chosen == "cuda" and MADE_OF.get(op, op) == "grouped_gemm" and requested(backend) is None:
        # CUDA's kernels first copy matrices whose rows are no multiples of 16 bytes, Triton's read them as they are.
        copied = any(size % 8 for each in (x, *more) for size in each.shape[1:])
        chosen = "triton" if copied and _reads_any_rows(op, device, index, x.dtype) else chosen
    if op not in SIZES:
        return _not_reference(op, chosen, x)
    sizes = SIZES[op](x, *more)
    passed: tuple[tuple[str, str], ...] = ()
    while (reason := too_large(sizes, _limits(op, chosen, device, index))) is not None:
        passed = (*passed, (chosen, reason))
        chosen = _choose(op, backend, device, index, x.dtype, passed)
    return _not_reference(op, chosen, x)


@constant
def _reads_any_rows(op: str, device: str, index: int | None, dtype: torch.dtype) -> bool:
    return unsupported("triton", op, target_of(device, index), dtype) is None


def _not_reference(op: str, chosen: str, x: Tensor) -> str:
    """`chosen`; raises in the mode batch_invariant for a definition that is not EXACT."""
    if chosen == "reference" and ALIASES.get(op, op) not in EXACT and not x.is_meta and is_batch_invariant():
        raise BackendError(
            f"{op}: backend 'reference' adds in an order that depends on the other tokens, so it cannot run inside "
            f"batch_invariant(); expected cpu, triton or cuda for {x.dtype} on {x.device}, see moe_kernels.explain"
        )
    return chosen


def too_large(sizes: dict[str, int], limits: tuple[tuple[str, int], ...]) -> str | None:
    """The reason if a size is above its limit, else None. torch.compile makes guards of the comparisons."""
    for size, limit in limits:
        if sizes[size] > limit:
            return f"it takes {size} up to {limit}, not {sizes[size]}"
    return None


@constant
def _limits(op: str, name: str, device: str, index: int | None) -> tuple[tuple[str, int], ...]:
    return limits(name, op, target_of(device, index))


def limits(name: str, op: str, target: str) -> tuple[tuple[str, int], ...]:
    """The largest sizes of `op` that backend `name` takes, as pairs (name in SIZES, largest size)."""
    found = getattr(load(name, op), f"{op}_limits", None)
    return () if found is None else tuple(found(target).items())


# The choice of choose_shapes for meta tensors: operators then compute only shapes and dtypes.
SHAPES = "shapes"


def choose_shapes(op: str, backend: str | None, x: Tensor, *more: Tensor) -> str:
    """As `choose`, but SHAPES for meta tensors."""
    chosen = choose(op, backend, x, *more)
    return SHAPES if x.is_meta else chosen


@constant
def _choose(
    op: str,
    backend: str | None,
    device: str,
    index: int | None,
    dtype: torch.dtype,
    passed: tuple[tuple[str, str], ...],  # backends that cannot take the sizes, with the reason
) -> str:
    onnx = sys.modules.get("torch.onnx")
    if onnx is not None and onnx.is_in_onnx_export():
        raise BackendError(
            f"{op}: ONNX export is not supported, since ONNX has no operators like these; use torch.export, which "
            "AOTInductor compiles"
        )
    return _decide(op, requested(backend), target_of(device, index), dtype, passed)


def product_backend(x: Tensor) -> str | None:
    """`backend` for a product that a layer makes in the mode batch_invariant: None, or "triton" where the requested
    backend cannot multiply x, as "cuda" float32."""
    return _product_backend(x.device.type, x.device.index, x.dtype)


@constant
def _product_backend(device: str, index: int | None, dtype: torch.dtype) -> str | None:
    name = requested(None)
    cannot = name is not None and unsupported(name, "grouped_gemm", target_of(device, index), dtype) is not None
    return "triton" if cannot else None


def has_kernel(op: str, backend: str | None, x: Tensor) -> bool:
    """Whether `choose` would find a kernel for `op`, instead of the definition or BackendError."""
    device, index = ("cpu", None) if x.is_cpu else (x.device.type, x.device.index)
    return _has_kernel(op, backend, device, index, x.dtype)


@constant
def _has_kernel(op: str, backend: str | None, device: str, index: int | None, dtype: torch.dtype) -> bool:
    name = requested(backend)
    names = AUTOMATIC.get(device, ()) if name is None else (name,)
    target = target_of(device, index)
    return any(each != "reference" and unsupported(each, op, target, dtype) is None for each in names)


def target_of(device: str, index: int | None) -> str:
    """The device type; for a GPU that torch can use, with its compute capability: "cuda:8.0"."""
    if device != "cuda" or not torch.cuda.is_available():
        return device
    major, minor = torch.cuda.get_device_capability(index)
    return f"{device}:{major}.{minor}"


def requested(backend: str | None) -> str | None:
    """The backend named by the argument, use_backend() or the environment; None for the automatic choice."""
    return backend or _requested.get() or os.environ.get(VARIABLE) or None


@cache
def _decide(
    op: str, name: str | None, target: str, dtype: torch.dtype, passed: tuple[tuple[str, str], ...] = ()
) -> str:
    excluded, device = dict(passed), target.partition(":")[0]
    if name is not None:
        _check_name(name)
        reason = excluded.get(name) or unsupported(name, op, target, dtype)
        if reason is not None:
            raise BackendError(f"{op}: backend {name!r} cannot run here: {reason}")
        return name
    for name in _order(MADE_OF.get(op, op), target):
        if name not in excluded and unsupported(name, op, target, dtype) is None:
            if name == "reference" and device == "cuda":
                _warn_reference(op)
            return name
    raise BackendError(f"{op}: no backend can run here; moe_kernels.explain({op!r}, ...) says why")


def _order(op: str, target: str) -> tuple[str, ...]:
    device, _, capability = target.partition(":")
    order = AUTOMATIC.get(device, ("reference",))
    major = int(capability.partition(".")[0] or 0)
    fits = (each.first for each in PREFERRED if each.op == op and each.major in (None, major))
    first = next(fits, order[0]) if device == "cuda" else order[0]
    return first, *(name for name in order if name != first)


def unsupported(name: str, op: str, target: str, dtype: torch.dtype) -> str | None:
    """None if backend `name` can run `op` on tensors of that target and dtype, else the reason."""
    op = ALIASES.get(op, op)
    reason = missing(name, op)
    if reason is None and name != "reference":
        reason = getattr(load(name, op), f"{MADE_OF.get(op, op)}_supports")(target, dtype)
    return reason


@cache
def missing(name: str, op: str) -> str | None:
    """None if backend `name` implements `op` in this installation, else the reason."""
    op = ALIASES.get(op, op)
    try:
        namespace = load(name, op)
    except ImportError as error:
        return str(error)
    if not hasattr(namespace, op if name == "reference" else f"{MADE_OF.get(op, op)}_fwd"):
        return f"{name} does not implement {op}"
    return None


def file_of(name: str, op: str) -> str:
    """The basename of the file that has `op` in python_ref or backends/triton: "plan" for make_plan."""
    op = FILES.get(op, op)
    return op if name == "reference" else MADE_OF.get(op, op)


@cache
def load(name: str, op: str) -> ModuleType:
    """The module that has the functions of backend `name`, which may be marked (invariance.py), for `op`."""
    name = plain(name)
    op = file_of(name, op)
    if name == "reference":
        return importlib.import_module(f"{DEFINITIONS}.{op}")
    if name != "triton":
        return importlib.import_module(f"{__name__}.{name}")
    module = f"{__name__}.triton.{op}"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError("no Triton kernel" if error.name == module else "Triton is not installed") from error


def refuse(operator: str, backend: str, x: Tensor) -> None:
    """Raises unless `backend` has kernels for torch's operator of this name on the device of x. Exported and compiled
    programs call operators with the backend that they were made with."""
    if backend not in KERNELS:
        raise ValueError(f"{operator}: backend must be one of {', '.join(KERNELS)}; got {backend!r}")
    reason = _refusal(operator, backend, target_of(x.device.type, x.device.index))
    if reason is not None:
        raise BackendError(f"{operator}: backend {backend!r} cannot run here: {reason}")


@cache
def _refusal(operator: str, backend: str, target: str) -> str | None:
    name, _, last = operator.rpartition("_")  # expert_mlp_bwd is an operator of expert_mlp
    op = name if last in ("fwd", "bwd") else ALIASES.get(operator, operator.removesuffix("_of_choices"))
    return unsupported(backend, op.removesuffix("_logits"), target, torch.bfloat16)


def reconsider() -> None:
    """Clears the cache of choices, after a change of what a backend supports, as tests and `precompile` make."""
    _decide.cache_clear()
    _refusal.cache_clear()


def candidates(op: str, target: str, dtype: torch.dtype, sizes: dict[str, int] | None = None) -> list[Candidate]:
    """For every backend, whether it can run `op` on tensors of this target and dtype, and of these sizes if given."""
    found = []
    for name in NAMES:
        reason = unsupported(name, op, target, dtype)
        if reason is None and sizes:
            reason = too_large(sizes, limits(name, op, target))
        found.append(Candidate(name, reason is None, reason or ""))
    return found


def explain(op: str, *args: object) -> list[Candidate]:
    """Prints and returns, for every backend, whether it can run `op` on these arguments, and if not, why.

    In the printed table an arrow marks the backend that a call without `backend=` would choose now. The first line
    names a backend that use_backend or MOE_KERNELS_BACKEND requests.

    Example:
        >>> found = mk.explain("harden", torch.eye(2))
        harden: backend, available, reason
        -> reference  yes
        ...
        >>> found[0].backend, found[0].available
        ('reference', True)
    """
    if missing("reference", op) is not None:  # every operation has a reference
        raise ValueError(f"explain: op must be one that python -m moe_kernels info lists, such as kwta; got {op!r}")
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if not tensors:
        raise TypeError(f"explain: expected the arguments of {op}, a Tensor among them; got {args!r}")
    x, target = tensors[0], target_of(tensors[0].device.type, tensors[0].device.index)
    sized = tensors[: 2 if op in ("tree_gate", "tree_route") else 1]
    sizes = SIZES[op](*sized) if op in SIZES else None
    found = candidates(op, target, x.dtype, sizes)
    try:
        chosen = choose(op, None, *sized)
    except BackendError:
        chosen = ""
    wanted = requested(None)
    print(f"{op}: backend, available, reason" + (f"; {wanted} was requested" if wanted else ""))
    for name, available, reason in found:
        line = f"{'->' if name == chosen else '  '} {name:<10} {'yes' if available else 'no':<4} {reason}".rstrip()
        print(textwrap.fill(line, 100, subsequent_indent=" " * 19, break_long_words=False, break_on_hyphens=False))
    return found


def available_backends(op: str) -> list[str]:
    """The backends that can run `op` in float32 on the CPU or on the current GPU.

    Example:
        >>> "reference" in mk.available_backends("kwta")
        True
    """
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [name for name in NAMES if any(unsupported(name, op, device, torch.float32) is None for device in devices)]


def _check_name(name: str) -> None:
    if name not in NAMES:
        raise ValueError(f"backend must be one of {', '.join(NAMES)}; got {name!r}")


@cache
def _warn_reference(op: str) -> None:
    warnings.warn(
        f"{op}: no kernel can run on these CUDA tensors, so the reference does; moe_kernels.explain({op!r}, ...) "
        "says why",
        stacklevel=5,
    )


# The mode batch_invariant (see invariance.py). A public function reads it, and marks the backend that it passes to an
# operator: "cpu" becomes "cpu:invariant". So the mode of a forward is that of its backward, in any thread, and a
# compiled or exported program keeps it.
INVARIANT = "MOE_KERNELS_BATCH_INVARIANT"
MARK = ":invariant"

fixed_bits: ContextVar[bool | None] = ContextVar("moe_kernels_batch_invariant", default=None)


class _Process:
    """What the blocks of all threads ask for; torch.compile guards `on` and `off`, but cannot trace a ContextVar."""

    def __init__(self) -> None:
        self.on = self.off = False  # whether any thread is in a block with enabled=True, or with enabled=False
        self.counts = {True: 0, False: 0}
        self.lock = threading.Lock()

    def add(self, enabled: bool | None, change: int) -> None:
        if enabled is not None:
            self.counts[enabled] += change
            self.on, self.off = self.counts[True] > 0, self.counts[False] > 0


process = _Process()


def is_batch_invariant() -> bool:
    """Whether this code runs in the mode."""
    if is_compiling():
        return process.on or (_from_environment() and not process.off)
    requested = fixed_bits.get()
    if requested is None and torch._C._current_graph_task_id() != -1:
        # A recomputation on one of autograd's threads, which do not inherit context variables.
        requested = process.on or None
    return _from_environment() if requested is None else requested


def _from_environment() -> bool:
    return os.environ.get(INVARIANT, "0") not in ("", "0")


_from_environment._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as backends.constant


def mark(backend: str) -> str:
    """The backend argument of an operator: `backend`, marked in the mode."""
    return backend + MARK if is_batch_invariant() else backend


def plain(backend: str) -> str:
    return backend.removesuffix(MARK)
