"""Exports that do not fit on the disk, or are killed: the old one stays, whole, until the new one is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_d9d.errors import StateError
from lightning_d9d.state import read_tensors, save_tensors
from tests.harness.forked import killed_at, on_small_disk

NAME = "export"
ROOMS = {0: False, 4: False, 60: False, 128: False, 400: True}
"""Free kilobytes, and whether the new one fits."""


def save(path: Path, number: float, size: int = 10) -> None:
    tensors = {"a": torch.full((size,), number), "b": torch.full((3,), number)}
    save_tensors(tensors, path, overwrite=True, max_shard_bytes=40)


def saved(path: Path) -> float:
    """The number of the complete export under this path."""
    tensors: dict[str, Tensor] = dict(read_tensors(path))
    number = tensors["b"][0].item()
    assert tensors.keys() == {"a", "b"}
    assert all((tensor == number).all() for tensor in tensors.values())
    return number


@pytest.mark.mounts
@pytest.mark.parametrize("room", ROOMS)
def test_a_disk_with_little_room(tmp_path: Path, room: int) -> None:
    path = tmp_path / NAME

    def fill_and_save() -> None:
        save(path, 1)
        system = os.statvfs(tmp_path)
        (tmp_path / "others").write_bytes(bytes(system.f_bavail * system.f_frsize - room * 1024))
        if ROOMS[room]:
            save(path, 2, size=30_000)
        else:
            with pytest.raises(StateError, match=r"export': .*No space left on device.*; free space"):
                save(path, 2, size=30_000)
        assert saved(path) == 1 + ROOMS[room]
        assert sorted(os.listdir(tmp_path)) == [NAME, "others"]

    on_small_disk(tmp_path, 1024, fill_and_save)


@pytest.mark.parametrize("former", [True, False])
def test_killed_exports_leave_the_old_or_the_new(tmp_path: Path, former: bool) -> None:
    seen, call, killed = set(), 0, True
    while killed:
        folder = tmp_path / str(call)
        folder.mkdir()
        path = folder / NAME
        if former:
            save(path, 1)
        killed = killed_at(call, folder, lambda path=path: save(path, 2))
        seen.add(saved(path) if path.exists() else None)
        save(path, 3)
        assert saved(path) == 3
        assert os.listdir(folder) == [NAME]
        shutil.rmtree(folder)
        call += 1
    assert seen == {1 if former else None, 2}
    assert call > 10
