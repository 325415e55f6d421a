"""The smooth step: values by hand, accuracy near the clamp, special values."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch

import moe_kernels as mk

INF, NAN = math.inf, math.nan
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize(
    ("t", "gamma", "value", "slope"),
    [
        (0.0, 1.0, 0.5, 1.5),
        (0.25, 1.0, 27 / 32, 9 / 8),
        (-0.25, 1.0, 5 / 32, 9 / 8),
        (0.5, 1.0, 1.0, 0.0),
        (-0.5, 1.0, 0.0, 0.0),
        (7.0, 1.0, 1.0, 0.0),
        (0.0, 4.0, 0.5, 0.375),
        (1.0, 4.0, 27 / 32, 9 / 32),
        (-2.0, 4.0, 0.0, 0.0),
        (INF, 0.1, 1.0, 0.0),
        (-INF, 0.1, 0.0, 0.0),
    ],
)
def test_step_by_hand(t, gamma, value, slope):
    x = torch.tensor(t, dtype=torch.float64, requires_grad=True)
    h = mk.smooth_step(x, gamma)
    assert abs(h.item() - value) < 1e-15
    assert abs(torch.autograd.grad(h, x)[0].item() - slope) < 1e-14


@pytest.mark.parametrize("gamma", [1e-3, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_step_is_right_to_the_last_places_up_to_the_clamp(dtype, gamma):
    gamma = torch.tensor(gamma, dtype=dtype).item()
    half = Fraction(gamma) / 2
    for side, distance in itertools.product((-1, 1), (1e-7, 1e-5, 1e-3, 0.1, 0.4)):
        t = torch.tensor(side * gamma * (0.5 - distance), dtype=dtype)
        u = (Fraction(t.item()) + half) / Fraction(gamma)
        for sign, each in ((1, u), (-1, 1 - u)):
            exact = float(each * each * (3 - 2 * each))
            assert abs(mk.smooth_step(sign * t, gamma).item() - exact) <= 8 * torch.finfo(dtype).eps * exact
        edge = torch.tensor(side * gamma / 2, dtype=dtype)
        assert mk.smooth_step(edge, gamma).item() == max(side, 0)
        inside = torch.nextafter(edge, torch.zeros((), dtype=dtype))
        assert mk.smooth_step(-inside.abs(), gamma).item() > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_step_wants_a_gamma_that_is_a_number_where_it_is_computed(dtype):
    """In float32 1e300 and 1 / 1e-40 are infinite, so a step could be NaN."""
    wide = dtype if dtype == torch.float64 else torch.float32
    t, tiny = torch.tensor([-INF, -1.0, 0.0, 1.0, INF], dtype=dtype), torch.finfo(wide).tiny
    for gamma in (tiny, 1 / tiny):
        h = mk.smooth_step(t, gamma)
        assert h[[0, 2, 4]].tolist() == [0.0, 0.5, 1.0]
        assert (h + h.flip(0) == 1).all()
    for gamma in (1e-310, tiny / 2) + ((1e300, 1e-40, 1e38) if wide == torch.float32 else ()):
        with pytest.raises(
            ValueError, match=f"smooth_step: gamma must be above 0 and finite in {str(wide)[6:]}, .*; got "
        ):
            mk.smooth_step(t, gamma)


def test_step_keeps_nan_shape_and_dtype():
    t = torch.tensor([[NAN, 0.0]])
    for dtype in DTYPES:
        h = mk.smooth_step(t.to(dtype), 1.0)
        assert h.dtype == dtype
        assert h.shape == (1, 2)
        assert h[0, 0].isnan()
        assert h[0, 1] == 0.5
    assert mk.smooth_step(torch.empty(0, 3), 1.0).shape == (0, 3)
