"""Gantt pictures of simulated and of measured runs: one row for each rank, one bar for each action.

They need the extra `viz`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from lightning_d9d.errors import ConfigError
from lightning_d9d.pictures import write_picture
from lightning_d9d.schedule.actions import (
    COMPUTE,
    DATA_PARALLEL,
    MESSAGES,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    ComputeAction,
    DataParallelAction,
    Forward,
    MessageAction,
    Overlapped,
    compute_parts,
)
from lightning_d9d.schedule.simulate import Simulation, Span

KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "forward": ("#4c78a8", (Forward,)),
    "full backward": ("#e45756", (Backward,)),
    "input backward": ("#f2a93b", (BackwardInput,)),
    "weight backward": ("#54a24b", (BackwardWeight,)),
    "message": ("#7f7f7f", MESSAGES),
    "collective": ("#b279a2", DATA_PARALLEL),
}
"""Kinds of actions with a separate colour: name -> colour and actions."""

_MAX_TEXTS = 800
"""With more bars than this, bars have neither edges nor the number of their microbatch."""
_BESIDE = {MESSAGES: (0.84, 0.07), DATA_PARALLEL: (0.92, 0.07)}
"""Top and height of bars for messages beside computation, in a row of height 1."""


class Bar(NamedTuple):
    """One bar of the picture."""

    kind: str
    rank: int
    top: float
    """Top of the bar within its row, from 0 to 1."""
    height: float
    start: float
    length: float
    shade: float
    """Shade of the stage: 0 for the first stage of a rank, 1 for its last."""
    action: ComputeAction | MessageAction | DataParallelAction


def bars(run: Simulation | Iterable[Span]) -> list[Bar]:
    """Return the bars of a picture: one for each compute action, two for a pair, and one at either end of a message.

    Actions that take no time have no bar.
    """
    spans = list(run.spans if isinstance(run, Simulation) else run)
    stages: dict[int, set[int]] = {}
    for span in spans:
        for part in compute_parts(span.action):
            stages.setdefault(span.rank, set()).add(part.stage)
    found = []
    for rank, action, start, end in (span for span in spans if span.end > span.start):
        parts = (action.first, action.second) if isinstance(action, Overlapped) else (action,)
        for lane, part in enumerate(parts):
            of_rank = sorted(stages.get(rank, {0}))
            shade = of_rank.index(part.stage) / max(1, len(of_rank) - 1) if part.stage in of_rank else 0.0
            kind, top, height = _place(part)
            if top == 0:
                top, height = lane * height / len(parts), height / len(parts)
            found.append(Bar(kind, rank, top, height, start, end - start, shade, part))
    return found


def _place(action: Action) -> tuple[str, float, float]:
    kind = next(name for name, (_, actions) in KINDS.items() if isinstance(action, actions))
    top, height = next((place for kinds, place in _BESIDE.items() if isinstance(action, kinds)), (0.0, 0.8))
    return kind, top, height


def plot(run: Simulation | Iterable[Span], path: str | Path, title: str | None = None) -> None:
    """Draw a Gantt picture.

    Forwards, full, input and weight backwards differ in colour. A rank's later stages are paler. Messages and
    collectives are thin bars below the computation.

    Args:
        run: A simulation, or measured spans, in any unit of time.
        path: File to write. It ends in .png or .svg (drawn by matplotlib), or in .html (by plotly, with zoom and the
            name of each action).
        title: Title above the picture; by default the step time and bubble ratio of a simulation.

    Raises:
        ConfigError: The path has another ending, there is nothing to draw, or the library is not installed.
    """
    drawn = bars(run)
    if not drawn:
        raise ConfigError("there is nothing to draw: no action takes any time")
    if title is None and isinstance(run, Simulation):
        title = f"step time {run.step_time:g}, bubble ratio {run.bubble_ratio:.1%}"
    write_picture(path, *(partial(draw, drawn, title or "") for draw in (_draw_image, _draw_page)))


def _colour(kind: str, shade: float) -> str:
    """Return the kind's colour, mixed with up to 45% of white."""
    colour, _ = KINDS[kind]
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (255 - channel) * 0.45 * shade):02x}" for channel in channels)


def _draw_image(drawn: list[Bar], title: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    num_ranks = max(bar.rank for bar in drawn) + 1
    figure = Figure(figsize=(12, 1.4 + 0.4 * min(num_ranks, 40)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    has_texts = len(drawn) <= _MAX_TEXTS
    legend = []
    for kind in KINDS:
        of_kind = [bar for bar in drawn if bar.kind == kind]
        if of_kind:
            corners = [_corners(bar) for bar in of_kind]
            colours = [_colour(kind, bar.shade) for bar in of_kind]
            width = 0.4 if has_texts else 0.0
            axes.add_collection(
                PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=width, gid=kind)
            )
            legend.append(Patch(color=KINDS[kind][0], label=kind))
    if has_texts:
        for bar in drawn:
            if isinstance(bar.action, COMPUTE):
                middle = bar.start + bar.length / 2, bar.rank + bar.top + bar.height / 2
                axes.text(*middle, str(bar.action.microbatch), ha="center", va="center", fontsize=6, clip_on=True)
    axes.set_xlim(min(bar.start for bar in drawn), max(bar.start + bar.length for bar in drawn))
    axes.set_ylim(num_ranks, 0)
    axes.set_yticks([rank + 0.4 for rank in range(num_ranks)], [f"rank {rank}" for rank in range(num_ranks)])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("time")
    axes.set_title(title, fontsize=10)
    figure.legend(handles=legend, ncols=len(KINDS), fontsize=8, frameon=False, loc="outside lower center")
    figure.savefig(path, dpi=100)


def _corners(bar: Bar) -> list[tuple[float, float]]:
    left, right = bar.start, bar.start + bar.length
    top, bottom = bar.rank + bar.top, bar.rank + bar.top + bar.height
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _draw_page(drawn: list[Bar], title: str, path: Path) -> None:
    from plotly import graph_objects

    figure = graph_objects.Figure()
    for kind in KINDS:
        of_kind = [bar for bar in drawn if bar.kind == kind]
        if of_kind:
            figure.add_bar(
                name=kind,
                orientation="h",
                base=[bar.start for bar in of_kind],
                x=[bar.length for bar in of_kind],
                y=[bar.rank + bar.top + bar.height / 2 for bar in of_kind],
                width=[bar.height for bar in of_kind],
                marker_color=[_colour(kind, bar.shade) for bar in of_kind],
                customdata=[[str(bar.action), bar.start + bar.length] for bar in of_kind],
                hovertemplate="%{customdata[0]}: %{base} to %{customdata[1]}<extra></extra>",
            )
    num_ranks = max(bar.rank for bar in drawn) + 1
    ranks = list(range(num_ranks))
    figure.update_layout(title=title, barmode="overlay", bargap=0, xaxis_title="time", height=200 + 32 * num_ranks)
    figure.update_yaxes(
        range=[num_ranks, 0], tickvals=[rank + 0.4 for rank in ranks], ticktext=[f"rank {rank}" for rank in ranks]
    )
    figure.write_html(path)
