"""The two-task recommender of COMET trees, supplement S1.2: shared experts, one gate for each task."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_kernels.nn.experts import Experts
from moe_kernels.nn.gates import Gate
from moe_kernels.nn.local_search import LocalSearch
from moe_kernels.nn.moe import MoEOutput, MultiGateMoE


class MMoE(nn.Module):
    """Users and movies -> watched logit (B,), rating (B,), and the output of the layer of experts.

        h = [embedding of the user, embedding of the movie]     y_task = head_task(MultiGateMoE(h)_task)

    Args:
        num_users, num_movies: numbers of ids; ids begin at 0.
        gates: one for each task, for inputs h (B, 2 * embedding); their ids are the users.
        experts: from h to (B, width).
        search: LocalSearch, whose permutation of the experts both tasks share, or None.
        embedding: width of a user's and of a movie's embedding. Embeddings start ~ U(-0.05, 0.05).
        head: width of the hidden layer in a task's head.

    Source: COMET trees, supplement S1.2.
    """

    def __init__(
        self,
        num_users: int,
        num_movies: int,
        gates: tuple[Gate, Gate],
        experts: Experts,
        search: LocalSearch | None = None,
        *,
        embedding: int = 128,
        width: int = 256,
        head: int = 256,
    ) -> None:
        super().__init__()
        self.users, self.movies = nn.Embedding(num_users, embedding), nn.Embedding(num_movies, embedding)
        for table in (self.users, self.movies):
            nn.init.uniform_(table.weight, -0.05, 0.05)
        self.moe = MultiGateMoE(gates, experts, search)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(width, head), nn.ReLU(), nn.Linear(head, 1)) for _ in gates)

    def forward(self, users: Tensor, movies: Tensor) -> tuple[Tensor, Tensor, MoEOutput]:
        h = torch.cat([self.users(users), self.movies(movies)], dim=-1)
        out = self.moe(h, users)
        watched, rating = (head(y)[:, 0] for head, y in zip(self.heads, out.y, strict=True))
        return watched, rating, out
