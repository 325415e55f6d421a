"""The two-task recommender of COMET trees, supplement S1.2: shared experts, one gate for each task."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from moe_kernels.nn.experts import ExpertLayer, Experts
from moe_kernels.nn.gates import DSelectKGate, Gate, TreeGate
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


@torch.no_grad()
def keras_init_(model: MMoE) -> None:
    """Draws the parameters as COMET trees' code does, which leaves most of them to Keras, in place.

    Weights W (out, in) of a linear layer, an expert, a top-k or softmax gate ~ U(-b, b), b = sqrt(6 / (in + out))
    (Glorot), their biases 0: wider than nn.Linear's sqrt(1 / in) where out < 5 in, and the biases differ. Biases of a
    tree's splits ~ U(-gamma / 100, gamma / 100), as their weights. The rest starts as its module says: embeddings, the
    leaves and splits of a tree, the code of DSelect-k.
    """
    own = {each.code for each in model.modules() if isinstance(each, DSelectKGate)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and module not in own:
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, ExpertLayer):  # weight (E, in, out)
            bound = math.sqrt(6 / sum(module.weight.shape[1:]))
            module.weight.uniform_(-bound, bound)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, TreeGate) and module.split_bias is not None:
            module.split_bias.uniform_(-module.gamma / 100, module.gamma / 100)
