"""A small GPT with masked feed-forward layers (COMET fixed routing, section 4.3 and appendix A.4)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from moe_kernels.papers.models.transformer import Blocks, TextModel


class GPT(TextModel):
    """A decoder like GPT-2: learned embeddings of tokens and positions, causal blocks, the token embedding as head.

    Input: tokens (B, S), S at most `length`; output: logits (B, S, vocabulary). hidden: None is 4 dim, as in GPT-2.
    router_input: see Blocks. p = 1 is the dense model. The paper trains three sizes of GPT-2 (12, 24 and 36 layers of
    dim 768, 1024 and 1280) with p = 0.5 and tanh.

    Embeddings and weights of linear layers ~ N(0, 0.02^2); the weights of attention's `project` and of the feed-forward
    layer's `output` are divided by sqrt(2 depth). Biases start at 0, weights of LayerNorms at 1. The frozen routing
    keeps the distribution of FixedRouting.
    """

    def __init__(
        self,
        vocabulary: int,
        length: int,
        *,
        dim: int = 128,
        depth: int = 4,
        heads: int = 4,
        hidden: int | None = None,
        p: float = 0.5,
        activation: str = "tanh",
        dropout: float = 0.0,
        router_input: str = "layer",
    ) -> None:
        super().__init__(vocabulary, length, dim, dropout)
        options: dict[str, Any] = {"activation": activation, "dropout": dropout, "router_input": router_input}
        self.blocks = Blocks(depth, dim, heads, hidden or 4 * dim, p, causal=True, **options)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" not in name:
                residual = name.endswith(("project.weight", "output.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5 if residual else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.blocks(self.embedded(x)))
