"""Compares a case with the definition and minimises failing cases.

As in `moe_kernels verify`, an output that need not be exact may have twice the error of the definition in the case's
dtype, plus `floor` epsilons. An epsilon of float64 is multiplied by 32, because the exact outputs are float64 too.

Random inputs can contain denormal numbers and give sums that cancel. For an output with a larger error, `_difference`
therefore also runs the definition on slightly perturbed inputs, and allows twice its largest error there. It adds
EFFECT times the largest change of the exact output. For sums whose exact value is nearly 0 it adds 32 epsilons
(float32's for 16-bit dtypes) of the largest input.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from moe_kernels import backends
from moe_kernels.backends import cpu
from moe_kernels.info import placement
from moe_kernels.verify import OPERATIONS as VERIFIED
from moe_kernels.verify import bits_of, error_text, relative_error
from moe_kernels.verify.operation import Operation
from tests.fuzz import command
from tests.fuzz.operations import OPERATIONS
from tests.fuzz.values import DTYPES, KINDS, LAYOUTS, Spec

EFFECT = 8.0
WIDEST = cpu.isa  # index of the widest instruction set, or of the one in MOE_KERNELS_CPU_ISA


def names() -> list[str]:
    """Names for `running`, such as "cpu avx2": one for each instruction set up to WIDEST."""
    return [f"cpu {isa}" for isa in cpu.module.isas[: WIDEST + 1]]


@contextmanager
def running(name: str) -> Iterator[str]:
    """Yields the backend of a `name` such as "cpu avx2" or "triton"; in the block "cpu" uses that instruction set."""
    backend, _, isa = name.partition(" ")
    before = cpu.isa
    try:
        if isa:
            cpu.isa = cpu.module.isas.index(isa)
        yield backend
    finally:
        cpu.isa = before


def set_up_process() -> None:
    """Sets one thread, hides warnings, and makes torch.empty fill tensors with NaN (integers: the largest)."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)


def failure(spec: Spec) -> str | None:
    """Text that names a wrong output or an unexpected exception; None if the case is correct or cannot run here."""
    operation, build, dtype = _verified(spec), OPERATIONS[spec["op"]].build, DTYPES[spec["dtype"]]
    with running(spec["on"]) as backend:
        try:
            inputs = build(spec)
            if spec["op"] in VERIFIED and placement(spec["op"], backend, dtype).device is None:
                return None
            found = operation.run(inputs, backend)
        except backends.BackendError:
            return None
        except Exception as raised:
            found, error = None, error_text(raised)
    try:
        expected = operation.run(build(spec), "reference")
    except Exception as raised:
        # If the definition raises, the kernel must raise too; messages may differ.
        return None if found is None else f"ran, but the definition raises {error_text(raised)}"
    if found is None:
        return error
    return _difference(operation, spec, found, expected)


def _verified(spec: Spec) -> Operation:
    return OPERATIONS[spec["op"]].own or VERIFIED[spec["op"]]


def _difference(operation: Operation, spec: Spec, found: dict[str, Tensor], expected: dict[str, Tensor]) -> str | None:
    if found.keys() != expected.keys():
        return f"outputs {sorted(found)}, expected {sorted(expected)}"
    fuzzed, truth = OPERATIONS[spec["op"]], dict[str, Tensor]()
    near: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
    for name, reference in expected.items():
        got = found[name]
        if got.shape != reference.shape or got.dtype != reference.dtype:
            return f"{name}: {got.dtype} {tuple(got.shape)}, expected {reference.dtype} {tuple(reference.shape)}"
        wrong = _different(got, reference)
        if not wrong:
            continue
        if name in operation.exact:
            return f"{name}: {wrong} of {got.numel()} elements differ"
        truth = truth or operation.run(_wide(fuzzed.build(spec)), "reference")
        eps = torch.finfo(reference.dtype).eps * (32 if reference.dtype == torch.float64 else 1)
        allowed = 2 * relative_error(reference, truth[name]) + operation.floor * fuzzed.loose(spec) * eps
        error = relative_error(got, truth[name])
        if error > allowed:
            near = near or [_perturbed_outputs(spec, seed) for seed in range(4)]
            effect = max(relative_error(each[name], truth[name]) for each, _ in near)
            allowed = max(allowed, *(2 * relative_error(own[name], each[name]) for each, own in near)) + EFFECT * effect
            summed = eps if reference.dtype == torch.float64 else torch.finfo(torch.float32).eps
            allowed += 32 * summed * _largest(fuzzed.build(spec)) / (_largest({name: truth[name]}) or 1.0)
        if error > allowed and not math.isnan(allowed):
            return f"{name}: error {error:.3g}, allowed {allowed:.3g}"
    return None


