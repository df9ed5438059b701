"""Pictures of the rounds of a topology: replicas on a circle, an edge as lines between its replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MAX_ROUNDS = 12
"""Largest number of rounds that are drawn."""
_MAX_COLUMNS = 4
_MAX_NUMBERED = 32
"""Largest number of replicas that are labelled with their number."""
_COLOUR = "#4c78a8"

Drawn = Sequence[Sequence[tuple[tuple[int, ...], float]]]
"""The replicas of each edge and its weight, for each round."""


def _places(num_replicas: int) -> list[tuple[float, float]]:
    """Return the positions of replicas, clockwise from the top."""
    angles = [2 * math.pi * replica / num_replicas for replica in range(num_replicas)]
    return [(math.sin(angle), math.cos(angle)) for angle in angles]


def _lines(replicas: Sequence[int]) -> list[tuple[int, int]]:
    """Return the lines between replicas: one for a pair, a closed walk for more."""
    if len(replicas) < 2:
        return []
    steps = list(zip(replicas, [*replicas[1:], replicas[0]], strict=True))
    return steps[:1] if len(replicas) == 2 else steps


def draw_image(rounds: Drawn, num_replicas: int, path: Path) -> None:
    """Draw with matplotlib. Local."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown, places = rounds[:_MAX_ROUNDS], _places(num_replicas)
    columns = min(_MAX_COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(3 * columns, 3.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for number, edges in enumerate(shown):
        axes = figure.add_subplot(rows, columns, number + 1)
        for replicas, weight in edges:
            for line in _lines(replicas):
                axes.plot(*zip(*(places[each] for each in line), strict=True), color=_COLOUR, linewidth=1 + weight)
        axes.scatter(
            *zip(*places, strict=True), s=220 if num_replicas <= _MAX_NUMBERED else 8, color="#dddddd", zorder=2
        )
        for replica, place in enumerate(places if num_replicas <= _MAX_NUMBERED else []):
            axes.text(*place, str(replica), ha="center", va="center", fontsize=8, zorder=3)
        axes.set_title(f"round {number}", fontsize=10)
        axes.set_aspect("equal")
        axes.set_xlim(-1.25, 1.25)
        axes.set_ylim(-1.25, 1.25)
        axes.axis("off")
    figure.savefig(path, dpi=100)


def draw_page(rounds: Drawn, num_replicas: int, path: Path) -> None:
    """Draw with plotly. Local."""
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    shown, places = rounds[:_MAX_ROUNDS], _places(num_replicas)
    columns = min(_MAX_COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    titles = [f"round {number}" for number in range(len(shown))]
    figure = make_subplots(rows=rows, cols=columns, subplot_titles=titles)
    for number, edges in enumerate(shown):
        where: dict[str, Any] = {"row": number // columns + 1, "col": number % columns + 1}
        x: list[float | None] = []
        y: list[float | None] = []
        for replicas, _ in edges:
            for first, second in _lines(replicas):
                x += [places[first][0], places[second][0], None]
                y += [places[first][1], places[second][1], None]
        lines = graph_objects.Scatter(x=x, y=y, mode="lines", line={"color": _COLOUR}, hoverinfo="skip")
        figure.add_trace(lines, **where)
        texts = [str(replica) for replica in range(num_replicas)]
        across, up = zip(*places, strict=True)
        mode = "markers+text" if num_replicas <= _MAX_NUMBERED else "markers"
        marker = {"size": 18 if num_replicas <= _MAX_NUMBERED else 4, "color": "#dddddd"}
        figure.add_trace(graph_objects.Scatter(x=across, y=up, mode=mode, text=texts, marker=marker), **where)
    figure.update_xaxes(visible=False, range=[-1.25, 1.25])
    figure.update_yaxes(visible=False, range=[-1.25, 1.25])
    figure.update_layout(showlegend=False, height=320 * rows, width=320 * columns)
    figure.write_html(path)
