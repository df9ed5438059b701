"""Charts as SVG, without a library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from lightning_d9d.errors import printable
from lightning_d9d.report.charts import Chart, Line, segments

WIDTH, HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 12, 10, 42
_NUM_TICKS = 8
_Axis = Callable[[float], str]
_MOST_MARKED = 40
"""Lines with more points have no markers."""


def draw(chart: Chart, restarts: Sequence[float]) -> str:
    """Return an SVG element, in the colours of the page around it. Local.

    Args:
        chart: The chart.
        restarts: Steps that are marked.
    """
    first, last = chart.steps
    first, last = (first, last) if first < last else (first - 1, last + 1)

    def x(step: float) -> str:
        return f"{_LEFT + (step - first) / (last - first) * (WIDTH - _LEFT - _RIGHT):.1f}"

    def y(value: float) -> str:
        return f"{HEIGHT - _BOTTOM - (value - chart.low) / (chart.high - chart.low) * (HEIGHT - _TOP - _BOTTOM):.1f}"

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(chart.title)}">']
    for value in ticks(chart.low, chart.high):
        parts.append(f'<path class="grid" d="M{_LEFT} {y(value)}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value)}" dy="4" text-anchor="end">{number(value)}</text>')
    parts += [
        f'<text x="{x(step)}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{number(step)}</text>'
        for step in ticks(first, last)
        if step == int(step)
    ]
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">optimizer step</text>')
    parts += [
        f'<path class="restart" d="M{x(step)} {_TOP}V{HEIGHT - _BOTTOM}"/>'
        for step in restarts
        if first <= step <= last
    ]
    for line in chart.lines:
        parts += _stack(line, x, y) if line.base is not None else _line(line, x, y)
    return "\n".join([*parts, "</svg>"])


def _line(line: Line, x: _Axis, y: _Axis) -> list[str]:
    pieces = segments(line)
    path = "".join("M" + "L".join(f"{x(step)} {y(value)}" for step, value in piece) for piece in pieces)
    drawn = [f'<path fill="none" stroke="{line.colour}" d="{path}"><title>{text(line.name)}</title></path>']
    marked = [point for piece in pieces for point in piece if len(piece) == 1 or len(line.points) <= _MOST_MARKED]
    return drawn + [
        f'<circle fill="{line.colour}" cx="{x(step)}" cy="{y(value)}" r="2">'
        f"<title>{text(line.name)} {value:.6g}, step {step:g}</title></circle>"
        for step, value in marked
    ]


def _stack(line: Line, x: _Axis, y: _Axis) -> list[str]:
    assert line.base is not None
    there = [f"{x(step)} {y(top)}" for step, top in line.points]
    back = [f"{x(step)} {y(base)}" for (step, _), base in zip(line.points, line.base, strict=True)]
    path = "L".join([*there, *reversed(back)])
    return [f'<path fill="{line.colour}" stroke="{line.colour}" d="M{path}Z"><title>{text(line.name)}</title></path>']


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two values, nine at most. Local."""
    power = 10.0 ** math.floor(math.log10((high - low) / _NUM_TICKS))
    step = next(times * power for times in (1, 2, 5, 10, 20) if times * power * _NUM_TICKS >= high - low)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def number(value: float) -> str:
    """Return a number in six digits at most. Local."""
    return f"{value:.6g}"


def text(words: str) -> str:
    """Return text of a file in the form for a page: it can neither end an element nor control a terminal. Local."""
    return escape(printable(words))
