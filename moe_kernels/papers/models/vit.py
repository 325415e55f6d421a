"""A small vision transformer with masked feed-forward layers (COMET fixed routing, section 4.2.2 and appendix A.3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_kernels.papers.models.transformer import Blocks


def patch_grid(image_shape: tuple[int, int, int], patch: int) -> tuple[int, int]:
    """Rows and columns of patches, H / patch and W / patch; ValueError unless patch >= 1 divides H and W."""
    _, height, width = image_shape
    if patch < 1 or height % patch or width % patch:
        raise ValueError(
            f"patches: expected a patch of at least 1 pixel that divides both sides, got {patch} for {height} x {width}"
        )
    return height // patch, width // patch


def patches(x: Tensor, image_shape: tuple[int, int, int], patch: int) -> Tensor:
    """Images (B, C * H * W) -> patches (B, H / patch * W / patch, C * patch * patch), row by row."""
    rows, columns = patch_grid(image_shape, patch)
    x = x.reshape(-1, image_shape[0], rows, patch, columns, patch)
    return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


class PatchEmbedding(nn.Module):
    """Images (B, C * H * W) -> (B, 1 + patches, dim): class token, then projected patches, plus learned positions."""

    def __init__(self, image_shape: tuple[int, int, int], patch: int, dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.image_shape, self.patch, self.dropout = image_shape, patch, dropout
        self.grid = patch_grid(image_shape, patch)
        self.project = nn.Linear(image_shape[0] * patch * patch, dim)
        self.class_token = nn.Parameter(torch.randn(dim) * 0.02)
        self.positions = nn.Parameter(torch.randn(self.grid[0] * self.grid[1] + 1, dim) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(patches(x, self.image_shape, self.patch))
        x = torch.cat([self.class_token.expand(len(x), 1, -1), x], 1) + self.positions
        return F.dropout(x, self.dropout, self.training)


class ViT(nn.Module):
    """Patches, a class token and learned positions, blocks, and a linear head on the class token.

    Input (B, C * H * W), output (B, classes). image_shape is (C, H, W); router_input: see Blocks. p = 1 is the dense
    model. The paper: depth 6, 8 heads, hidden 512, 3072 or 6144, patch 4, dropout 0.1, p = 0.5, tanh; dim 512 is from
    the code that the paper builds on (Yoshioka 2024).
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        classes: int,
        *,
        patch: int = 4,
        dim: int = 512,
        depth: int = 6,
        heads: int = 8,
        hidden: int = 512,
        p: float = 0.5,
        activation: str = "tanh",
        dropout: float = 0.1,
        router_input: str = "layer",
    ) -> None:
        super().__init__()
        self.embed = PatchEmbedding(image_shape, patch, dim, dropout)
        self.blocks = Blocks(
            depth, dim, heads, hidden, p, activation=activation, dropout=dropout, router_input=router_input
        )
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x))[:, 0])
