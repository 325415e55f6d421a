"""Tiles of the grouped products: data by kernel, by loop (80: cp.async and mma.sync, 90: descriptors and wgmma) and by
class of shape, predicted by arithmetic and not yet timed.

sm_80: a warp that multiplies 64 x 64 reads (64 + 64) * 32 bytes of shared memory for 64 * 64 * 16 products, half of
what shared memory gives in that time (128 bytes and 1024 products a clock); 64 x 32 would take three quarters. So four
warps take 128 x 128, and 48 KB of buffers leave room for two blocks or more in the 163 KB of an A100.
sm_90: wgmma 64 x 256 x 16 takes 128 clocks and reads 10 KB, 80 of the 128 bytes a clock; 64 x 128 takes 96.
So two groups of warps take 128 x 256 where there are as many columns, with four stages of 48 KB.
A float32 product takes 64 x 64 tiles: its units are the general ones and registers its limit.
"""

from __future__ import annotations

from typing import NamedTuple


class Tiles(NamedTuple):
    """Rows and columns of a program's output, the step of its sum, warps, and stages of the pipeline."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


# By kernel and loop: tiles for few rows an expert, for few columns, and for the rest. Training takes those for few rows
# only where MOE_KERNELS_AUTOTUNE=1 finds them faster (`choose`). The columns of a gated product are those of one half;
# a program takes both halves.
CLASSES = ("few", "narrow", "wide")
TILES: dict[tuple[str, int], tuple[Tiles, Tiles, Tiles]] = {
    ("fwd", 80): (Tiles(64, 128, 32, 4, 4), Tiles(128, 128, 32, 4, 4), Tiles(128, 128, 32, 4, 4)),
    ("fwd", 90): (Tiles(64, 128, 64, 4, 4), Tiles(128, 128, 64, 8, 4), Tiles(128, 256, 64, 8, 4)),
    ("gated", 80): (Tiles(64, 64, 32, 4, 4), Tiles(128, 64, 32, 4, 4), Tiles(128, 64, 32, 4, 4)),
    ("gated", 90): (Tiles(64, 64, 64, 4, 4), Tiles(128, 64, 64, 8, 4), Tiles(128, 128, 64, 8, 4)),
    ("hidden", 80): (Tiles(64, 64, 32, 4, 4), Tiles(128, 64, 32, 4, 4), Tiles(128, 64, 32, 4, 4)),
    ("hidden", 90): (Tiles(64, 64, 64, 4, 4), Tiles(128, 64, 64, 8, 4), Tiles(128, 128, 64, 8, 4)),
    ("weight", 80): (Tiles(128, 128, 32, 4, 4), Tiles(128, 128, 32, 4, 4), Tiles(128, 128, 32, 4, 4)),
    ("weight", 90): (Tiles(128, 128, 64, 8, 4), Tiles(128, 128, 64, 8, 4), Tiles(128, 256, 64, 8, 4)),
}
# Tiles that MOE_KERNELS_AUTOTUNE=1 tries too: fewer stages or half a tile, so that two blocks of an SM take turns in
# their prologues and epilogues; and twice the rows or columns, which halves what L2 gives for the same products.
ALTERNATIVES: dict[tuple[str, int], tuple[Tiles, ...]] = {
    ("fwd", 80): (Tiles(128, 128, 32, 8, 4), Tiles(128, 128, 32, 4, 3), Tiles(128, 256, 32, 8, 3)),
    ("fwd", 90): (Tiles(128, 128, 64, 8, 3), Tiles(128, 128, 64, 4, 3), Tiles(256, 128, 64, 8, 4)),
    ("gated", 80): (Tiles(128, 64, 32, 8, 4), Tiles(128, 128, 32, 8, 3)),
    ("gated", 90): (Tiles(128, 64, 64, 8, 3), Tiles(128, 64, 64, 4, 3), Tiles(128, 128, 64, 8, 3)),
    ("hidden", 80): (Tiles(128, 128, 32, 8, 4), Tiles(128, 128, 32, 4, 3)),
    ("hidden", 90): (Tiles(128, 128, 64, 4, 3), Tiles(128, 256, 64, 8, 4), Tiles(256, 128, 64, 8, 4)),
    ("weight", 80): (Tiles(128, 128, 32, 8, 4), Tiles(128, 256, 32, 8, 3)),
    ("weight", 90): (Tiles(128, 128, 64, 8, 3), Tiles(128, 128, 64, 4, 3), Tiles(256, 128, 64, 8, 4)),
}
# For float32, and for rows that are no multiples of 16 bytes: their elements are read one by one.
GENERAL = {
    "fwd": Tiles(64, 64, 32, 4, 3),
    "gated": Tiles(64, 32, 32, 4, 3),
    "hidden": Tiles(64, 32, 32, 4, 3),
    "weight": Tiles(64, 64, 32, 8, 3),
}
