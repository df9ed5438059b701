"""Pictures of learning-rate schedules open and have a line for each."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau

from lightning_d9d.errors import ConfigError
from lightning_d9d.optim import WarmupStableDecayLR, learning_rates, plot_learning_rates


def sgd(rate: float | torch.Tensor = 0.1) -> SGD:
    return SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)


def two_schedules() -> dict[str, list[float]]:
    return {
        "WSD": learning_rates(WarmupStableDecayLR(sgd(), warmup_steps=4), 20),
        "cosine of torch": learning_rates(CosineAnnealingLR(sgd(), T_max=20), 20),
    }


def test_rates_of_torch_and_of_tensors() -> None:
    assert learning_rates(CosineAnnealingLR(sgd(), T_max=2), 3) == pytest.approx([0.1, 0.05, 0.0])
    assert learning_rates(WarmupStableDecayLR(sgd(torch.tensor(0.1))), 2) == pytest.approx([0.1, 0.1])


def test_png_has_a_line_for_each(tmp_path: Path) -> None:
    plot_learning_rates(two_schedules(), tmp_path / "rates.png", "two")
    with Image.open(tmp_path / "rates.png") as image:
        assert image.size == (800, 300)
        colours = image.convert("RGB").getcolors(maxcolors=1 << 24)
    assert colours is not None
    assert {(31, 119, 180), (255, 127, 14)} <= {colour for _, colour in colours}  # matplotlib's first two


def test_html_has_all_rates(tmp_path: Path) -> None:
    plot_learning_rates(two_schedules(), tmp_path / "rates.html")
    found = re.search(r'Plotly\.newPlot\(\s*"[^"]+",\s*(\[.*?\]),\s*\{"', (tmp_path / "rates.html").read_text(), re.S)
    assert found is not None
    lines = json.loads(found[1])
    assert {line["name"]: line["y"] for line in lines} == two_schedules()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: plot_learning_rates({"none": []}, path / "x.png"), "there is nothing to draw"),
        (lambda path: plot_learning_rates(two_schedules(), path / "x.gif"), r"must end in \.png, \.svg or \.html"),
        (lambda path: learning_rates(CosineAnnealingLR(sgd(), T_max=2), 0), "num_steps=0 must be at least 1"),
        (lambda path: learning_rates(ReduceLROnPlateau(sgd()), 5), "ReduceLROnPlateau follows a metric"),
    ],
)
def test_what_cannot_be_drawn(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path)


@pytest.mark.parametrize(("name", "library"), [("x.png", "matplotlib"), ("x.html", "plotly")])
def test_without_the_library(name: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setitem(sys.modules, f"{library}.backends.backend_agg", None)
    with pytest.raises(ConfigError, match=rf"{name} needs {library}; pip install 'lightning-d9d\[viz\]'"):
        plot_learning_rates(two_schedules(), tmp_path / name)
