"""Charts as PNG files, drawn by matplotlib (extra `viz`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_d9d.errors import printable
from lightning_d9d.report.charts import Chart, ends, segments


def save_image(chart: Chart, restarts: Sequence[float], path: Path) -> None:
    """Draw a chart. Local.

    Args:
        chart: The chart.
        restarts: Steps that are marked.
        path: The file to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for line in chart.lines:
        if line.base is not None:
            steps, tops = zip(*line.points, strict=True)
            axes.fill_between(steps, line.base, tops, color=line.colour, linewidth=1)
        else:
            for piece in segments(line):
                axes.plot(*zip(*piece, strict=True), color=line.colour, marker="." if len(piece) == 1 else "")
    for step in restarts:
        axes.axvline(step, color="grey", linestyle="--", linewidth=1)
    first, last = chart.steps
    axes.set(xlabel="optimizer step", ylim=(chart.low, chart.high), xlim=(first, last) if first < last else None)
    axes.set_title(_plain(chart.title), fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    entries = [Patch(color=line.colour, label=_plain(line.name)) for line in ends(chart.lines)]
    figure.legend(handles=entries, ncols=4, fontsize=8, frameon=False, loc="outside lower center")
    figure.savefig(path, dpi=100)


def _plain(words: str) -> str:
    """Return text in which matplotlib finds no formula."""
    return printable(words).replace("$", r"\$")
