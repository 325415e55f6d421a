"""k-winner-take-all, by definition: sort every row, keep its k largest values.

COMET fixed routing, eqs. 3 to 8: the winners among the pre-activations of the routing network mask these
pre-activations and the activations of the trained network.
"""

import torch
from torch import Tensor


def kwta(x: Tensor, k: int, *, values: Tensor | None = None, ties: str = "index") -> Tensor:
    """values (or x) where kwta_mask(x) is True, +0 elsewhere; the mask is a constant to autograd."""
    source = x if values is None else values
    return torch.where(kwta_mask(x.detach(), k, ties=ties), source, torch.zeros_like(source))


def kwta_mask(x: Tensor, k: int, *, ties: str = "index") -> Tensor:
    """True where x (..., N) is among the k largest of its row. -0.0 == 0.0, and NaN ranks above +inf.

    k = 0 selects nothing, k = N everything. Otherwise, with v the row and v_(j) its j-th largest value:
      "index"   exactly k elements win; of equal values those with the lowest indices
      "strict"  v_i wins if |{j : v_j >= v_i}| <= k (eq. 3), that is if v_i > v_(k+1)
      "all"     v_i wins if v_i >= v_(k)
    """
    ranked, order = torch.sort(x, dim=-1, descending=True, stable=True)  # torch ranks NaN highest
    n = x.shape[-1]
    if ties == "index":
        return torch.zeros_like(x, dtype=torch.bool).scatter_(-1, order[..., :k], True)
    if k == n or (ties == "all" and k == 0):
        return torch.full_like(x, k == n, dtype=torch.bool)
    if ties == "strict":
        return _greater(x, ranked[..., k : k + 1])
    if ties == "all":
        return ~_greater(ranked[..., k - 1 : k], x)
    raise ValueError(f"kwta: ties must be 'index', 'strict' or 'all', got {ties!r}")


def kwta_bits(x: Tensor, k: int, *, ties: str = "index") -> tuple[Tensor, Tensor]:
    """`kwta` of x, and its mask packed to bits."""
    return kwta(x.detach(), k, ties=ties), pack_bits(kwta_mask(x.detach(), k, ties=ties))


def kwta_apply(values: Tensor, bits: Tensor) -> Tensor:
    """values (..., N) where the bit of the packed mask is 1, +0 elsewhere."""
    return torch.where(unpack_bits(bits, values.shape[-1]), values, torch.zeros_like(values))


def pack_bits(mask: Tensor) -> Tensor:
    """bool (..., N) -> int32 (..., ceil(N / 32)): bit i of word w is element 32 w + i, and bits past N are 0."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 32)).unflatten(-1, (-1, 32))
    words = (padded.long() << torch.arange(32, device=mask.device)).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def unpack_bits(bits: Tensor, n: int) -> Tensor:
    """int32 (..., ceil(N / 32)) -> bool (..., N)."""
    return ((bits[..., None] >> torch.arange(32, device=bits.device)) & 1).bool().flatten(-2)[..., :n]


def _greater(a: Tensor, b: Tensor) -> Tensor:
    return (a > b) | (a.isnan() & ~b.isnan())
