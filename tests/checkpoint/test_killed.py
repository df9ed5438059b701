"""A save that is killed, at each of its calls of the file system, in a forked process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_d9d.checkpoint import is_directory, open_directory, remove_directory, save_directory
from lightning_d9d.state import directory
from tests.harness.forked import killed_at

NAME = "last.ckpt"


def save(path: Path, number: int) -> None:
    save_directory(path, {"a": torch.full((3,), float(number)), "b": torch.tensor(number)}, {"number": number})


def loaded(path: Path) -> int:
    """The number of the complete checkpoint under this path."""
    checkpoint = open_directory(path)
    tensors = checkpoint.read()
    number = checkpoint.values["number"]
    assert tensors["a"].tolist() == 3 * [number]
    assert tensors["b"] == number
    return number


def assert_tidy(folder: Path, *others: str) -> None:
    """Nothing but complete checkpoints."""
    assert sorted(os.listdir(folder)) == sorted([NAME, *others])
    assert not (folder / NAME).is_symlink()
    assert len(os.listdir(folder / NAME)) == 2


def nothing(path: Path) -> None:
    pass


def checkpoint(path: Path) -> None:
    save(path, 1)


def file(path: Path) -> None:
    path.write_text("1")


def link(path: Path) -> None:
    save(path.with_name("epoch.ckpt"), 1)
    path.symlink_to("epoch.ckpt")


@pytest.mark.parametrize("former", [nothing, checkpoint, link])
def test_killed_save_leaves_the_old_or_the_new(tmp_path: Path, former: Callable[[Path], None]) -> None:
    seen, call = set(), 0
    while True:
        folder = tmp_path / str(call)
        path = folder / NAME
        folder.mkdir()
        former(path)
        killed = killed_at(call, folder, lambda path=path: save(path, 2))
        if is_directory(path):
            number = loaded(path)
        else:
            assert former is nothing
            assert not path.exists()
            number = 1
        seen.add(number)
        if not killed:
            break
        others = ["epoch.ckpt"] if former is link else []
        assert all(loaded(folder / other) == 1 for other in others)
        save(path, 3)
        assert loaded(path) == 3
        assert_tidy(folder, *others)
        shutil.rmtree(folder)
        call += 1
    assert seen == {1, 2}
    assert number == 2
    assert call > 15


def test_file_systems_that_cannot_swap(tmp_path: Path) -> None:
    """Nothing is there between two renames. The next save puts the old one back first, and keeps it if it fails."""
    found, call = [], 0

    def save_without_swap(path: Path) -> None:
        directory.ctypes.CDLL = lambda name: None
        save(path, 2)

    while True:
        folder = tmp_path / str(call)
        path = folder / NAME
        folder.mkdir()
        file(path)
        killed = killed_at(call, folder, lambda path=path: save_without_swap(path))
        found.append(os.path.lexists(path))
        if not killed:
            break
        if not found[-1]:
            killed_at(5, folder, lambda path=path: save(path, 3))
            assert os.path.lexists(path)
        save(path, 3)
        assert_tidy(folder)
        call += 1
    assert found.count(False) == 1
    assert loaded(path) == 2


@pytest.mark.parametrize("former", [file, Path.mkdir])
def test_other_things_are_replaced(tmp_path: Path, former: Callable[[Path], None]) -> None:
    former(tmp_path / NAME)
    save(tmp_path / NAME, 2)
    assert loaded(tmp_path / NAME) == 2
    assert_tidy(tmp_path)


def test_killed_removal_leaves_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / NAME
    call, left = 0, []
    while True:
        save(path, 1)
        killed = killed_at(call, tmp_path, lambda: remove_directory(path))
        left.append(path.exists() and loaded(path) == 1)
        if not killed:
            break
        call += 1
    assert left[0]
    assert not left[-1]
    assert os.listdir(tmp_path) == []
