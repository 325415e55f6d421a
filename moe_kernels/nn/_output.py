"""Full backward hooks for modules that return a dataclass, and `collect_outputs` for layers that return a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import BackwardHook, RemovableHandle

from moe_kernels.nn._parameters import reset
from moe_kernels.nn._recompute import is_recomputing

Hook = Callable[..., Any]


class OutputModule(nn.Module):
    """A module whose output may be a dataclass that is registered as a pytree.

    torch calls no full backward hooks for a module that returns a dataclass; this class does. A hook's `grad_output`
    has the gradients of those tensors of the output that require a gradient, in the order of the fields.
    """

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws every parameter and random buffer anew; needed after to_empty.

        The default calls reset_parameters of the child modules. A module with parameters of its own must override it.
        """
        reset(self, generator)

    def register_full_backward_hook(self, hook: Hook, prepend: bool = False) -> RemovableHandle:
        # Each hook wraps the inputs by itself, and the wrap made last is the first that a gradient meets.
        return self._hook_backward([hook], [], not prepend)

    def register_full_backward_pre_hook(self, hook: Hook, prepend: bool = False) -> RemovableHandle:
        return self._hook_backward([], [hook], prepend)

    def _hook_backward(self, hooks: list[Hook], pre_hooks: list[Hook], prepend: bool) -> RemovableHandle:
        calls: list[BackwardHook] = []

        def begin(module: nn.Module, args: tuple[Any, ...]) -> Any:
            calls[:] = [BackwardHook(module, hooks, pre_hooks)]
            return calls[0].setup_input_hook(args)

        def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            leaves, structure = tree_flatten(output)
            positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
            if calls and positions and torch.is_grad_enabled():
                hooked = calls.pop().setup_output_hook(tuple(leaves[i] for i in positions))
                for i, leaf in zip(positions, hooked, strict=True):
                    leaves[i] = leaf
            return tree_unflatten(leaves, structure)

        first = self.register_forward_pre_hook(begin, prepend=prepend)
        return _HandlePair(first, self.register_forward_hook(end, prepend=not prepend))


class _HandlePair(RemovableHandle):
    def __init__(self, first: RemovableHandle, second: RemovableHandle) -> None:
        self.handles = first, second

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


class Outputs(list[Any]):
    """The MoEOutputs that a `collect_outputs` block collects, in the order of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.with_gradients = torch.is_grad_enabled()

    @property
    def loss(self) -> Any:
        """The sum of all losses of all outputs: a tensor (), or the int 0 if there are no outputs."""
        return sum(output.loss for output in self)


class _Thread(local):
    """Not a ContextVar: torch.compile cannot trace one. outputs: the list of the innermost collect_outputs, or None."""

    outputs: Outputs | None = None


class _Process:
    outputs: Outputs | None = None


_thread = _Thread()
# torch.compile of torch before 2.13 reads the defaults of a thread's attributes: compiled layers would collect nothing.
_compiled = _thread if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13) else _Process()


@contextmanager
def collect_outputs() -> Iterator[Outputs]:
    """Collects the MoEOutput of every MoE(..., output="tensor") that this thread runs inside the block.

    Yields a list of MoEOutput, `outputs` below, in the order of the calls. `outputs.loss` is the sum of their losses,
    to be added to the task's loss. Blocks may be nested: the innermost one collects. A forward that
    torch.utils.checkpoint repeats in the backward pass is not collected again. With torch before 2.13, layers in
    torch.compile are collected by the block that any thread entered last.

    Raises:
        RuntimeError: a layer with losses runs with gradients disabled, such as under
            torch.utils.checkpoint(use_reentrant=True), inside a block that was entered with gradients enabled. The
            losses would have no gradient.

    Example:
        >>> model = torch.nn.Sequential(MoE(TopKGate(16, 4, 2, balance=0.01), ExpertMLP(4, 16, 32), output="tensor"))
        >>> with collect_outputs() as outputs:
        ...     y = model(torch.randn(8, 16))
        >>> len(outputs), outputs.loss.shape
        (1, torch.Size([]))
    """
    outer, outputs = (_thread.outputs, _compiled.outputs), Outputs()
    _thread.outputs = _compiled.outputs = outputs
    try:
        yield outputs
    finally:
        _thread.outputs, _compiled.outputs = outer


def collect(output: Any) -> None:
    """Appends a layer's output to the list of this thread's innermost `collect_outputs`, if there is one."""
    outputs = (_compiled if torch.compiler.is_compiling() else _thread).outputs
    if outputs is None or is_recomputing():
        return
    if output.losses and outputs.with_gradients and not torch.is_grad_enabled():
        raise RuntimeError(
            "collect_outputs: a layer with losses ran with gradients disabled inside a block that was entered with "
            "gradients enabled, so its losses have no gradient; use torch.utils.checkpoint(..., use_reentrant=False), "
            "or enter the block under no_grad"
        )
    outputs.append(output)
