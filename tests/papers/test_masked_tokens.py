"""Which tokens recipe moebert masks, and losses that leave out the others."""

import math

import pytest
import torch

from moe_kernels.papers.recipes import Batch
from moe_kernels.papers.recipes._text import IGNORED, bits, characters
from moe_kernels.papers.recipes.moebert import importance, masked


@pytest.mark.parametrize(
    ("inner", "count"), [(1, 1), (3, 1), (9, 1), (10, 2), (16, 2), (17, 3), (20, 3), (30, 4), (40, 6), (128, 19)]
)
def test_the_tokens_with_the_smallest_numbers_are_masked(inner, count):
    """15 % of the tokens between the first and the last, at least one; a half is rounded to an even number."""
    tokens = torch.arange(10, 12 + inner).expand(3, -1)
    draw = torch.stack(
        [torch.randperm(inner, generator=torch.Generator().manual_seed(row)) / inner for row in range(3)]
    )
    x, y = masked(tokens, draw, 4)
    for row in range(3):
        places = {1 + place for place in draw[row].sort().indices[:count].tolist()}
        for place in range(inner + 2):
            expected = (4, 10 + place) if place in places else (10 + place, IGNORED)
            assert (x[row, place].item(), y[row, place].item()) == expected
    assert tokens[0].tolist() == list(range(10, 12 + inner))


def test_targets_of_characters_are_those_after_them():
    windows = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.uint8)
    x, y = characters(Batch((windows,), None))
    assert (x.tolist(), y.tolist()) == ([[1, 2, 3], [5, 6, 7]], [[2, 3, 4], [6, 7, 8]])
    assert (x.dtype, y.dtype) == (torch.int64, torch.int64)


def test_bits_of_no_target_are_none():
    total, count = bits(torch.zeros(2, 3, 5), torch.full((2, 3), IGNORED))["bits"]
    assert (total.item(), count.item()) == (0, 0)
    total, count = bits(torch.zeros(2, 3, 5), torch.tensor([[0, IGNORED, 4], [IGNORED, 2, 2]]))["bits"]
    assert (total.item(), count.item()) == (pytest.approx(4 * math.log2(5)), 4)


class Teacher(torch.nn.Module):
    """Embedded tokens through dropout and one feed-forward layer of three neurons."""

    def __init__(self):
        super().__init__()
        self.embed, self.fc1, self.fc2 = torch.nn.Embedding(6, 4), torch.nn.Linear(4, 3), torch.nn.Linear(3, 6)
        self.dropout = torch.nn.Dropout(0.5)

    def feed_forwards(self):
        return [(self.fc1, self.fc2, "relu")]

    def forward(self, x):
        return self.fc2(self.fc1(self.dropout(self.embed(x))).relu()), []


@pytest.mark.parametrize("training", [False, True])
def test_importance_adds_the_windows_up(training):
    """Of each window the mean loss over its targets counts, without dropout."""
    torch.manual_seed(0)
    teacher = Teacher().eval()
    x, y = torch.randint(6, (5, 4)), torch.randint(6, (5, 4))
    y[:, 1::2] = IGNORED
    expected = torch.zeros(3)
    for tokens, targets in zip(x, y, strict=True):
        teacher.zero_grad()
        losses = -teacher(tokens)[0].log_softmax(-1)[torch.arange(4)[::2], targets[::2]]
        losses.mean().backward()
        into = (teacher.fc1.weight * teacher.fc1.weight.grad).sum(1)
        expected += (into + (teacher.fc2.weight * teacher.fc2.weight.grad).sum(0)).abs().detach()
    teacher.train(training)
    for sizes in ([5], [2, 3], [1] * 5):
        with torch.no_grad():
            (found,) = importance(teacher, zip(x.split(sizes), y.split(sizes), strict=True))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        assert teacher.training == training
        assert all(each.grad is None for each in teacher.parameters())
