"""The logged values of one job, or of several that continue each other.

[Note: going back] A job that resumes from a checkpoint repeats the steps after it. A value replaces those of its name
at the same and later steps, which an earlier job wrote.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from lightning_d9d.errors import ConfigError, StateError, reason
from lightning_d9d.report.files import METRICS

Point = tuple[int, float]
"""A step and a value."""

_NO_VALUES = {"step", "epoch", "hp_metric"}
"""Names that loggers add to the logged values."""


@dataclass(eq=False)
class _Job:
    """The folder of one job, or of several jobs that wrote into it."""

    folder: Path
    values: dict[str, list[Point]] = field(default_factory=dict)
    restarts: dict[str, list[int]] = field(default_factory=dict)
    """The steps at which a job resumed after going back, by name."""
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, step: int, value: float) -> None:
        """Add a value. See [Note: going back]."""
        points = self.values.setdefault(name, [])
        if points and points[-1][0] > step:
            self.restarts.setdefault(name, []).append(step)
        while points and points[-1][0] >= step:
            points.pop()
        points.append((step, value))

    @property
    def main(self) -> str:
        """The name with the most values."""
        return max(sorted(self.values), key=lambda name: len(self.values[name]))

    @property
    def trains(self) -> bool:
        """True if the job has steps: `validate` and `test` log at step 0."""
        return any(points[-1][0] > 0 for points in self.values.values())

    def goes_on(self, before: _Job) -> bool:
        """Return whether this job continues an earlier one: it begins after its first interval of logs."""
        points = self.values[self.main]
        gaps = Counter(later[0] - earlier[0] for earlier, later in pairwise(points))
        begin = points[0][0]
        return begin >= gaps.most_common(1)[0][0] if gaps else begin > before.values[before.main][0][0]


@dataclass(frozen=True)
class Run:
    """All logged values of one run."""

    folders: Sequence[Path]
    """The folders of its jobs."""
    values: Mapping[str, Sequence[Point]]
    """Values by name, in the order of steps."""
    restarts: Sequence[int]
    """The first steps of resumed jobs."""
    notes: Sequence[str]
    """Sentences about values that are not drawn."""


def read_run(folders: Sequence[Path]) -> Run:
    """Read the last run of some folders: the last job, and the earlier ones that it continues. Local.

    Args:
        folders: Folders of jobs, in their order, each with a `metrics.csv` or with event files of TensorBoard. If a
            folder has both, `metrics.csv` is read.

    Raises:
        ConfigError: Nothing was logged, or TensorBoard is not installed to read its files.
        StateError: A file is damaged.
    """
    logged = [job for job in map(_read_job, folders) if job.values]
    if not logged:
        raise ConfigError(
            f"nothing is logged in {', '.join(map(str, folders))} yet; CSVLogger(flush_logs_every_n_steps=...) says "
            "when values are written"
        )
    jobs = [job for job in logged if job.trains] or logged
    begin = len(jobs) - 1
    while begin > 0 and jobs[begin].goes_on(jobs[begin - 1]):
        begin -= 1
    first, *later = jobs[begin:]
    whole = _Job(first.folder, dict(first.values), notes=[note for job in jobs[begin:] for note in job.notes])
    restarts = [*first.restarts.get(first.main, ())]
    for job in later:
        restarts += [job.values[job.main][0][0], *job.restarts.get(job.main, ())]
        for name, points in job.values.items():
            for step, value in points:
                whole.add(name, step, value)
    if others := [job.folder.name for job in logged if job not in jobs[begin:]]:
        whole.notes.append(f"Not drawn: {', '.join(others)}, of other runs. Give the folder of one to draw it.")
    return Run([job.folder for job in jobs[begin:]], whole.values, sorted({*restarts}), whole.notes)


def _read_job(folder: Path) -> _Job:
    job = _Job(folder)
    path = folder / METRICS
    try:
        for name, step, value in _of_csv(path, job.notes) if path.is_file() else _of_events(folder):
            if name not in _NO_VALUES:
                job.add(name, step, value)
    except OSError as error:
        raise StateError(f"{error.filename or folder} cannot be read: {reason(error)}") from error
    return job


def _of_csv(path: Path, notes: list[str]) -> Iterator[tuple[str, int, float]]:
    """Read names, steps and values of a file of CSVLogger. A last line without an end is left out, with a note."""
    text, newline, rest = path.read_text(encoding="utf-8", errors="replace").rpartition("\n")
    if rest:
        notes.append(f"The last line of {path} has no end, as where a job was killed. It is left out.")
    rows = csv.reader(io.StringIO(text + newline, newline=""))
    names: list[str] | None = None
    while (row := _next_row(rows, path)) is not None:
        where = f"{path}, line {rows.line_num}"
        if names is None:
            names = row
            if "step" not in names:
                raise StateError(
                    f"{where}: a column 'step' is missing, so CSVLogger has not written the file; {_REMEDY}"
                )
        elif row:
            if len(row) != len(names):
                raise StateError(f"{where}: {len(row)} values under {len(names)} names; {_REMEDY}")
            values = {name: _number(cell, name, where) for name, cell in zip(names, row, strict=True) if cell}
            step = values.pop("step", None)
            if step is None or step % 1 != 0:
                raise StateError(f"{where}: the step is {step}, not a whole number; {_REMEDY}")
            yield from ((name, int(step), value) for name, value in values.items())


_REMEDY = "delete the line, or move the file away"


def _next_row(rows: Iterator[list[str]], path: Path) -> list[str] | None:
    try:
        return next(rows, None)
    except csv.Error as error:
        raise StateError(f"{path}, line {rows.line_num}: {error}; {_REMEDY}") from error  # type: ignore[attr-defined]


def _number(cell: str, name: str, where: str) -> float:
    try:
        return float(cell)
    except ValueError:
        shown = cell if len(cell) <= 20 else f"{cell[:20]}..."
        raise StateError(f"{where}: {name} is {shown!r}, not a number; {_REMEDY}") from None


def _of_events(folder: Path) -> Iterator[tuple[str, int, float]]:
    """Read names, steps and values of TensorBoard's event files, in the order in which they were written."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-not-found]
            EventAccumulator,
        )
    except ImportError as error:
        raise ConfigError(
            f"{folder} has event files of TensorBoard, but TensorBoard is not installed: pip install tensorboard, or "
            "add a CSVLogger to the Trainer"
        ) from error
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=False)
    events.Reload()
    for name in events.Tags()["scalars"]:
        yield from ((name, event.step, event.value) for event in events.Scalars(name))
