"""A small MLP-Mixer with masked feed-forward layers (COMET fixed routing, section 4.2.2 and appendix A.3)."""

from __future__ import annotations

from torch import Tensor, nn

from moe_kernels.nn.comet import CometFFN
from moe_kernels.papers.models.vit import patch_grid, patches


class MixerBlock(nn.Module):
    """x + tokens(LN(x)^T)^T, then x + channels(LN(x)), for x (B, S, D) with S patches and D channels.

    A mask of `tokens` is computed from one channel of all patches, a mask of `channels` from all channels of one patch.
    """

    def __init__(self, tokens: CometFFN, channels: CometFFN, dim: int) -> None:
        super().__init__()
        self.norm_tokens, self.norm_channels = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tokens, self.channels = tokens, channels

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm_tokens(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm_channels(x))


class Mixer(nn.Module):
    """Embedded patches, `depth` blocks, LayerNorm, mean over the patches, linear head: (B, C * H * W) -> (B, classes).

    Args:
        image_shape: (C, H, W).
        patch: side of a patch in pixels; divides H and W.
        expansion: hidden widths of a block's two feed-forward layers, as multiples of the number of patches and of dim,
            rounded down, at least 1 neuron. (4, 0.5) is from the code that the paper builds on (Yoshioka 2024).

    p = 1 is the dense model. The paper: depth 6, dim 512 or 3072, patch 4, p = 0.5, tanh.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        classes: int,
        *,
        patch: int = 4,
        dim: int = 512,
        depth: int = 6,
        expansion: tuple[float, float] = (4.0, 0.5),
        p: float = 0.5,
        activation: str = "tanh",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        rows, columns = patch_grid(image_shape, patch)
        self.image_shape, self.patch = image_shape, patch
        self.embed = nn.Linear(image_shape[0] * patch * patch, dim)

        def feed_forward(size: int, factor: float) -> CometFFN:
            return CometFFN(size, max(1, int(size * factor)), p, activation=activation, dropout=dropout)

        self.blocks = nn.ModuleList(
            MixerBlock(feed_forward(rows * columns, expansion[0]), feed_forward(dim, expansion[1]), dim)
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(patches(x, self.image_shape, self.patch))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))
