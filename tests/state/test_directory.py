"""A directory takes its place when it is complete; until then, and if it fails, what was there stays."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_d9d.errors import StateError
from lightning_d9d.state import complete_directory
from lightning_d9d.state.owner import owned
from tests.harness.forked import Held


def write(target: Path, text: str, overwrite: bool = True, error: Exception | None = None) -> None:
    with complete_directory(target, overwrite, "it cannot be written") as folder:
        (folder / "file").write_text(text)
        if error:
            raise error


def make(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "file").write_text(text)


def test_what_a_killed_save_left_is_put_back_or_removed(tmp_path: Path) -> None:
    def between_two_renames(stop: Callable[[], None]) -> None:
        with owned(tmp_path / "target") as owner:
            make(owner.hidden("partial"), "of a killed save")
            (tmp_path / "target").rename(owner.hidden("replaced"))
            stop()

    make(tmp_path / "target", "old")
    Held(between_two_renames).kill()
    assert len(os.listdir(tmp_path)) == 3
    with pytest.raises(ValueError, match="body"):
        write(tmp_path / "target", "new", error=ValueError("body"))
    assert os.listdir(tmp_path) == ["target"]
    assert (tmp_path / "target" / "file").read_text() == "old"
    write(tmp_path / "target", "new")
    assert os.listdir(tmp_path) == ["target"]
    assert (tmp_path / "target" / "file").read_text() == "new"


def test_a_link_is_replaced_and_what_it_points_to_stays(tmp_path: Path) -> None:
    make(tmp_path / "other", "old")
    (tmp_path / "link").symlink_to("other")
    with pytest.raises(
        StateError, match=r"it cannot be written: it already exists and is not an empty directory; .*overwrite"
    ):
        write(tmp_path / "link", "new", overwrite=False)
    write(tmp_path / "link", "new")
    assert sorted(os.listdir(tmp_path)) == ["link", "other"]
    assert not (tmp_path / "link").is_symlink()
    assert [(tmp_path / name / "file").read_text() for name in ("link", "other")] == ["new", "old"]


def test_files_that_came_meanwhile_stay(tmp_path: Path) -> None:
    with (
        pytest.raises(StateError, match=r"it cannot be written: .*not empty"),
        complete_directory(tmp_path / "target", False, "it cannot be written"),
    ):
        make(tmp_path / "target", "of others")
    assert os.listdir(tmp_path) == ["target"]
    assert (tmp_path / "target" / "file").read_text() == "of others"
