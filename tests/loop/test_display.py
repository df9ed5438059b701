"""What a fit shows in a terminal: bars after a resume, tables of ranks, summaries of pipelines, and no noise."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_d9d.loop.display import readable
from tests.harness.terminal import Screen, run_in_terminal
from tests.loop.display_job import Job, fit, read

NOISE = ("LeafSpec", "litlogger", "sync_dist", "`validation_step`", "FLOPs", "Flops", "Epoch 0/-2", "e+0")
FIRST, LAST = 16, 20
"""Steps of a run, and of the one that goes on; an epoch has 40."""


def bars(lines: list[str]) -> list[tuple[int, int, float]]:
    """Return the training bar as often as it was drawn: batches done, all batches, batches a second."""
    found = []
    for line in lines:
        tqdm = re.search(r"^Epoch 0: .* (\d+)/(\d+) \[.*, +([\d.?]+)it/s", line)
        rich = re.search(r"^Epoch 0 .* (\d+)/(\d+) .* ([\d.]+)it/s", line)
        if (match := tqdm or rich) is not None:
            found.append((int(match[1]), int(match[2]), float(match[3].replace("?", "0"))))
    return found


def summary(screen: Screen) -> list[str]:
    """The rows and totals of the model summary."""
    return [line for line in screen.lines if re.search(r"ModuleList|params$|params size|Modules in", line)]


@pytest.mark.jobs
@pytest.mark.parametrize("display", ["tqdm", "rich"])
def test_bar_after_a_resume(tmp_path: Path, display: str) -> None:
    """Batches of the earlier run took no time in this one, and the total is where training ends."""
    first = Job(display, trainer={"max_steps": FIRST}, saving={"save_last": True, "every_n_train_steps": FIRST})
    screen = run_in_terminal(1, tmp_path, fit, first, replace(first, resumes=True, trainer={"max_steps": LAST}))
    assert screen.exit_codes == [0]
    at = next(i for i, line in enumerate(screen.lines) if line.startswith("Restoring states"))
    before, after = bars(screen.lines[:at]), bars(screen.lines[at:])
    assert {total for _, total, _ in before} == {FIRST}
    assert {total for _, total, _ in after} == {LAST}
    assert max(done for done, _, _ in before) == FIRST
    assert {done for done, _, _ in after if done not in (0, LAST)} <= set(range(FIRST, LAST))
    assert after[-1][0] == LAST
    shown, seconds = after[-1][2], read(tmp_path, "seconds")[1]
    assert 0.1 < shown * seconds / (LAST - FIRST) < 2
    assert not [line for line in screen.lines for noise in NOISE if noise in line]
    assert re.search(r"tokens_per_s[=:] ?\d{2,}", screen.lines[-1])


@pytest.mark.jobs
@pytest.mark.parametrize(("display", "mesh"), [("tqdm", {"pipeline_parallel": 2}), ("rich", {})])
def test_two_ranks(tmp_path: Path, display: str, mesh: dict[str, int]) -> None:
    """The table of ranks has lines of its own, and the summary is that of one process."""
    name = "model.layers.3.input_layernorm.weight"
    two = Job(display, num_ranks=2, mesh=mesh, trainer={"max_steps": 2}, saving=None, frozen=name, validates=True)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    screen = run_in_terminal(2, tmp_path / "two", fit, two)
    assert screen.exit_codes == [0, 0]
    table = screen.lines.index("2 ranks on cpu, seen from rank 0")
    rows = [line for line in screen.lines[table:] if not line.startswith("Epoch")]
    assert rows[1] == "domain   axis rank/size"
    assert [line.split("  ")[0] for line in rows if line.startswith(("tokens per", "GiB per"))] == [
        "tokens per step",
        "GiB per rank",
    ]
    assert not [line for line in screen.lines for noise in NOISE if noise in line]
    one = run_in_terminal(1, tmp_path / "one", fit, replace(two, num_ranks=1, mesh={}))
    assert summary(screen) == summary(one) != []
    assert "16        Non-trainable params" in screen.lines


def test_readable() -> None:
    values = [0.0, 0.25, 5.16434, 876.91, 9012.4, 1.2e7, 3e-5, -2000.0, float("nan")]
    shown = ["0.000", "0.250", "5.164", "876.910", "9012", "12000000", "3.00e-05", "-2000", "nan"]
    assert [readable(value) for value in values] == shown
