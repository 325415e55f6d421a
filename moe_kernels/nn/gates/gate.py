"""Gate and GateOutput: the interface of all gates."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from moe_kernels import sizes
from moe_kernels._pytree import register
from moe_kernels.backends import is_batch_invariant
from moe_kernels.nn._invariance import call_linear
from moe_kernels.nn._invariance import linear as _linear
from moe_kernels.nn._mask import mean, real_rows, real_tokens
from moe_kernels.nn._output import OutputModule
from moe_kernels.nn._parameters import KeepsFloat32
from moe_kernels.nn._recompute import noise_generator
from moe_kernels.ops._autocast import without_autocast
from moe_kernels.ops._checks import INDEX, check_backend, check_int, check_rank, check_size, check_tensor
from moe_kernels.ops.topk_gate import topk_gate


@dataclass(frozen=True)
class GateOutput:
    """The experts of every token and their weights, for sparse and dense gates alike.

    * weights (T, K), floating, and experts (T, K), int32: -1 is no choice, and a token names no expert twice. Masked
      tokens have experts -1 and weights 0.
    * num_experts: E.
    * dense: if True, K = E and experts[t] is 0 .. E - 1 for every token t.
    * losses: scalars by name, already times their coefficients, to be added to the task's loss; none in evaluation.
    * records: detached tensors by name, from which `statistics` computes its scalars; with a mask the scalars.

    A registered pytree: weights, experts, losses and records are children, num_experts and dense constants.

    Example:
        >>> gate = GateOutput(torch.tensor([[0.7, 0.3]]), torch.tensor([[2, 0]], dtype=torch.int32), num_experts=3)
        >>> gate.gates
        tensor([[0.3000, 0.0000, 0.7000]])
    """

    weights: Tensor
    experts: Tensor
    num_experts: int
    dense: bool = False
    losses: dict[str, Tensor] = field(default_factory=dict)
    records: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of_gates(
        cls,
        gates: Tensor,
        losses: dict[str, Tensor] | None = None,
        records: dict[str, Tensor] | None = None,
        mask: Tensor | None = None,
    ) -> GateOutput:
        """The output of a dense gate that gives the weights `gates` (T, E). With a mask (T,) masked tokens have none,
        so that the output counts as sparse, and the records are reduced to the statistics of the real tokens."""
        experts = torch.arange(gates.shape[1], dtype=torch.int32, device=gates.device).expand(gates.shape)
        weights, experts = real_choices(gates, experts, mask)
        records = masked_records(records or {}, mask)
        return cls(weights, experts, gates.shape[1], mask is None, losses or {}, records)

    @property
    def gates(self) -> Tensor:
        """(T, E): every expert's weight, 0 if it was not chosen."""
        if self.dense:
            return self.weights
        # Choices without an expert (-1) go to an extra column, so that they overwrite no weight.
        columns = torch.where(self.experts < 0, self.num_experts, self.experts).long()
        zeros = self.weights.new_zeros(self.weights.shape[0], self.num_experts + 1)
        return zeros.scatter(1, columns, self.weights)[:, : self.num_experts]

    @property
    def statistics(self) -> dict[str, Tensor]:
        """Scalars by name: each record's mean; "experts_per_sample": number of weights >= 1e-5, mean over tokens."""
        return {name: _statistic(name, record) for name, record in self.records.items()}

    @property
    def loss(self) -> Tensor:
        """(): the sum of the losses, 0 if there are none."""
        return sum(
            self.losses.values(),
            self.weights.new_zeros((), dtype=torch.promote_types(self.weights.dtype, torch.float32)),
        )


register(GateOutput, constants=("num_experts", "dense"))


def _statistic(name: str, record: Tensor) -> Tensor:
    values = _values(name, record)
    return values.mean() if values.numel() else values.sum()  # no NaN for an empty batch


def _values(name: str, record: Tensor) -> Tensor:
    """The values whose mean is the statistic `name`; a record of no dimensions is the statistic."""
    return ((record >= 1e-5).sum(-1) if name == "experts_per_sample" and record.dim() else record).float()


