"""Checks of what the command line of benchmarks gives. Each error names the option, its value, and what is allowed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def count(text: str) -> int:
    """Read a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def positive(text: str) -> float:
    """Read a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def new_file(text: str) -> Path:
    """Read the path of a file that can be written: its folder must exist."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in a folder that exists")
    return path


def folder(text: str) -> Path:
    """Read the path of a folder, which may be a new one."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a file, not a folder")
    return path


def check_choices(option: str, chosen: Iterable[str], known: Collection[str]) -> None:
    """Check that an option has only words that are known.

    Raises:
        ValueError: A word is unknown.
    """
    if unknown := [each for each in chosen if each not in known]:
        raise ValueError(f"{option} {unknown[0]!r} is unknown; choose from {', '.join(map(repr, known))}")


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Put the option, with its value, before the message of a `ValueError`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error
