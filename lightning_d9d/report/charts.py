"""The charts of a run: which values share a chart, and the number of points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

MAX_POINTS = 1000
"""Maximum number of points: a line with more would be as wide as a chart. Each part of it keeps its smallest and its
largest value."""
_LARGEST = 1e300
"""Above this value the height of a chart is not finite."""
_SMALLEST = 1e-290
"""Below this value the distance of two ticks is 0."""
_MOST_ENTRIES = 12
_MOST_COLOURS = 8
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f7f")
"""Six of eight colours that colour-blind people can distinguish (Okabe and Ito, "Color universal design", 2008), and
two more."""


@dataclass(frozen=True)
class Line:
    """The values of one name."""

    name: str
    points: Sequence[tuple[float, float]]
    """Steps and values; a value that is not finite interrupts the line."""
    colour: str
    base: Sequence[float] | None = None
    """The beginning of a stacked part, at each step."""


@dataclass(frozen=True)
class Chart:
    """A picture over the optimizer steps of a run."""

    key: str
    """The chart's name in file names."""
    title: str
    lines: Sequence[Line]
    low: float
    high: float
    """The values at its lower and upper edge."""
    steps: tuple[float, float]
    """The first and the last step that the run has logged."""


@dataclass(frozen=True)
class _Kind:
    key: str
    title: str
    patterns: tuple[str, ...]
    from_zero: bool = True
    is_stacked: bool = False


_KINDS = (
    _Kind("loss", "Loss", ("train_loss", "val_loss", "loss", "*_loss", "*_loss_*", "loss_*"), from_zero=False),
    _Kind("learning_rate", "Learning rate", ("learning_rate", "learning_rate/*", "lr-*")),
    _Kind("grad_norm", "Norm of the gradients", ("grad_norm", "grad_norm/*")),
    _Kind("skipped_steps", "Steps left out so far", ("skipped_steps",)),
    _Kind("tokens", "Tokens per second", ("speed/tokens_per_s", "speed/counted_tokens_per_s", "tokens_per_s")),
    _Kind("samples", "Samples per second", ("speed/samples_per_s",)),
    _Kind("step_seconds", "Seconds of a step", ("step/seconds",)),
    _Kind(
        "step_parts",
        "Parts of a step (s)",
        ("step/compute_seconds", "step/communication_seconds", "step/host_seconds", "step/data_seconds"),
        is_stacked=True,
    ),
    _Kind("tflops", "TFLOP/s of a device", ("tflops/*",)),
    _Kind("mfu", "MFU", ("mfu/*",)),
    _Kind("hfu", "HFU", ("hfu/*",)),
    _Kind("memory", "Memory of the fullest GPU (GiB)", ("memory/*",)),
    _Kind("data", "Shares: padding, counted tokens, time without a batch", ("data/*_share", "data_wait")),
    _Kind("expert_load", "Tokens of the busiest expert over the mean", ("expert_load/*",)),
    _Kind("expert_entropy", "Entropy of the experts' load over that of an even one", ("expert_entropy/*",)),
)


def charts_of(values: Mapping[str, Sequence[tuple[int, float]]]) -> list[Chart]:
    """Return the charts of logged values. Values of other names get separate charts, after the others. Local.

    Args:
        values: Steps and values by name, in the order of steps. A name without a finite value has no line.
    """
    drawn = {name: thinned(points) for name, points in values.items() if any(_is_finite(value) for _, value in points)}
    logged = [step for points in drawn.values() for step in (points[0][0], points[-1][0])]
    steps = (min(logged), max(logged)) if logged else (0, 0)
    charts = []
    for kind in _KINDS:
        names = [
            name for pattern in kind.patterns for name in sorted(drawn, key=_by_number) if fnmatchcase(name, pattern)
        ]
        taken = {name: drawn.pop(name) for name in dict.fromkeys(names)}
        if taken:
            charts.append(_chart(kind, taken, steps))
    others = [_Kind(_file_name(name), name, (), from_zero=False) for name in sorted(drawn, key=_by_number)]
    return charts + [_chart(kind, {kind.title: drawn[kind.title]}, steps) for kind in others]


def _chart(kind: _Kind, values: Mapping[str, Sequence[tuple[float, float]]], steps: tuple[float, float]) -> Chart:
    lines = _stacked(values) if kind.is_stacked else _beside(values)
    shown = [value for line in lines for _, value in line.points if _is_finite(value)]
    low, high = min(shown), max(shown)
    if kind.from_zero:
        low, high = min(0.0, low), max(0.0, high)
    room = (high - low) / 20
    if room < _SMALLEST:
        room = max(abs(low) / 2, _SMALLEST) if low else 0.5
    low, high = (low if kind.from_zero and low == 0 else low - room), (high if high == 0 > low else high + room)
    return Chart(kind.key, kind.title, lines, low, high, steps)


def _beside(values: Mapping[str, Sequence[tuple[float, float]]]) -> list[Line]:
    return [Line(name, points, _colour(index, len(values))) for index, (name, points) in enumerate(values.items())]


def _stacked(values: Mapping[str, Sequence[tuple[float, float]]]) -> list[Line]:
    """Return lines that are stacked, at the steps that all of them have."""
    by_step = [{step: value for step, value in points if _is_finite(value)} for points in values.values()]
    steps = sorted(set.intersection(*map(set, by_step)))
    if not steps:
        return _beside(values)
    lines, base = [], [0.0] * len(steps)
    for index, (name, of_name) in enumerate(zip(values, by_step, strict=True)):
        top = [under + of_name[step] for under, step in zip(base, steps, strict=True)]
        lines.append(Line(name, list(zip(steps, top, strict=True)), _colour(index, len(values)), base))
        base = top
    return lines


def thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Return at most `MAX_POINTS` points: the ends of a line, and the lowest and highest point of each part of it.

    Local.
    """
    if len(points) <= MAX_POINTS:
        return points
    num_parts = MAX_POINTS // 2 - 1
    kept = {0, len(points) - 1}
    for part in range(num_parts):
        begin, end = (len(points) * number // num_parts for number in (part, part + 1))
        finite = [index for index in range(begin, end) if _is_finite(points[index][1])] or [begin]
        kept |= {choose(finite, key=lambda index: points[index][1]) for choose in (min, max)}
    return [points[index] for index in sorted(kept)]


def segments(line: Line) -> list[list[tuple[float, float]]]:
    """Return the pieces of a line between values that are not finite. Local."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for step, value in line.points:
        if _is_finite(value):
            pieces[-1].append((step, value))
        else:
            pieces.append([])
    return [piece for piece in pieces if piece]


def ends(lines: Sequence[Line]) -> Sequence[Line]:
    """Return the lines of a legend: all, or the first and the last of many. Local."""
    return lines if len(lines) <= _MOST_ENTRIES else [lines[0], lines[-1]]


def _is_finite(value: float) -> bool:
    return abs(value) < _LARGEST


def _colour(index: int, number: int) -> str:
    """Return one of a few colours, or one between blue and red where there are more lines."""
    if number <= _MOST_COLOURS:
        return _COLOURS[index]
    share = index / (number - 1)
    return f"#{round(40 + 180 * share):02x}50{round(220 - 180 * share):02x}"


def _by_number(name: str) -> tuple[str, float, str]:
    """Sort layer_10 after layer_9."""
    stem = name.rstrip("0123456789")
    return stem, float(name[len(stem) :] or -1), name


def _file_name(name: str) -> str:
    return "".join(each if each.isalnum() or each in "-_" else "_" for each in name)[:80]
