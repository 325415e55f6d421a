"""Training on several ranks: torchrun --nproc-per-node 2 -m moe_kernels train RECIPE --expert-parallel 2.

Every rank builds the same task, keeps its share of the experts, and takes a part of every training batch. Gradients are
means over ranks, weighted by samples. A checkpoint has unsharded tensors, so one process or another number of ranks can
continue from it.

Whether the experts of a competition gate compete is drawn from seed, layer and step, so that all ranks do the same.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from moe_kernels.nn.experts import Experts
from moe_kernels.nn.parallel import ExpertParallel, clip_grad_norm_
from moe_kernels.papers.recipes import Batch, Recipe, Routing, Splits, Task
from moe_kernels.papers.train.agreement import Agreement, check_agreement, compete_in_turn, follow_agreement
from moe_kernels.papers.train.loop import Random, Run
from moe_kernels.papers.train.statistics import Row

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ranks:
    """The ranks of a training. The mesh has two dimensions: experts are sharded over "ep" and replicated over "dp"."""

    mesh: DeviceMesh

    @property
    def size(self) -> int:
        return self.mesh.size()

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def wait(self) -> None:
        dist.barrier()

    def on_first(self, action: Callable[[], object]) -> None:
        """Calls `action` on rank 0. If it raises, every rank raises, so that none waits for a rank that has ended."""
        failure: Exception | None = None
        if self.rank == 0:
            try:
                action()
            except Exception as error:
                failure = error
        found = [failure and (isinstance(failure, OSError | ValueError), str(failure))]
        try:
            dist.broadcast_object_list(found, 0)
        finally:
            if failure is not None:
                raise failure
        if found[0]:
            expected, text = found[0]
            raise (OSError if expected else RuntimeError)(f"rank 0 failed: {text}")

    def run(self, recipe: Recipe, seed: int, data: Splits) -> Run:
        return ParallelRun(recipe, seed, data, ranks=self)

    def check(self, recipe: Recipe, data: Splits) -> Agreement:
        """The agreement of these ranks with a SerialRun on backend "reference", for `check_steps` steps."""
        run, found = self.run(recipe, recipe.seed, data), [Agreement([])]
        compete_in_turn(run.task.model)

        def make() -> Run:
            serial = SerialRun(recipe, recipe.seed, data, parts=self.size)
            compete_in_turn(serial.task.model)
            return serial

        if self.rank == 0:
            found = [check_agreement(run, make, recipe.check_steps)]
        else:
            follow_agreement(run, recipe.check_steps)
        dist.broadcast_object_list(found, 0)
        return found[0]


@contextmanager
def init_ranks(expert_parallel: int, device: str, timeout: float | None) -> Iterator[Ranks]:
    """Connects this process, a rank that torchrun started, with the other ranks.

    expert_parallel: number of ranks that share the experts ("ep" of the mesh).
    timeout: seconds that a rank waits for the others; None: torch's default.

    Raises:
        ValueError: not started by torchrun, or expert_parallel does not divide the number of ranks.
        RuntimeError: a rank did not join in time.
    """
    if any(name not in os.environ for name in VARIABLES):
        raise ValueError("--expert-parallel needs torchrun: torchrun --nproc-per-node 2 -m moe_kernels train ...")
    size = int(os.environ["WORLD_SIZE"])
    if size % expert_parallel:
        raise ValueError(f"--expert-parallel must divide the number of ranks, {size}; got {expert_parallel}")
    limit = None if timeout is None else datetime.timedelta(seconds=timeout)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=limit)
    try:
        yield Ranks(init_device_mesh(device, (size // expert_parallel, expert_parallel), mesh_dim_names=("dp", "ep")))
    finally:
        dist.destroy_process_group()


def part(batch: Batch, rank: int, ranks: int) -> tuple[Batch, float]:
    """A rank's samples of a batch, and as a weight their number divided by the mean number over the ranks.

    A rank without samples gets the first sample of the batch with weight 0.
    """
    size = len(batch.tensors[0])
    start, stop = size * rank // ranks, size * (rank + 1) // ranks
    weight = (stop - start) * ranks / size
    own = slice(start, stop) if stop > start else slice(0, 1)
    rows = None if batch.rows is None else batch.rows[own]
    return Batch(tuple(each[own] for each in batch.tensors), rows, batch.start), weight


@dataclass
class ParallelRun(Run):
    ranks: Ranks = field(kw_only=True)

    def __post_init__(self) -> None:
        if self.recipe.amp == "float16":  # ranks would skip steps of which only some have an infinite gradient
            raise ValueError("--amp float16 needs one process; with --expert-parallel take bfloat16")
        super().__post_init__()
        self._flags = [{name: group.get(name) for name in ("fused", "foreach")} for group in self._groups]
        _shard(self.task, self.ranks.mesh["ep"])
        self._route, self.task.routing = self.task.routing, self._routing  # type: ignore[method-assign]

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.task.optimiser.param_groups

    def differentiate(self, batch: Batch) -> Mapping[str, Tensor]:
        own, weight = part(batch, self.ranks.rank, self.ranks.size)
        with rank_random(self, self.ranks.rank):
            losses = self.losses(own)
            (losses["loss"] * weight).backward()
        average_gradients(self.task.model, self.ranks.mesh)
        means = torch.stack([each.detach() * weight / self.ranks.size for each in losses.values()])
        dist.all_reduce(means)
        return dict(zip(losses, means.unbind(), strict=True))

    def clip(self, max_norm: float) -> None:
        clip_grad_norm_(self.task.model, max_norm)

    def evaluate(self) -> Row:
        rows = [super().evaluate()]
        dist.broadcast_object_list(rows, 0)  # early stopping (Run.stopped) must be the same on all ranks
        return rows[0]

    def flops(self, known: bool = False) -> float:
        """The mean of the ranks' counts, which differ: a rank computes its experts for rows of other ranks too."""
        found = torch.tensor(super().flops(known), dtype=torch.float64, device=self.device)
        dist.all_reduce(found)
        return found.item() / self.ranks.size

    def gradients(self) -> list[Tensor | None]:
        return [_gather(each) for each in super().gradients()]

    def model_state(self) -> dict[str, Any]:
        return _gather(super().model_state())

    def state(self) -> dict[str, Any]:
        state = _gather(super().state())
        for group, flags in zip(state["optimiser"]["param_groups"], self._flags, strict=True):
            group.update(flags)  # the values before _disable_fused, for a run of one process
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        own = self.task.model.state_dict()
        model = {name: _shard_like(own.get(name), each) for name, each in state["model"].items()}
        optimiser = {**state["optimiser"], "state": {}}
        parameters = [parameter for group in self._groups for parameter in group["params"]]
        for index, each in state["optimiser"]["state"].items():
            parameter = parameters[index]
            optimiser["state"][index] = {
                name: _shard_like(parameter, value) if getattr(value, "shape", None) == parameter.shape else value
                for name, value in each.items()
            }
        super().load_state({**state, "model": model, "optimiser": optimiser})
        _disable_fused(self._groups)

    def _routing(self, batch: Batch) -> Sequence[Routing]:
        own, _ = part(batch, self.ranks.rank, self.ranks.size)
        found = []
        with rank_random(self, self.ranks.rank):
            layers = self._route(own)
        for layer in layers:
            parts: list[Any] = [None] * self.ranks.size
            dist.all_gather_object(parts, layer.active.cpu())
            found.append(Routing(torch.cat(parts).to(self.device)))
        return found


