"""A stand-in for a CUDA graph on the CPU.

`record` has the signature of bench.captured.cuda_graph. It runs a step once and records every operator that torch
dispatches, with the tensors that it got and returned. A replay runs the operators again on the same memory, without any
Python of the step. What an operator returns anew is copied into the memory that the recording got.

As with a CUDA graph: nothing that existed before has changed after the recording, and what the step computed is
undefined until the first replay. A step that a capture would refuse raises CaptureError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators with these tags make the host wait for a GPU: they return a number, or a shape that depends on values.
WAIT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
NUMBERS = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::item", "aten::nonzero"}
# Functions that read a tensor on the host although no operator shows it if the tensor is on the CPU.
READ = {"__array__", "cpu", "numpy", "tolist"}
# Functions that, given a device, copy numbers of the host to it from memory that is not pinned.
WRITE = {"as_tensor", "asarray", "tensor"}
REPLACE = {"resize_", "set_"}  # these give a tensor other memory


class CaptureError(RuntimeError):
    """The step does what a CUDA graph cannot capture."""


def record(warm_up: Callable[[], None], step: Callable[[], None], launches: bool = False) -> Callable[[], None]:
    """launches: operators of this package are recorded as what their Python launches for a GPU (Tape)."""
    tape = Tape(launches)
    with checked_as_on_a_gpu() if launches else contextlib.nullcontext():
        with torch.autograd.profiler.profile() as profile:
            warm_up()
        # profile.function_events has the same events, but Python makes them, for .1 s a step.
        refuse_events(profile.kineto_results.experimental_event_tree())
        numbers = torch.get_rng_state()
        with tape.recording():
            step()
    tape.rewind()
    torch.set_rng_state(numbers)
    return tape.replay


class Tape(TorchDispatchMode):
    """Records the operators that run inside `recording`.

    launches: of an operator of this package, the operators of torch and the kernels that it launches are recorded
    instead. Its backend must be "triton" or "cuda", whose kernels tests/ptx executes on CPU tensors.
    """

    def __init__(self, launches: bool = False) -> None:
        super().__init__()
        self.launches, self.calls = launches, list[Callable[[], None]]()
        self.inside = False  # whether an operator runs: what it does on the host is its own affair
        self._made: dict[int, Any] = {}  # memory that recorded operators allocated
        self._before: dict[int, tuple[Any, Any]] = {}  # other memory that they wrote to, with a copy of its first bytes
        self._new: list[Tensor] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with contextlib.ExitStack() as entered:
            if self.launches:
                entered.enter_context(_launches_recorded(self))
            entered.enter_context(_Functions(self))
            entered.enter_context(self)
            yield

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.launches and op.namespace == "moe_kernels":
            with self:
                return op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        if not self.inside:
            refuse(op, args, kwargs)
        given, written = _tensors((args, kwargs)), _written(op, args, kwargs)
        for each in written:
            self._save(each)
        outer, self.inside = self.inside, True
        try:
            result = op(*args, **kwargs)
        finally:
            self.inside = outer
        memory = {_key(each) for each in given}
        new = [each.detach() for each in _tensors(result) if _key(each) not in memory]
        refuse_copies(op, given, _tensors(result))
        self._made |= {_key(each): each.untyped_storage() for each in new}
        self._new += new
        if new or written:
            held = torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
            self.calls.append(lambda: _again(op, *held, new, memory))
        return result

    def launch(self, call: Callable[[], None]) -> None:
        """Runs and records a launch of a kernel."""
        outer, self.inside = self.inside, True
        try:
            with torch.utils._python_dispatch._disable_current_modes():
                call()
        finally:
            self.inside = outer
        self.calls.append(call)

    def rewind(self) -> None:
        """Restores what existed before the recording; makes NaN of the floating-point results."""
        for storage, saved in self._before.values():
            storage.copy_(saved)
        for each in self._new:
            if each.is_floating_point():
                each.fill_(torch.nan)

    def replay(self) -> None:
        with torch._C._AutoDispatchBelowAutograd():
            for call in self.calls:
                call()

    def _save(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if _key(tensor) not in self._made and _key(tensor) not in self._before:
            self._before[_key(tensor)] = storage, storage.clone()


def _again(op: Any, args: Any, kwargs: Any, old: list[Tensor], memory: set[int]) -> None:
    new = [each for each in _tensors(op(*args, **kwargs)) if _key(each) not in memory]
    for target, source in zip(old, new, strict=True):
        target.copy_(source)


def refuse(op: Any, args: Any, kwargs: Any) -> None:
    """Raises CaptureError for an operator that makes the host wait for a GPU."""
    name = op._schema.name.split("::")[1]
    waits = not WAIT.isdisjoint(op.tags)
    if name in ("index", "index_put", "index_put_"):  # the tag of `index` is for masks
        waits = any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
    if waits and not (name == "repeat_interleave" and kwargs.get("output_size") is not None):
        raise CaptureError(f"{op} would make the host wait for the device")
    if name in REPLACE:
        raise NotImplementedError(f"the tape does not follow {op}")


def refuse_events(events: Sequence[Any], callers: Sequence[str] = ()) -> None:
    """Raises CaptureError for a profiled operator that makes the host wait, unless another operator called it.

    callers: those of the events, the outermost first.

    While a dispatch mode is active torch computes some gradients in another way. The backward pass of `prod` then
    reads no number, for example, so that a Tape would not see that it does so without a mode.
    """
    others = [name for name in callers if "::" in name and name not in NUMBERS and "autograd::" not in name]
    for event in events:
        if event.name in NUMBERS and not others:
            place = f" in {callers[0].rpartition(' ')[2]}" if callers else ""
            raise CaptureError(f"{event.name}{place} would make the host wait for the device")
        refuse_events(event.children, [*callers, event.name])


def refuse_copies(op: Any, given: list[Tensor], results: list[Tensor]) -> None:
    """Raises CaptureError for an operator that copies from one device to another."""
    devices = {each.device for each in (*given, *results) if each.dim() or each.device.type != "cpu"}
    if len(devices) > 1:
        raise CaptureError(f"{op} would copy between {' and '.join(sorted(map(str, devices)))}")


class _Functions(TorchFunctionMode):
    """Refuses functions of READ and WRITE."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if not self.tape.inside:
            if name in READ:
                raise CaptureError(f"{name} would make the host wait for the device")
            # A tensor made with device="cpu" stays on the host.
            to_device = name in WRITE and (kwargs or {}).get("device", "cpu") != "cpu" and not _tensors(args)
            if name == "new_tensor" or to_device:
                raise CaptureError(f"{name} would copy from the host")
        if name == "one_hot" and (args[1:] or kwargs):  # on the CPU alone it checks values on the host
            return (args[0][..., None] == torch.arange(*args[1:], **(kwargs or {}))).long()
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _launches_recorded(tape: Tape) -> Iterator[None]:
    from moe_kernels.backends import cuda

    launchers: list[tuple[Any, str]] = [(cuda, "call")]
    with contextlib.suppress(ImportError):
        from triton.runtime.jit import JITFunction

        launchers.append((JITFunction, "run"))

    def recorded(launcher: Callable[..., None]) -> Callable[..., None]:
        return lambda *given, **named: tape.launch(lambda: launcher(*given, **named))

    with contextlib.ExitStack() as changed:
        for owner, name in launchers:
            changed.enter_context(patch.object(owner, name, recorded(getattr(owner, name))))
        yield


@contextlib.contextmanager
def checked_as_on_a_gpu() -> Iterator[None]:
    """Inside the block values of plans are not checked, as is the default on a GPU, although tensors are on the CPU."""
    from moe_kernels import sizes
    from moe_kernels.ops import plan

    with (
        patch.object(plan, "refuse_unknown_experts", lambda *given: None),
        patch.object(sizes, "is_checked", lambda index: False),
    ):
        yield


def _written(op: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among the arguments that the operator writes to."""
    found = []
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _tensors(args[index] if index < len(args) else kwargs.get(argument.name))
    return found


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
