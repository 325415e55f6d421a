"""Small data sets for tests of recipes, training and studies."""

from __future__ import annotations

import torch

from moe_kernels.papers.data import Images, Ratings, Table

WORDS = "the cat sat on the mat and the rat sat on the cat. " * 30


def ratings() -> Ratings:
    """Even users mostly watch even movies, odd users odd movies; the rating of a movie not watched is 0."""
    draw = torch.Generator().manual_seed(0)
    users, movies = torch.randint(0, 20, (160,), generator=draw), torch.randint(0, 30, (160,), generator=draw)
    watched = (torch.rand(160, generator=draw) < 0.2 + 0.6 * (users % 2 == movies % 2).float()).float()
    rows = (users, movies, watched, watched * (1 + users % 5))
    return Ratings("tastes", tuple(each[:80] for each in rows), tuple(each[80:] for each in rows), 20, 30)


def table() -> Table:
    """Rows with 21 inputs. The first 14 determine the 7 targets."""
    x = torch.randn(80, 21, generator=torch.Generator().manual_seed(0))
    y = torch.tanh(x[:, :7] + x[:, 7:14])
    return Table("arm", (x[:40], y[:40]), (x[40:], y[40:]))


def images() -> Images:
    """Three classes of 8 x 8 images; the class determines which pixel is bright."""
    y = torch.arange(80) % 3
    x = torch.randn(80, 64, generator=torch.Generator().manual_seed(0)) * 0.3
    x[torch.arange(80), y * 7] += 2
    return Images("corners", x[:40], y[:40], x[40:], y[40:], ("a", "b", "c"), (1, 8, 8))


def blobs(n: int = 96) -> Images:
    """Three Gaussian clouds whose centres are about 19 standard deviations apart."""
    y = torch.arange(n) % 3
    x = torch.eye(3).repeat(1, 4)[y] * 2 - 1 + 0.3 * torch.randn(n, 12, generator=torch.Generator().manual_seed(0))
    half = n // 2
    return Images("blobs", x[:half], y[:half], x[half:], y[half:], ("a", "b", "c"), (1, 3, 4))