@dataclass
class SerialRun(Run):
    """One process that computes, one after the other, what `parts` ranks compute: the reference for ParallelRun."""

    parts: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._route, self.task.routing = self.task.routing, self._routing  # type: ignore[method-assign]

    def differentiate(self, batch: Batch) -> Mapping[str, Tensor]:
        model, sums = self.task.model, dict[str, Tensor]()
        parameters = {name for name, _ in model.named_parameters()}
        before = {k: v.clone() if isinstance(v, Tensor) else v for k, v in model.state_dict().items()}
        before = {k: v for k, v in before.items() if k not in parameters}  # buffers and extra state
        for rank in range(self.parts):
            if rank:
                model.load_state_dict(before, strict=False)
            own, weight = part(batch, rank, self.parts)
            with rank_random(self, rank):
                losses = self.losses(own)
                (losses["loss"] * weight / self.parts).backward()
            for name, each in losses.items():
                sums[name] = sums.get(name, 0) + each.detach() * weight / self.parts
        return sums

    def _routing(self, batch: Batch) -> Sequence[Routing]:
        parts = []
        for rank in range(self.parts):
            with rank_random(self, rank):
                parts.append(self._route(part(batch, rank, self.parts)[0]))
        return [Routing(torch.cat([each.active for each in layer])) for layer in zip(*parts, strict=True)]


