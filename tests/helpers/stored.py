"""Fixtures that compare what a command prints and draws with a file of tests/stored, which `pytest --store` writes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[1] / "stored"
NUMBER = re.compile(r"(?<![\w.])-?\d+\.?\d*(?:e[+-]?\d+)?(?![\w.])")

Stored = Callable[..., None]


def differences(text: str, expected: str, tolerance: float) -> list[str]:
    """Pairs of lines that differ otherwise than in numbers by up to `tolerance`, relative or absolute."""
    found = []
    lines, before = text.splitlines(), expected.splitlines()
    for index in range(max(len(lines), len(before))):
        pair = tuple(each[index] if index < len(each) else "(no line)" for each in (before, lines))
        numbers = [[float(number) for number in NUMBER.findall(line)] for line in pair]
        # Tables pad their cells: the lengths of numbers change the number of spaces.
        words = [re.sub(r"\s+", " ", NUMBER.sub("#", line)) for line in pair]
        if words[0] != words[1] or numbers[0] != pytest.approx(numbers[1], rel=tolerance, abs=tolerance, nan_ok=True):
            found.append(f"stored: {pair[0]}\nnow:    {pair[1]}")
    return found


@pytest.fixture
def stored(request: pytest.FixtureRequest) -> Stored:
    """stored(name, text, tolerance=0): fails unless the text is that of tests/stored/<name>.txt."""

    def compare(name: str, text: str, tolerance: float = 0.0) -> None:
        path = FOLDER / f"{name}.txt"
        text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
        if tolerance == math.inf:  # the words alone
            text = NUMBER.sub("#", text)
        if request.config.getoption("--store"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} is missing; --store writes it"
        found = differences(text, path.read_text(), tolerance)
        meant = f"if the change is meant: python -m pytest '{request.node.nodeid}' --store"
        assert not found, "\n".join([f"{len(found)} lines differ from {path.name}; {meant}", *found[:20]])

    return compare


def _number(value: Any) -> str:
    return str(value) if isinstance(value, str) else f"{float(value):.4g}"


def _numbers(values: Any) -> str:
    return " ".join(map(_number, values))


def described(canvas: Any) -> Iterator[str]:
    """Lines with all that a figure of matplotlib shows, but for its layout."""
    import numpy
    from matplotlib.ticker import FixedFormatter

    yield f"figure {_numbers(canvas.get_size_inches())} {canvas.get_suptitle()!r}"
    for legend in canvas.legends:
        yield from _legend(legend)
    for axis in canvas.axes:
        if not axis.get_visible():
            yield "axis, hidden"
            continue
        yield f"axis {axis.get_title()!r}, {'framed' if axis.axison else 'bare'}"
        for name, side in (("x", axis.xaxis), ("y", axis.yaxis)):
            form = side.get_major_formatter()
            fixed = isinstance(form, FixedFormatter)
            places = getattr(side.get_major_locator(), "locs", ())  # given, not chosen by matplotlib
            at = f" at {_numbers(places)}" if len(places) else ""
            ticks = " | ".join(each.get_text() for each in side.get_ticklabels()) if fixed else type(form).__name__
            grid = "grid" if any(each.gridline.get_visible() for each in side.get_major_ticks()) else "no grid"
            limits = _numbers(side.get_view_interval())
            yield f"  {name} {side.get_label_text()!r} {side.get_scale()} {limits} {grid}{at}: {ticks}"
        for line in axis.lines:
            look = [_color(line.get_color()), line.get_marker(), line.get_linestyle(), line.get_fillstyle()]
            yield f"  line {line.get_label()} {look} {_number(line.get_linewidth())}"
            yield f"    {_numbers(line.get_xdata())} : {_numbers(line.get_ydata())}"
        for patch in axis.patches:
            corners = axis.transData.inverted().transform(patch.get_extents().get_points())
            yield f"  patch {_numbers(corners.flatten())} {_color(patch.get_facecolor())}"
        for image in axis.images:
            values = image.get_array()
            cells = _numbers(values.flatten()[:64])
            yield f"  image {values.shape} {image.get_cmap().name} {_numbers(image.get_clim())}: {cells}"
        for text in axis.texts:
            yield f"  text {text.get_text()!r} {_numbers(text.get_position())} {text.get_ha()} {text.get_va()}"
        for each in axis.collections:
            points = each.get_offsets()
            if len(points) < 2 and each.get_paths():  # no scattered points: the outline of an area, or bars
                points = numpy.concatenate([path.vertices for path in each.get_paths()])
            first = _numbers(points[:8].flatten())
            yield f"  {type(each).__name__} {_color(each.get_facecolor())} {each.get_label()}: {first}"
        if axis.get_legend():
            yield from _legend(axis.get_legend())


def _color(value: Any) -> Any:
    """A colour as #rrggbbaa, or several."""
    from matplotlib.colors import to_hex

    if not isinstance(value, str) and getattr(value, "ndim", 1) == 2:
        return [_color(tuple(each)) for each in value]
    return to_hex(value, keep_alpha=True)


def _legend(legend: Any) -> Iterator[str]:
    yield f"  legend {legend._loc} {legend._ncols}"
    for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True):
        names = ("color", "marker", "linestyle", "fillstyle") if hasattr(handle, "get_fillstyle") else ("facecolor",)
        color, *look = (getattr(handle, f"get_{name}")() for name in names)
        look.insert(0, _color(color))
        yield f"    {text.get_text()} {look} {text.get_fontsize():g}"


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Descriptions of the figures that a test saves; the files are written."""
    figure = pytest.importorskip("matplotlib.figure")
    found: list[str] = []
    original = figure.Figure.savefig

    def savefig(self: Any, *arguments: Any, **options: Any) -> Any:
        result = original(self, *arguments, **options)  # draws, which settles ticks and limits
        found.append("\n".join(described(self)))
        return result

    monkeypatch.setattr(figure.Figure, "savefig", savefig)
    return found


def input_line(name: str, value: object) -> str:
    """An input of an operation: of a tensor dtype, shape, strides, the mean of its absolute values, the last one."""
    if is_dataclass(value):
        return " ".join(input_line(f"{name}.{each.name}", getattr(value, each.name)) for each in fields(value))
    if not isinstance(value, torch.Tensor):
        return f"{name}={value!r}"
    text = f"{name}={str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}".replace(" ", "")
    if not value.is_contiguous():
        text += f"@{value.stride()}".replace(" ", "")
    if not value.numel():
        return text
    size = value.double().nan_to_num(0, 0, 0).clamp(-1e3, 1e3)
    return f"{text}: {size.abs().mean():.4g} {size.flatten()[-1]:.4g}"
