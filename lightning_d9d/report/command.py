"""`lightning-d9d report` makes a page, and pictures, about the logged values of a run."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lightning_d9d.errors import ConfigError, StateError, reason
from lightning_d9d.report.charts import Chart, charts_of
from lightning_d9d.report.files import find_files
from lightning_d9d.report.page import page_of
from lightning_d9d.report.series import Run, read_run

_PAGE = "report.html"


@dataclass(frozen=True)
class Report:
    """The files that were written, and their contents."""

    page: Path
    pictures: list[Path]
    run: Run
    charts: list[Chart]


def make_report(directory: str | Path, page: str | Path | None = None, pictures: str | Path | None = None) -> Report:
    """Draw the logged values of a run: a page with everything in it and, if requested, a PNG file for each chart.

    Local.

    Args:
        directory: The folder of one job (`version_0`), of all jobs of a logger (`lightning_logs`), or a folder above
            these. The last run in it is drawn. Jobs that continue each other are one run.
        page: File that ends in .html; by default `report.html` in the directory. An existing file is replaced.
        pictures: A folder, which is made, for PNG files. This needs matplotlib (extra `viz`).

    Raises:
        ConfigError: Nothing is logged there, or several runs are; a library is missing, or a file cannot be written.
        StateError: A log is damaged or cannot be read.
    """
    directory = Path(directory)
    page = directory / _PAGE if page is None else Path(page)
    if page.suffix != ".html":
        raise ConfigError(f"page={str(page)!r} must end in .html")
    if pictures is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("PNG files need matplotlib, which is not installed: pip install 'lightning-d9d[viz]'")
    found = find_files(directory)
    run = read_run(found.logs)
    charts = charts_of(run.values)
    try:
        content = page_of(run, charts, found)
    except OSError as error:
        raise StateError(f"{error.filename} cannot be read: {reason(error)}; move it away") from error
    images = list[Path]()
    with _writing(page):
        _replace(page, content)
    if pictures is not None:
        with _writing(Path(pictures)):
            images = _save_images(charts, run, Path(pictures))
    return Report(page, images, run, charts)


@contextmanager
def _writing(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {reason(error)}; give another place, or free some space"
        ) from error


def _replace(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(content, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _save_images(charts: list[Chart], run: Run, folder: Path) -> list[Path]:
    from lightning_d9d.report.image import save_image

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{index:02}_{chart.key}.png" for index, chart in enumerate(charts)]
    for chart, path in zip(charts, paths, strict=True):
        save_image(chart, run.restarts, path)
    return paths


def main(arguments: argparse.Namespace) -> None:
    """Run the subcommand.

    Raises:
        ConfigError: `make_report` refuses the directory or an option.
        StateError: A log is damaged or cannot be read.
    """
    report = make_report(arguments.directory, arguments.output, arguments.pictures)
    folders = ", ".join(folder.name for folder in report.run.folders)
    lines = [f"{report.page}: {len(report.charts)} charts of {folders}", *map(str, report.pictures)]
    sys.stdout.write("\n".join([*lines, *report.run.notes, ""]))
