"""The page about installing names the extras, the packages and the versions of `pyproject.toml`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "how-to" / "install.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def names_in(heading: str) -> set[str]:
    """Return the names in the first column of the table below a heading."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([\w-]+)`", row.split("|")[1])}


def test_extras() -> None:
    assert names_in("Extras") == {*PROJECT["optional-dependencies"]}


def test_dependencies() -> None:
    assert names_in("What comes along") == {Requirement(each).name for each in PROJECT["dependencies"]}


def test_versions() -> None:
    torch = next(Requirement(each) for each in PROJECT["dependencies"] if each.startswith("torch>"))
    (oldest, newest) = re.findall(r"torch (\d+\.\d+) to (\d+\.\d+)", PAGE)[0]
    assert torch.specifier.contains(f"{oldest}.0")
    assert torch.specifier.contains(f"{newest}.1")
    assert not torch.specifier.contains(f"2.{int(newest[2:]) + 1}.0")
    (python,) = re.findall(r"Python (\S+) or newer", PAGE)
    assert PROJECT["requires-python"] == f">={python}"