def rank_random(run: Run, rank: int) -> AbstractContextManager[None]:
    """Inside the block torch has a random state from rank, step and seed; for rank 0 the block changes nothing."""
    return Random((rank * 1_000_003 + run.step) * 1_000_003 + run.seed, run.device).use() if rank else nullcontext()


def average_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Averages gradients over ranks: those of sharded experts over "dp", those of other parameters over all ranks.

    If only some ranks have a gradient of a parameter, it counts as 0 on the others.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        return
    present = torch.tensor([each.grad is not None for each in trained], dtype=torch.int32, device=mesh.device_type)
    dist.all_reduce(present, dist.ReduceOp.MAX)
    plain, sharded = [], []
    for parameter, has_gradient in zip(trained, present.tolist(), strict=True):
        if has_gradient and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if isinstance(parameter.grad, DTensor):
            sharded.append(parameter.grad.to_local())
        elif parameter.grad is not None:
            plain.append(parameter.grad)
    for grads, group in ((plain, dist.group.WORLD), (sharded, mesh.get_group("dp"))):
        if grads and group is not None and group.size() > 1:
            flat = torch.cat([each.flatten() for each in grads])
            dist.all_reduce(flat, group=group)
            flat /= group.size()
            for grad, mean in zip(grads, flat.split([each.numel() for each in grads]), strict=True):
                grad.copy_(mean.view_as(grad))


def _shard(task: Task, mesh: DeviceMesh) -> None:
    """Replaces the experts' parameters by this rank's shares, in the model and in its optimiser."""
    new: dict[nn.Parameter, nn.Parameter] = {}
    for module in task.model.modules():
        if isinstance(module, Experts):
            before = dict(module.named_parameters(recurse=False))
            parallelize_module(module, mesh, ExpertParallel())
            new.update((each, getattr(module, name)) for name, each in before.items())
    for group in task.optimiser.param_groups:
        group["params"] = [new.get(each, each) for each in group["params"]]
    _disable_fused(task.optimiser.param_groups)


def _disable_fused(groups: list[dict[str, Any]]) -> None:
    """Turns off an optimiser's fused and foreach modes, which reject groups that mix DTensors and plain tensors."""
    for group in groups:
        group.update(fused=False, foreach=False)


def _gather(value: Any) -> Any:
    """The value with all sharded tensors gathered, also in dicts, lists and tuples."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: _gather(each) for key, each in value.items()}
    return type(value)(map(_gather, value)) if isinstance(value, list | tuple) else value


def _shard_like(own: Any, value: Any) -> Any:
    """`value`, sharded like `own` if `own` is a DTensor and `value` an unsharded tensor."""
    if not isinstance(own, DTensor) or not isinstance(value, Tensor):
        return value
    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements)
