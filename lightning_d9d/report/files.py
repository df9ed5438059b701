"""The files of a run below a directory: logs, pictures, and reports of hangs."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from lightning_d9d.errors import ConfigError

METRICS = "metrics.csv"
EVENTS = "events.out.tfevents.*"
HANGS = "hang-*.txt"
PICTURES = ("stragglers*.png", "stragglers*.svg", "timeline*.png", "timeline*.svg")
_MOST_NAMES = 5


@dataclass(frozen=True)
class Found:
    """The files below a directory."""

    logs: Sequence[Path]
    """Folders that a logger wrote: those of one run, or of several runs with the same name, in their order."""
    pictures: Sequence[Path]
    hangs: Sequence[Path]
    """Reports of hangs, the oldest first."""


def find_files(directory: Path) -> Found:
    """Find the files of a run. Hidden folders, checkpoints and links to folders are left out. Local.

    Args:
        directory: The folder of one job (`version_0`), of all jobs of a logger, or a folder with such folders.

    Raises:
        ConfigError: The directory does not exist, is a file, or has no logs or those of several loggers.
    """
    if not directory.is_dir():
        raise ConfigError(
            f"{directory} {'is a file' if directory.exists() else 'does not exist'}; give the directory of a run, "
            "such as lightning_logs/version_0 or the Trainer's default_root_dir"
        )
    logs, pictures, hangs = list[Path](), list[Path](), list[Path]()
    for name, folders, files in os.walk(directory):
        folder = Path(name)
        folders[:] = sorted(each for each in folders if not each.startswith(".") and not each.endswith(".ckpt"))
        is_inside = any(each in folder.parents for each in logs)  # TensorBoard has folders in that of a run
        if not is_inside and any(each == METRICS or fnmatchcase(each, EVENTS) for each in files):
            logs.append(folder)
        pictures += [folder / each for each in files if any(fnmatchcase(each, pattern) for pattern in PICTURES)]
        hangs += [folder / each for each in files if fnmatchcase(each, HANGS)]
    if not logs:
        raise ConfigError(
            f"nothing is logged below {directory}: no {METRICS} of CSVLogger, no event files of TensorBoard; use one "
            "of these loggers in the Trainer. W&B, MLflow and Aim draw their runs themselves"
        )
    names = sorted({str(each.parent) for each in logs})
    if len(names) > 1:
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        raise ConfigError(f"{directory} has logs of several runs; give one of {', '.join(names[:_MOST_NAMES])}{more}")
    return Found(sorted(logs, key=_place), sorted(pictures), sorted(hangs, key=lambda path: path.name))


def _place(folder: Path) -> tuple[float, str]:
    """Return the place among jobs: `version_10` comes after `version_9`."""
    number = re.fullmatch(r"version_(\d+)", folder.name)
    return (float(number[1]) if number else float("inf"), folder.name)
