"""Pre-norm transformer blocks with dense or COMET (masked) feed-forward layers, and functions that record the masks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_kernels.nn.comet import ACTIVATIONS, CometFFN, FixedRouting
from moe_kernels.ops._checks import check_choice, check_int, check_number

ROUTER_INPUTS = ("layer", "embedding")


class FeedForward(nn.Module):
    """fc2(act(fc1(x))) with dropout after act and after fc2: (..., D) -> (..., D).

    activation: a name in ACTIVATIONS, or "geglu": gelu(a) * b with [a, b] = fc1(x), which has 2 * hidden columns.
    """

    def __init__(self, dim: int, hidden: int, *, activation: str = "gelu", dropout: float = 0.0) -> None:
        super().__init__()
        check_choice("FeedForward", "activation", activation, (*ACTIVATIONS, "geglu"))
        columns = 2 * hidden if activation == "geglu" else hidden
        self.fc1, self.fc2 = nn.Linear(dim, columns), nn.Linear(hidden, dim)
        self.activation = activation
        self.dropout = check_number("FeedForward", "dropout", dropout, 0, 1, "a rate")

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        if self.activation == "geglu":
            gate, up = h.chunk(2, dim=-1)
            h = F.gelu(gate) * up
        else:
            h = ACTIVATIONS[self.activation](h)
        x = F.dropout(h, self.dropout, self.training)
        return F.dropout(self.fc2(x), self.dropout, self.training)


class Block(nn.Module):
    """x + attention(LN(x)), then x + ffn(LN(x)). Input and output (B, S, D). causal: no attention to later tokens.

    relative: R > 0 adds a learned bias to the attention's logits for every head and distance to the other token;
        distances of R - 1 and more share one bias. Needs causal=True. 0 adds none.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        ffn: nn.Module,
        *,
        causal: bool = False,
        dropout: float = 0.0,
        relative: int = 0,
    ) -> None:
        super().__init__()
        check_int("Block", "heads", heads, 1, 2**31 - 1, "attention heads")
        if dim % heads:
            raise ValueError(f"Block: dim must be a multiple of heads, got {dim} and {heads}")
        self.heads, self.causal = heads, causal
        self.dropout = check_number("Block", "dropout", dropout, 0, 1, "a rate")
        self.norm_attention, self.norm_ffn = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.project = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ffn = ffn
        if relative and not causal:
            raise ValueError("Block: relative positions are for causal blocks, got causal=False")
        self.relative = nn.Parameter(torch.zeros(heads, relative)) if relative else None

    def attend(self, x: Tensor) -> Tensor:
        """x + attention(LN(x)), with dropout on the attention's result."""
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        bias = None if self.relative is None else self._bias(x.shape[1])
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=self.causal and bias is None)
        mixed = self.project(mixed.transpose(1, 2).flatten(2))
        return x + F.dropout(mixed, self.dropout, self.training)

    def _bias(self, length: int) -> Tensor:
        """The learned biases (heads, S, S), -inf for later tokens."""
        assert self.relative is not None
        position = torch.arange(length, device=self.relative.device)
        before = position[:, None] - position
        bias = self.relative[:, before.clamp(0, self.relative.shape[1] - 1)]
        return bias.masked_fill(before < 0, -torch.inf)

    def forward(self, x: Tensor, *routing: Tensor | None) -> Tensor:
        """routing: further arguments of the feed-forward layer, such as the bits of a CometFFN."""
        x = self.attend(x)
        return x + self.ffn(self.norm_ffn(x), *routing)


class Blocks(nn.Module):
    """`depth` blocks with CometFFN layers of keep fraction p, and a last LayerNorm: (B, S, D) -> (B, S, D).

    router_input: the input from which masks are computed. "layer": each feed-forward layer's own input. "embedding":
    the input of the first block, from which one FixedRouting computes the masks of all layers, as in CometMLP.
    """

    def __init__(
        self,
        depth: int,
        dim: int,
        heads: int,
        hidden: int,
        p: float,
        *,
        causal: bool = False,
        activation: str = "tanh",
        dropout: float = 0.0,
        router_input: str = "layer",
    ) -> None:
        super().__init__()
        if router_input not in ROUTER_INPUTS:
            raise ValueError(f"Blocks: router_input must be one of {ROUTER_INPUTS}, got {router_input!r}")

        def block() -> Block:
            ffn = CometFFN(dim, hidden, p, activation=activation, dropout=dropout)
            return Block(dim, heads, ffn, causal=causal, dropout=dropout)

        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        chain = router_input == "embedding" and p < 1
        self.router = FixedRouting((dim, *[hidden] * depth), p) if chain else None

    def forward(self, x: Tensor) -> Tensor:
        bits = [None] * len(self.blocks) if self.router is None else self.router(x)
        for block, mask in zip(self.blocks, bits, strict=True):
            x = block(x, mask)
        return self.norm(x)


class TextModel(nn.Module):
    """What the GPTs share: learned embeddings of tokens and positions before the blocks, the token embedding as head.

    relative: no position embeddings; the blocks then have relative positions.
    """

    def __init__(self, vocabulary: int, length: int, dim: int, dropout: float, *, relative: bool = False) -> None:
        super().__init__()
        self.dropout = dropout
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = None if relative else nn.Parameter(torch.empty(length, dim))

    def embedded(self, x: Tensor) -> Tensor:
        """Tokens (B, S) -> the input of the blocks (B, S, D)."""
        h = self.tokens(x)
        if self.positions is not None:
            h = h + self.positions[: x.shape[1]]
        return F.dropout(h, self.dropout, self.training)

    def logits(self, h: Tensor) -> Tensor:
        """The output of the blocks (B, S, D) -> (B, S, vocabulary)."""
        return F.linear(h, self.tokens.weight)


@contextmanager
def record_masks(model: nn.Module) -> Iterator[list[Tensor]]:
    """Yields a list; in the `with` block every call of a CometFFN in `model` appends its mask, bool (..., H)."""
    masks: list[Tensor] = []

    def append_mask(layer: CometFFN, args: tuple[Tensor, ...]) -> None:
        with torch.no_grad():
            masks.append(layer.mask(*args))

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, CometFFN):
                stack.callback(module.register_forward_pre_hook(append_mask).remove)
        yield masks


@torch.no_grad()
def ffn_masks(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The masks, bool (..., H), of all CometFFNs in model(x), in the order of their calls."""
    with record_masks(model) as masks:
        model(x)
    return masks
