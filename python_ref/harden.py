"""The permutation nearest to a soft one: linear assignment, by scipy."""

from itertools import product

import torch
from torch import Tensor


def harden(soft: Tensor) -> Tensor:
    """soft (..., n, n) -> int64 (..., n): the permutation that maximises the sum over i of soft[i, permutation[i]]."""
    from scipy.optimize import linear_sum_assignment

    columns = torch.empty(soft.shape[:-1], dtype=torch.int64)
    matrices = soft.detach().double().cpu()
    for index in product(*map(range, soft.shape[:-2])):
        columns[index] = torch.as_tensor(linear_sum_assignment(matrices[index].numpy(), maximize=True)[1])
    return columns.to(soft.device)
