"""Pictures open and have a bar for everything that takes time."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from lightning_d9d.errors import ConfigError
from lightning_d9d.schedule import (
    Costs,
    DualPipeV,
    Forward,
    Interleaved1F1B,
    Simulation,
    Span,
    ZeroBubble,
    add_data_parallel,
    plot,
    simulate,
)
from lightning_d9d.schedule.plot import KINDS, bars

SVG = "{http://www.w3.org/2000/svg}"


def everything() -> Simulation:
    """All kinds of action: 16 F; on stage 0 B, or I and W; messages either end, 2 links x 4 x 2 directions."""
    program = add_data_parallel(ZeroBubble().program(3, 4))
    return simulate(program, Costs(unshard=1, reduce_gradients=1, transfer=0.2))


EXPECTED = {
    "forward": 12,
    "full backward": 4,
    "input backward": 8,
    "weight backward": 8,
    "message": 32,
    "collective": 6,
}


def test_bars() -> None:
    assert Counter(bar.kind for bar in bars(everything())) == EXPECTED
    forward, backward = bars([Span(1, DualPipeV().compute(2, 4).ranks[1][-8], 2.0, 5.0)])
    assert (forward.kind, backward.kind) == ("forward", "full backward")
    assert (forward.start, forward.length, forward.top + forward.height) == (2.0, 3.0, backward.top)


def test_later_stages_are_paler() -> None:
    shades = {bar.action.stage: bar.shade for bar in bars(simulate(Interleaved1F1B(3).compute(1, 2)))}
    assert shades == {0: 0.0, 1: 0.5, 2: 1.0}


def test_svg(tmp_path: Path) -> None:
    plot(everything(), tmp_path / "gantt.svg")
    root = ElementTree.parse(tmp_path / "gantt.svg").getroot()
    groups = {group.get("id"): group for group in root.iter(f"{SVG}g") if group.get("id") in KINDS}
    counts = {
        name: len(list(group.iter(f"{SVG}use"))) or len(list(group.iter(f"{SVG}path")))
        for name, group in groups.items()
    }
    assert counts == EXPECTED


def test_png_has_every_colour(tmp_path: Path) -> None:
    plot(everything(), tmp_path / "gantt.png", title="all of it")
    with Image.open(tmp_path / "gantt.png") as image:
        assert image.width == 1200
        colours = image.convert("RGB").getcolors(maxcolors=1 << 24)
    assert colours is not None
    found = {"#{:02x}{:02x}{:02x}".format(*colour) for _, colour in colours if isinstance(colour, tuple)}
    assert {colour for colour, _ in KINDS.values()} <= found


def test_html(tmp_path: Path) -> None:
    plot(everything(), tmp_path / "gantt.html")
    page = (tmp_path / "gantt.html").read_text(encoding="utf-8")
    data = re.search(r'Plotly\.newPlot\(\s*"[\w-]+",\s*(\[.*?\])\s*,\s*\{"', page, re.S)
    assert data is not None
    traces = json.loads(data[1])
    assert {trace["name"]: len(trace["customdata"]) for trace in traces} == EXPECTED
    assert traces[0]["customdata"][0][0] == "0F0"


def test_a_measured_run(tmp_path: Path) -> None:
    spans = [Span(0, Forward(0, 0), 12.5, 13.0), Span(1, Forward(1, 0), 13.1, 14.0)]
    plot(spans, tmp_path / "measured.png")
    assert (tmp_path / "measured.png").stat().st_size > 1000


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gantt\.pdf' must end in \.png, \.svg or \.html"):
        plot(everything(), tmp_path / "gantt.pdf")
    with pytest.raises(ConfigError, match="there is nothing to draw: no action takes any time"):
        plot([], tmp_path / "gantt.png")


@pytest.mark.parametrize(
    ("file", "module", "library"),
    [("gantt.svg", "matplotlib.backends.backend_agg", "matplotlib"), ("gantt.html", "plotly", "plotly")],
)
def test_without_the_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, module: str, library: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"drawing {file} needs {library}; pip install 'lightning-d9d\[viz\]'"):
        plot(everything(), tmp_path / file)