def real_choices(weights: Tensor, experts: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """weights and experts (T, K): 0 and -1 for masked tokens."""
    if mask is None:
        return weights, experts
    return real_rows(weights, mask), torch.where(mask[:, None], experts, -1)


def masked_records(records: dict[str, Tensor], mask: Tensor | None) -> dict[str, Tensor]:
    """The records with those of (T, ...) reduced to their statistics over the real tokens; unchanged without a mask."""
    if mask is None:
        return records
    return {name: mean(_values(name, each), mask).mean() if each.dim() else each for name, each in records.items()}


class Gate(KeepsFloat32, OutputModule):
    """A gate: `gate(x, ids=None, mask=None) -> GateOutput` for tokens x (T, D) and ids (T,), such as users or
    indices of a vocabulary. mask (T,) bool is True for real tokens: a masked token gets experts -1 and weights 0, is
    in no loss or statistic, and its x and id are not read. A gate of your own needs `mask` only in layers that are
    called with one.

    Gates with parameters convert x to the dtype of the parameters and compute in this dtype, also under autocast, since
    bfloat16 logits could lead to other choices. Autocast does act on the experts, which CompetitionGate calls to choose
    by their outputs.

    Gates draw random numbers from torch's own generator or from their argument `generator`. State dicts do not hold
    `generator`, and torch.utils.checkpoint does not restore it: if a checkpoint repeats a forward that draws from it,
    the gate raises RuntimeError. torch.compile breaks its graph where a gate draws from its `generator`.

    keep_float32: if True, float32 parameters and buffers stay float32 where `.bfloat16()`, `.half()` or `.to()` of the
    gate or of its model would make them 16-bit. A gate without a `dtype` is float32 too where torch's default dtype is
    16-bit. Set keep_float32 to False on a gate before such a call to convert the gate too. A constructor's `dtype` is
    always obeyed. FSDP2 casts parameters itself. A gate stays float32 if it is wrapped first, without a policy:
    fully_shard(layer.gate), and then fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)).

    Example:
        >>> class First(Gate):  # a gate of your own: every token goes to expert 0
        ...     def forward(self, x, ids=None):
        ...         experts = torch.zeros(len(x), 1, dtype=torch.int32)
        ...         return GateOutput(x.new_ones(len(x), 1), experts, self.num_experts)
        >>> MoE(First(4), ExpertMLP(4, 16, 32))(torch.randn(8, 16)).plan.kept
        tensor([8, 0, 0, 0], dtype=torch.int32)
    """

    def __init__(self, num_experts: int, fewest: int = 1, dim: int | None = None) -> None:
        """fewest: smallest num_experts allowed. dim: features D of x, or None if no parameter depends on D."""
        super().__init__()
        name = type(self).__name__
        if dim is not None:
            check_size(name, "dim", dim)
        self.num_experts = check_int(name, "num_experts", num_experts, fewest, 2**31 - 1, "experts")

    def forward(self, x: Tensor, ids: Tensor | None = None, mask: Tensor | None = None) -> GateOutput:
        raise NotImplementedError

    def real(self, x: Tensor, ids: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x (T, D) and ids (T,) with zeros for masked tokens; raises unless mask is None or (T,) bool."""
        return (x, ids) if mask is None else real_tokens(type(self).__name__, x, ids, mask)

    def _logits(self, x: Tensor, ids: Tensor | None = None) -> Tensor | None:
        """The router's logits (T, E) without noise, for `router_probs`; None for a gate without such logits."""
        return None

    @torch.no_grad()
    def router_probs(self, x: Tensor, ids: Tensor | None = None) -> Tensor | None:
        """(T, E): the probabilities that the router gives all experts for x (T, D), detached and without noise.

        None for gates without such probabilities, as HashGate and DSelectKGate. The entropy of the probabilities
        measures the router's uncertainty (CompeteSMoE, appendix C.5).
        """
        logits = self._logits(x, ids)
        return None if logits is None else self._probs(logits)

    def _probs(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    def project(self, linear: nn.Module, x: Tensor) -> Tensor:
        """linear(x) (T, out) in the dtype of the linear's weight.

        Calls the module, so that its hooks run, and so that a module which wraps or replaces an nn.Linear, such as
        LoRA's, computes what it adds.
        """
        weight = _weight_of(linear)
        self._check_x(x, getattr(linear, "in_features", weight.shape[-1]))
        with without_autocast(x.device.type):
            x = x.to(weight.dtype) if weight.is_floating_point() else x
            return call_linear(linear, x) if is_batch_invariant() else linear(x)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (T, D) times weight (out, D) transposed, plus bias (out), in the dtype of weight: (T, out)."""
        self._check_x(x, weight.shape[1])
        if weight.is_meta and not x.is_meta:
            raise RuntimeError(
                f"{type(self).__name__}: the gate's own weight {tuple(weight.shape)} is on the meta device and x on "
                f"{x.device}; call the gate itself, so that the hooks that load offloaded weights run"
            )
        with without_autocast(x.device.type):
            return _linear(x.to(weight.dtype), weight, bias)

    def _check_x(self, x: Tensor, dim: int) -> None:
        if x.dim() != 2 or x.shape[1] != dim:
            raise ValueError(f"{type(self).__name__}: x must be (T, {dim}), got shape {tuple(x.shape)}")

    def check_ids(self, x: Tensor, ids: Tensor | None, count: int, meaning: str) -> Tensor:
        """ids (T,) of the tokens x (T, D) as int64; ValueError or TypeError if ids are None or do not fit x.

        Ids outside [0, count) raise ValueError in eager mode on the CPU. On a GPU a check would make the host wait.
        There, and in compiled code, negative ids become `count`, so that a lookup in `count` rows fails for them too.
        meaning: what the ids are, for the message.
        """
        name = type(self).__name__
        if ids is None:
            raise ValueError(f"{name}: expected ids, {meaning}; got None")
        check_tensor(name, "ids", ids, INDEX)
        check_rank(name, "x", x, "(T, D)")
        if ids.shape != x.shape[:1]:
            raise ValueError(f"{name}: ids must be {tuple(x.shape[:1])} for x {tuple(x.shape)}, got {tuple(ids.shape)}")
        real = sizes.has_values(ids)
        if real and bool(((ids < 0) | (ids >= count)).any()):
            raise ValueError(f"{name}: ids must be from 0 to {count - 1}, got {ids.min().item()} to {ids.max().item()}")
        ids = ids.long()
        return ids if real else ids.where(ids >= 0, count)  # as an index, -1 would be the last id

    known = check_ids  # former name, for existing subclasses


def _weight_of(linear: nn.Module) -> Tensor:
    """The weight of a linear layer; of a wrapper without `weight`, its first parameter."""
    weight = getattr(linear, "weight", None)
    return weight if isinstance(weight, Tensor) else next(linear.parameters())


class TopKRouter(Gate):
    """Base of gates that choose k experts by their `_logits`: weights, experts = topk_gate(logits, k)."""

    k: int
    backend: str | None

    def __init__(self, dim: int, num_experts: int, k: int, backend: str | None) -> None:
        super().__init__(num_experts, dim=dim)
        name = type(self).__name__
        self.k = check_int(name, "k", k, 1, num_experts, "choices among E experts")
        self.backend = check_backend(name, backend)

    def forward(self, x: Tensor, ids: Tensor | None = None, mask: Tensor | None = None) -> GateOutput:
        x, ids = self.real(x, ids, mask)
        choices = topk_gate(self._logits(x, ids), self.k, backend=self.backend)
        return GateOutput(*real_choices(*choices, mask), self.num_experts)

    def _logits(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"k={self.k}"


def expert_noise(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    """N(0, 1 / E^2) like logits (T, E), V-MoE's noise."""
    return normal_like(logits, generator) / logits.shape[-1]


def normal_like(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """N(0, 1) like x. torch.compile cannot trace torch.randn with symbolic sizes and generator=None."""
    return torch.empty_like(x).normal_(generator=noise_generator(generator))
