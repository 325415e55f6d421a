"""The local search of COMET trees: a permutation of the experts, learned with the gate and then frozen.

    S = sinkhorn(U, R, tau)                            (eqs. 7 and 8; U is learned; R iterations at temperature tau)
    g' = g S / sum(g S)                                (g: gates before, g': after the permutation)
    regulariser = zeta * (-sum S log(S + 1e-6) - sum Z log(Z + 1e-6)),  Z = S / row sums; of several S the mean

Stage one is the training steps t = 1 .. T - 1. At t = T linear assignment finds the (hard) permutation nearest to the
last S, and from then on U is not trained. With the permutation's matrix P, the paper prints P g; the published code and
this file compute g P.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from moe_kernels.backends import is_batch_invariant
from moe_kernels.nn._compile import on_the_host
from moe_kernels.nn._distributed import attach_unused
from moe_kernels.nn._invariance import linear, refuse_random, spread, total
from moe_kernels.nn._parameters import KeepsFloat32, router_dtype
from moe_kernels.nn._recompute import Remembered, is_recomputing
from moe_kernels.ops._autocast import without_autocast
from moe_kernels.ops._checks import check_backend, check_choice, check_int, check_number
from moe_kernels.ops.harden import harden
from moe_kernels.ops.sinkhorn import sinkhorn

SCHEDULES = ("paper", "annealed", "wide")
START_TAU = 0.1  # tau at which every sinkhorn call of the schedules "annealed" and "wide" begins


class LocalSearch(KeepsFloat32):
    """Permutes gate weights: in stage one of training by a learned soft permutation S, later by a hard one.

        gates, regulariser = search(gates)

    Evaluation uses the hard permutation in both stages. In training every call is a step, except a forward that
    torch.utils.checkpoint repeats in the backward pass. The repeated forward takes the tau and iterations of the one
    that it repeats; RuntimeError if torch's checkpoint does not say which one that is and several forwards ran before
    the backward. If gates share a permutation, call `permutation()` once a step
    and `permute` for each gate.

    Args:
        num_experts: n.
        steps: T, the training step that ends stage one (the paper: after 1 to 10 epochs). With 0 or 1 stage one has
            no step, and the permutation is the identity.
        permutations: 1, as in the paper, or the number of choices that a gate makes for a token, such as one in each of
            several trees. In the second case gates are (..., permutations, n), each choice has its own permutation, and
            the result is the sum over choices.
        zeta: coefficient of the regulariser (see the module's docstring).
        renormalise: whether the permuted gates are divided by their sum; False for gates that need not sum to one.
        schedule: "paper": in step t, tau = 10^(-3 - 4 t / T) and int(20 + 130 t / T) iterations. When stage one ends, S
            is seldom a permutation (for 0 of 100 random U with n = 16), so the loss may jump at the switch.
            "annealed": in every step sinkhorn cools from tau = 0.1 to the paper's tau in at least 50 iterations, and S
            is then rounded to a doubly stochastic matrix. "wide": as "annealed", but sinkhorn cools in 150 iterations,
            and the tau that it reaches falls from 0.1 to 1e-6 over stage one. For each of the same 100 U, the last S
            of "annealed" and of "wide" is, within 2e-5, the permutation P with the largest sum(U * P).
        bound: U starts uniform in (-bound, bound), drawn by `generator`; None is torch's own generator.
        backend: as in sinkhorn.
        noise: in stage one S is computed from U + noise * Gumbel(0, 1), drawn in every step by torch's own generator
            (Gumbel-Sinkhorn, Mena et al. 2018); the last noisy S becomes the permutation. The paper has 0.

    torch.compile breaks its graph in every training step; in evaluation only where `source` is computed again (see
    State).

    State: the parameter `scores` (permutations, n, n) is U. Buffers: `soft`, the last S; `source`, the hard permutation
    (expert j takes the gate source[j]); `assigned`, S in stage one, then the matrix P of the hard permutation;
    `distance` (permutations), the largest absolute element of S - P at the switch, NaN before and if T < 2. State dicts
    also hold `step`. Evaluation computes `source` again if `assigned` was written since. So
    torch.optim.swa_utils.AveragedModel with use_buffers=True has the permutation nearest to its averaged `assigned`.
    Training in stage two notices such a write only at the next load_state_dict(), train() or eval().

    From step T on the gradient of U is None, or 0 if torch.distributed is initialised, since DDP needs a gradient.

    Raises:
        ValueError, TypeError: an argument out of range or of another type; in forward, gates of another shape.
        ImportError: scipy is missing, which linear assignment needs: pip install moe_kernels[assignment].

    Source: COMET trees, section 4, and the published code (schedule, entropies, direction).

    Example:
        >>> search = LocalSearch(4, steps=10)
        >>> gates, regulariser = search(torch.rand(3, 4).softmax(-1))
        >>> gates.shape, search.step, search.hardened
        (torch.Size([3, 4]), 1, False)
    """

    soft: Tensor
    assigned: Tensor
    source: Tensor
    distance: Tensor

    def __init__(
        self,
        num_experts: int,
        steps: int,
        *,
        permutations: int = 1,
        zeta: float = 1e-4,
        renormalise: bool = True,
        schedule: str = "paper",
        bound: float = 0.05,
        noise: float = 0.0,
        backend: str | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dtype = router_dtype(dtype)
        n = check_int("LocalSearch", "num_experts", num_experts, 1, 2**31 - 1, "experts")
        count = check_int("LocalSearch", "permutations", permutations, 1, 2**31 - 1, "permutations")
        self.steps = check_int("LocalSearch", "steps", steps, 0, 2**63 - 1, "the step that ends stage one")
        check_choice("LocalSearch", "schedule", schedule, SCHEDULES)
        if importlib.util.find_spec("scipy") is None:
            raise ImportError("LocalSearch: hardening needs scipy: pip install moe_kernels[assignment]")
        self.zeta = check_number("LocalSearch", "zeta", zeta)
        self.bound = check_number("LocalSearch", "bound", bound, 0, meaning="the limit of the initial scores")
        self.noise = check_number("LocalSearch", "noise", noise, 0, meaning="the factor of Gumbel noise")
        self.renormalise, self.schedule, self.step = renormalise, schedule, 0
        self._taken = Remembered()
        self.backend = check_backend("LocalSearch", backend)
        self.scores = nn.Parameter(torch.empty(count, n, n, device=device, dtype=dtype))
        self.register_buffer("soft", torch.empty(count, n, n, device=device, dtype=dtype))
        self.register_buffer("assigned", torch.empty_like(self.soft))
        self.register_buffer("source", torch.empty(count, n, device=device, dtype=torch.int64))
        self.register_buffer("distance", torch.empty(count, device=device, dtype=dtype))
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws U anew and begins stage one, with the identity as permutation."""
        self.scores.uniform_(-self.bound, self.bound, generator=generator)
        n = self.source.shape[1]
        self.soft.copy_(torch.eye(n, device=self.soft.device))
        self.assigned.copy_(self.soft)
        self.source.copy_(torch.arange(n, device=self.source.device))
        self.distance.fill_(torch.nan)
        self.step = 0
        self._record_hardened()

    def _record_hardened(self) -> None:
        """Records the tensor `assigned` and its version: `source` was computed from them."""
        self._stale, self._hardened_from = False, (self.assigned, _version(self.assigned))

    def _is_stale(self) -> bool:
        """Whether `assigned` was written after `source` was computed, as by a step, a state dict or a model average."""
        if not is_compiling():
            tensor, version = self._hardened_from
            self._stale = self._stale or tensor is not self.assigned or version != _version(tensor)
        return self._stale

    def train(self, mode: bool = True) -> LocalSearch:
        super().train(mode)
        self._is_stale()  # updates `_stale`: torch.compile can read this attribute, but not versions of tensors
        return self

    @property
    def hardened(self) -> bool:
        """Whether stage two has begun: the permutation is hard, and U receives no gradient."""
        return self.step >= self.steps

    def temperature(self, step: int) -> float:
        """tau of step 1 .. steps - 1 of training: falls from 1e-3 towards 1e-7, for "wide" from 0.1 towards 1e-6."""
        if self.schedule == "wide":
            return START_TAU * 10 ** (-5 * step / self.steps)
        return 10 ** (-3 - 4 * step / self.steps)

    def iterations(self, step: int) -> int:
        """R of step 1 .. steps - 1 of training: 20 to 149, for "wide" 150. For "annealed" sinkhorn gets max(R, 50)."""
        if self.schedule == "wide":
            return 150
        return int(20 + 130 * step / self.steps)

    def forward(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        """gates (..., n), or (..., permutations, n), -> gates (..., n) and the regulariser (), 0 in evaluation."""
        p = self.permutation()
        return self.permute(gates, p), self.regulariser(p) if self.training else gates.new_zeros(())

    def permutation(self) -> Tensor | None:
        """The permutation to apply: S (permutations, n, n), or None for the hard one. In training a call is a step."""
        if self.training:
            return self._advance()
        if self._is_stale():
            self._harden()
        return None

    @on_the_host("LocalSearch: every step has a temperature and iterations of its own")
    def _advance(self) -> Tensor | None:
        repeated, hardened = is_recomputing(), self.hardened
        step = self._taken.take("LocalSearch", self._next_step)
        if step >= self.steps:
            if hardened and self._stale and not repeated:
                # not _is_stale(): DDP broadcasts buffers, which changes their versions in every step
                self._harden()
            elif not hardened and step > 1:  # else stage one had no step, and the permutation stays the identity
                self._harden()
                self.assigned.copy_(_matrix(self.source, self.soft))
                self.distance.copy_((self.soft - self.assigned).abs().amax((1, 2)))
                self._record_hardened()
            return None
        tau, iterations = self.temperature(step), self.iterations(step)
        options: dict[str, Any] = {"tau": tau, "backend": self.backend}
        if self.noise > 0:
            refuse_random("LocalSearch", f"noise={self.noise:g}")
            options["noise"] = -self.noise * torch.empty_like(self.scores).exponential_().log()
        if self.schedule == "paper":
            soft = sinkhorn(self.scores, iterations, **options)
        else:
            soft = sinkhorn(self.scores, max(iterations, 50), anneal_from=START_TAU, **options)
            soft = round_to_doubly_stochastic(soft)
        if not repeated:  # the last step may be a later one
            self.soft.copy_(soft.detach())
            self.assigned.copy_(self.soft)
        return soft

    def _next_step(self) -> int:
        """Counts a step of stage one, and returns the number of the step; in stage two T or more."""
        self.step += not self.hardened
        return self.step

    def permute(self, gates: Tensor, p: Tensor | None) -> Tensor:
        """gates times p, or gathered by `source` if p is None; summed over choices.

        If `renormalise`, the result is divided by its sum over experts, unless the sum is 0.
        """
        count, n = self.source.shape
        if gates.shape[-1:] != (n,) or (count > 1 and gates.shape[-2:] != (count, n)):
            expected = f"(..., {count}, {n})" if count > 1 else f"(..., {n})"
            raise ValueError(f"LocalSearch: gates must be {expected}, got shape {tuple(gates.shape)}")
        choices = gates if count > 1 else gates[..., None, :]  # (..., permutations, n)
        if p is None:
            permuted = choices.gather(-1, self.source.expand(choices.shape))
            permuted = attach_unused(permuted, (self.scores,)) if self.training else permuted
        else:
            with without_autocast(gates.device.type):
                permuted = _times(choices.to(p.dtype), p)
        permuted = total(permuted, -2) if count > 1 else permuted[..., 0, :]
        if self.renormalise:
            sums = total(permuted, -1)
            permuted = permuted / spread(torch.where(sums == 0, 1, sums), -1, n)
        return permuted.to(gates.dtype)

    def regulariser(self, p: Tensor | None) -> Tensor:
        """The regulariser () in the module's docstring, with S = p, or the last S if p is None."""
        soft = self.soft if p is None else p
        totals = soft.sum(-1, keepdim=True)
        normalised = soft / torch.where(totals == 0, 1, totals)
        return self.zeta * (_entropy(soft) + _entropy(normalised)).mean()

    def __getstate__(self) -> dict[str, Any]:
        self._is_stale()  # keeps in `_stale` whether `assigned` was written; a copied tensor's own count is 0
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._hardened_from = self.assigned, _version(self.assigned)

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.step, device="cpu")

    def set_extra_state(self, state: Tensor | dict[str, int]) -> None:
        self.step = _step_of(state)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        soft, step = state_dict.get(prefix + "soft"), _step_of(state_dict.get(prefix + "_extra_state", 0))
        if soft is not None and prefix + "assigned" not in state_dict:  # saved by an older version
            hard = step == 0 or step >= self.steps
            state_dict[prefix + "assigned"] = _matrix(state_dict[prefix + "source"], soft) if hard else soft
        super()._load_from_state_dict(state_dict, prefix, *args)
        # `source` may be older than `assigned`, as in stage one or in a model average.
        if self.assigned.is_meta or bool((_matrix(self.source, self.soft) != self.assigned).any()):
            self._stale = True
        else:
            self._record_hardened()

    def extra_repr(self) -> str:
        count, n = self.source.shape
        stage = "hard" if self.hardened else f"step {self.step} of {self.steps}"
        return f"num_experts={n}, permutations={count}, schedule={self.schedule!r}, {stage}"

    @on_the_host("LocalSearch: linear assignment runs on the host")
    def _harden(self) -> None:
        """Sets `source`, the gate of each expert. harden returns the expert of each gate; argsort inverts this."""
        self.source.copy_(harden(self.assigned).argsort(-1))
        self._record_hardened()


def _step_of(state: Any) -> int:
    """The step in an extra state; older versions saved a dict."""
    return int(state["step"] if isinstance(state, dict) else state)


def _times(choices: Tensor, p: Tensor) -> Tensor:
    """choices (..., permutations, n), each times its matrix of p (permutations, n, n)."""
    if not is_batch_invariant():
        return torch.einsum("...pi,pij->...pj", choices, p)
    return torch.stack([linear(each, matrix.t()) for each, matrix in zip(choices.unbind(-2), p, strict=True)], -2)


def _matrix(source: Tensor, like: Tensor) -> Tensor:
    """The permutation matrices (permutations, n, n) of `source`, in the dtype of `like`."""
    return torch.zeros_like(like).scatter_(1, source[:, None], 1)


def _version(tensor: Tensor) -> int:
    """Number of writes to a tensor; -1 for inference tensors, for which torch counts none."""
    return -1 if tensor.is_inference() else tensor._version


def round_to_doubly_stochastic(p: Tensor) -> Tensor:
    """A doubly stochastic matrix near p (..., n, n) >= 0 (Altschuler, Weed, Rigollet 2017, algorithm 2).

    Divides each row whose sum exceeds one by this sum, then each column likewise. Then, with r = 1 - row sums and
    c = 1 - column sums, adds r c^T / sum(r).
    """
    p = p / p.sum(-1, keepdim=True).clamp(min=1)
    p = p / p.sum(-2, keepdim=True).clamp(min=1)
    row, column = 1 - p.sum(-1, keepdim=True), 1 - p.sum(-2, keepdim=True)
    missing = row.sum(-2, keepdim=True)
    return p + row * column / torch.where(missing == 0, 1, missing)


def _entropy(p: Tensor) -> Tensor:
    return -(p * (p + 1e-6).log()).sum((-2, -1))
