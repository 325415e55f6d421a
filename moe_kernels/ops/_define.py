"""Registration of operators with torch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor  # torch has no public predicate

from moe_kernels import backends
from moe_kernels._names import OPERATORS
from moe_kernels.backends import MARK, plain
from moe_kernels.ops import _flops
from moe_kernels.sizes import fixed_order

_library = torch.library.Library(OPERATORS, "DEF")

# The registered operators: operators.kwta_fwd is torch.ops.moe_kernels.kwta_fwd.default.
operators = SimpleNamespace()


def define(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    flops: Callable[..., int],
    *,
    check: Callable[..., object],
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    batched: tuple[int, ...] = (),
) -> None:
    """Registers one operator with torch and adds it to `operators`.

    Args:
        schema: as for torch.library.Library.define, such as "name(Tensor x, int k, str backend) -> Tensor".
        implementation: runs for tensors on every device.
        fake: computes shapes and dtypes of the results from tensors without data.
        flops: computes the FLOPs from the arguments, with shapes in place of tensors, for torch.utils.flop_counter.
        check: raises for arguments that could make `implementation` read or write memory that is not theirs. Its
            arguments are the operator's name and those of `implementation`. It runs before `implementation` only, so
            it adds no guards to compiled programs.
        save, backward: as `setup_context` and `backward` of torch.library.register_autograd, except that
            `backward` gets None, not zeros, for an output without a gradient, and is not called if no output has one.
        batched: positions of the tensor arguments whose first dimension is a batch; torch.vmap's dimension is merged
            into it. If `batched` is empty, torch.vmap raises TypeError.
    """
    name = schema[: schema.index("(")]
    qualified = f"{OPERATORS}::{name}"
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))

    op = getattr(getattr(torch.ops, OPERATORS), name).default
    names = [each.name for each in op._schema.arguments]
    backend = names.index("backend") if "backend" in names else None
    required = [
        (position, each.name)
        for position, each in enumerate(op._schema.arguments)
        if isinstance(each.type, torch.TensorType)
    ]

    def checked(*args: Any) -> Any:
        for position, argument in required:
            if args[position] is None:  # torch passes None for a tensor too
                raise TypeError(f"{name}: {argument} must be a Tensor, got None")
        fixed = backend is not None and args[backend].endswith(MARK)
        if backend is not None and fixed:
            args = (*args[:backend], plain(args[backend]), *args[backend + 1 :])
        if backend is not None and args[backend] != "cpu":
            backends.refuse(name, args[backend], args[required[0][0]])
        check(name, *args)
        if not fixed:
            return implementation(*args)
        with fixed_order():
            return implementation(*args)

    _library.impl(name, checked, "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, fake, lib=_library)
    if backward is not None:
        save, backward = _without_zeros(save, backward)
        torch.library.register_autograd(qualified, backward, setup_context=save, lib=_library)
    torch.library.register_vmap(qualified, _rule(name, op, batched), lib=_library)
    _flops.register(op.overloadpacket, flops)
    setattr(operators, name, op)


def _without_zeros(
    save: Callable[..., None] | None, backward: Callable[..., Any]
) -> tuple[Callable[..., None], Callable[..., Any]]:
    """setup_context and backward for torch, made of `save` and `backward` of define."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        if save is not None:
            save(ctx, inputs, output)

    def backward_unless_none(ctx: Any, *grads: Any) -> Any:
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        return backward(ctx, *grads)

    return setup_context, backward_unless_none


def no_second_derivative(op: str) -> Callable[..., Any]:
    """A `backward` that raises RuntimeError, for the operator that computes the gradient of `op`."""

    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(f"{op}: kernels are once_differentiable; backend='reference' has second derivatives")

    return backward


def _rule(name: str, op: Callable[..., Any], batched: tuple[int, ...]) -> Callable[..., Any]:
    """The torch.vmap rule of an operator: see `batched` of define."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        for position, (dim, each) in enumerate(zip(in_dims, args, strict=True)):
            inside = isinstance(each, Tensor) and is_functorch_wrapped_tensor(each)
            if inside or (dim is not None and position not in batched):
                transform = "vmap inside grad or jvp" if inside else "vmap"
                raise TypeError(f"{name}: torch.func transforms are not supported here, got {transform}")
        size = info.batch_size
        merged = [
            _merge(each, dim, size) if position in batched and each is not None else each
            for position, (dim, each) in enumerate(zip(in_dims, args, strict=True))
        ]
        num_rows = merged[batched[0]].shape[0] // size
        found = op(*merged)
        if isinstance(found, Tensor):
            return found.unflatten(0, (size, num_rows)), 0
        return tuple(each.unflatten(0, (size, num_rows)) for each in found), (0,) * len(found)

    return rule


def _merge(x: Tensor, dim: int | None, size: int) -> Tensor:
    """x with torch.vmap's dimension `dim` merged into its rows; if dim is None, `size` copies of its rows."""
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.reshape(size * x.shape[1], *x.shape[2:])


def gradient_like(x: Tensor, wanted: bool) -> Tensor:
    """An uninitialised, contiguous tensor for the gradient to x; without elements if the gradient is not wanted."""
    return x.new_empty(x.shape if wanted else 0)


def define_check(schema: str, refuse: Callable[..., None], check: Callable[..., None]) -> None:
    """Registers a check of values as an operator, whose fake does nothing: fake tensors have no values to check."""
    define(schema + " -> ()", refuse, lambda *args: None, no_flops, check=check)


def no_flops(*args, **kwargs) -> int:
    return 0
