"""The permutation nearest to a soft one.

    columns = argmax over permutations c of sum_i soft[i, c_i]             (paper 001: P at the end of stage 1)

soft (..., n, n) -> columns (..., n) int64: row i goes to column c_i. Solved on the host, exactly, by scipy.
"""

from __future__ import annotations

from torch import Tensor

from moe_kernels import backends, library
from moe_kernels.ops._checks import FLOATING, check_square, check_tensor


def harden(soft: Tensor, *, backend: str | None = None) -> Tensor:
    """The column of each row under the assignment of the largest sum, a permutation whatever `soft` holds.

    Args:
        soft: (..., n, n), float32, bfloat16, float16 or float64; -inf forbids a pair.
        backend: "reference" or None.

    Returns:
        int64 (..., n), on the device of soft, a permutation of 0 .. n-1 for every matrix. Of several assignments with
        the same sum scipy chooses. Not differentiable. Waits for a GPU and solves on the host in O(n^3): for use once
        per training, not in every step.

    Raises:
        TypeError: soft is no tensor of those dtypes, or a torch.func transform.
        ValueError: soft is not (..., n, n), holds NaN or +inf, or forbids every permutation.
        ImportError: scipy is missing: pip install moe_kernels[assignment].
        BackendError: the named backend cannot run this.

    Source: paper 001, section 4.3 (the end of stage one of the local search).

    Example:
        >>> mk.harden(torch.tensor([[0.9, 0.1], [0.8, 0.2]]))  # 0.9 + 0.2 is more than 0.1 + 0.8
        tensor([0, 1])
    """
    check_tensor("harden", "soft", soft, FLOATING)
    check_square("harden", "soft", soft)
    backends.choose("harden", backend, soft)
    return library.ops.harden(soft.detach())