def _different(got: Tensor, reference: Tensor) -> int:
    """How many elements differ in their bits; any NaN equals any other."""
    return int(((bits_of(got) != bits_of(reference)) & ((got == got) | (reference == reference))).sum())


def _largest(inputs: Mapping[str, object]) -> float:
    """The largest finite magnitude in floating-point tensors; 0 if there are none."""
    each = (value for value in inputs.values() if isinstance(value, Tensor) and value.is_floating_point())
    return max((float(x.nan_to_num(0, 0, 0).abs().max()) for x in each if x.numel()), default=0.0)


def _perturbed_outputs(spec: Spec, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The definition's outputs in float64 and in the case's dtype, for perturbed inputs. Seed 0 sets denormal numbers
    to 0, as AVX-512's products of bfloat16 do."""
    dtype, generator = DTYPES[spec["dtype"]], torch.Generator().manual_seed(seed)
    eps, least = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal

    def moved(x: Tensor) -> Tensor:
        if seed == 0:
            return torch.where(x.abs() < least, 0, x)
        up, down = (2 * torch.rand(2, *x.shape, dtype=torch.float64, generator=generator) - 1).unbind()
        return (x.double() * (1 + 2 * eps * up) + least * down).to(x.dtype)

    inputs, run = _each(OPERATIONS[spec["op"]].build(spec), moved), _verified(spec).run
    return run(_wide(inputs), "reference"), run(inputs, "reference")


def _wide(inputs: Mapping[str, object]) -> dict[str, object]:
    return _each(inputs, torch.Tensor.double)


def _each(inputs: Mapping[str, object], change: Callable[[Tensor], Tensor]) -> dict[str, object]:
    floating = {name for name, value in inputs.items() if isinstance(value, Tensor) and value.is_floating_point()}
    return {name: change(value) if name in floating else value for name, value in inputs.items()}  # type: ignore[arg-type]


def smaller(spec: Spec) -> Iterator[Spec]:
    """Specs with one value replaced by a simpler one; for each key the simplest value comes first."""
    for key, value in spec.items():
        if key in ("op", "on", "dtype", "seed"):
            continue
        tries: list[object] = []
        if key.endswith(".kind"):
            tries = list(KINDS[: KINDS.index(value)])
        elif key.endswith(".layout"):
            tries = list(LAYOUTS[: LAYOUTS.index(value)])
        elif isinstance(value, bool):
            tries = [False] if value else []
        elif isinstance(value, int):
            tries = sorted({0, 1, value // 2, value - 1} - {value}) if value > 0 else []
        elif isinstance(value, float):
            tries = [1.0] if value != 1.0 else []
        elif value is not None and not isinstance(value, str):
            tries = [None]
        for each in tries:
            yield {**spec, key: each}


def minimised(spec: Spec, fails: Callable[[Spec], bool], tries: int = 300) -> Spec:
    """Simplifies a failing spec until no single simplification of it fails, for at most `tries` tries."""
    improved = True
    while improved and tries > 0:
        improved = False
        for each in smaller(spec):
            tries -= 1
            if tries <= 0:
                break
            if fails(each):
                spec, improved = each, True
                break
    return spec


def report(spec: Spec) -> str:
    small = minimised(spec, lambda each: OPERATIONS[each["op"]].fits(each) and failure(each) is not None)
    return f"{small['op']} on {small['on']}: {failure(small)}\n  {command(small)}"
