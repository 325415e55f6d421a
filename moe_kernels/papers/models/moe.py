"""Transformers with layers of experts: the GPT of CompeteSMoE, the ViTs of the sparse ViT and of V-MoE.

The argument `layer` is a function of a block's index: it returns an MoE with output="all", or None for a dense
feed-forward layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from moe_kernels.nn.gates.ensemble import tile
from moe_kernels.nn.moe import MoE, MoEOutput
from moe_kernels.papers.models.transformer import Block, FeedForward, TextModel
from moe_kernels.papers.models.vit import PatchEmbedding

Layer = Callable[[int], MoE | None]


class MoEBlock(nn.Module):
    """A Block with an MoE, x + attention(LN(x)), then x + MoE(LN(x)): (B, S, D) -> (B, S, D) and the MoEOutput.

    The MoE is called with pass_through=False, since this block adds the residual itself.
    """

    def __init__(self, dim: int, heads: int, moe: MoE, **options: Any) -> None:
        super().__init__()
        self.block = Block(dim, heads, moe, **options)

    def forward(self, x: Tensor, ids: Tensor | None = None) -> tuple[Tensor, MoEOutput]:
        block = self.block
        x = block.attend(x)
        out = block.ffn(block.norm_ffn(x), ids, pass_through=False)
        return x + F.dropout(out.y, block.dropout, self.training), out


class MoEBlocks(nn.Module):
    """`depth` blocks and a last LayerNorm: x (B, S, D), ids (B, S) -> x (B, S, D) and the MoEOutput of each MoEBlock.

    hidden, activation: of the dense feed-forward layers.
    members: M > 1 for an ensemble (E^3). Every sample is repeated M times before the first block with experts, so the
        output is (B M, S, D); from there on the id of a token is the number of its member.
    """

    def __init__(
        self,
        depth: int,
        dim: int,
        heads: int,
        hidden: int,
        layer: Layer,
        *,
        causal: bool = False,
        activation: str = "gelu",
        dropout: float = 0.0,
        members: int = 1,
        relative: int = 0,
    ) -> None:
        super().__init__()
        self.members = members
        options: dict[str, Any] = {"causal": causal, "dropout": dropout, "relative": relative}

        def block(moe: MoE | None) -> nn.Module:
            if moe is not None:
                return MoEBlock(dim, heads, moe, **options)
            return Block(dim, heads, FeedForward(dim, hidden, activation=activation, dropout=dropout), **options)

        self.blocks = nn.ModuleList(block(layer(index)) for index in range(depth))
        self.norm = nn.LayerNorm(dim)

    def forward(
        self, x: Tensor, ids: Tensor | None = None, states: list[Tensor] | None = None
    ) -> tuple[Tensor, list[MoEOutput]]:
        """states: a list to which the input x and every block's output are appended, for distillation."""
        outputs: list[MoEOutput] = []
        states = [] if states is None else states
        states.append(x)
        for block in self.blocks:
            if isinstance(block, MoEBlock):
                if self.members > 1 and not outputs:
                    x, member = tile(x, self.members)
                    ids = member[:, None].expand(x.shape[:2])
                x, out = block(x, ids)
                outputs.append(out)
            else:
                x = block(x)
            states.append(x)
        return self.norm(x), outputs


class MoEGPT(TextModel):
    """Tokens (B, S) -> logits (B, S, vocabulary) and the MoEOutput of each layer of experts. Gates get tokens as ids.

    Learned embeddings of tokens and positions, ~ N(0, 0.02^2), causal pre-norm blocks, the token embedding as head.

    Args:
        length: largest S. With relative=True S may be larger, and length is the argument `relative` of Block.
        hidden, activation: of the dense feed-forward layers; an MoE has its own.
        relative: learned biases of the attention (see Block) instead of position embeddings. GLaM is relative=True,
            activation="geglu" and experts in every second block.
    """

    def __init__(
        self,
        vocabulary: int,
        length: int,
        layer: Layer,
        *,
        dim: int = 128,
        depth: int = 4,
        heads: int = 4,
        hidden: int = 128,
        activation: str = "relu",
        dropout: float = 0.0,
        relative: bool = False,
    ) -> None:
        super().__init__(vocabulary, length, dim, dropout, relative=relative)
        nn.init.normal_(self.tokens.weight, std=0.02)
        if self.positions is not None:
            nn.init.normal_(self.positions, std=0.02)
        options: dict[str, Any] = {"activation": activation, "dropout": dropout, "relative": length * relative}
        self.blocks = MoEBlocks(depth, dim, heads, hidden, layer, causal=True, **options)

    def feed_forwards(self) -> list[tuple[nn.Linear, nn.Linear, str]]:
        """(fc1, fc2, activation) of every dense feed-forward layer."""
        return [(each.fc1, each.fc2, each.activation) for each in self.modules() if isinstance(each, FeedForward)]

    def forward(self, x: Tensor, states: list[Tensor] | None = None) -> tuple[Tensor, list[MoEOutput]]:
        """states: as in MoEBlocks.forward."""
        h, outputs = self.blocks(self.embedded(x), x, states)
        return self.logits(h), outputs


class MoEViT(nn.Module):
    """Images (B, C * H * W) -> logits (B, classes) and the MoEOutput of each layer of experts.

    Patches, a class token, learned positions, blocks, a linear head on the class token. image_shape is (C, H, W). ids
    (B,): the id of each image, which gates get for every token of the image. With members M > 1 (see MoEBlocks) logits
    are (B M, classes), and gates get the number of a token's member instead of an id.
    hidden, activation: of the dense feed-forward layers; an MoE has its own.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        classes: int,
        layer: Layer,
        *,
        patch: int = 4,
        dim: int = 192,
        depth: int = 6,
        heads: int = 12,
        hidden: int = 768,
        activation: str = "gelu",
        dropout: float = 0.0,
        members: int = 1,
    ) -> None:
        super().__init__()
        self.embed = PatchEmbedding(image_shape, patch, dim, dropout)
        self.blocks = MoEBlocks(
            depth, dim, heads, hidden, layer, activation=activation, dropout=dropout, members=members
        )
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor, ids: Tensor | None = None) -> tuple[Tensor, list[MoEOutput]]:
        x = self.embed(x)
        x, outputs = self.blocks(x, None if ids is None else ids[:, None].expand(x.shape[:2]))
        return self.head(x[:, 0]), outputs
