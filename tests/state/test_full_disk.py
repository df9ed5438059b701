"""Exports that do not fit on the disk, or are killed: the old one stays, whole, until the new one is."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from lightning_d9d.errors import StateError
from lightning_d9d.state import complete_directory, read_tensors, save_tensors
from lightning_d9d.state.places import UrlPath
from tests.harness.forked import killed_at, on_small_disk

NAME = "export"
ROOMS = {0: False, 4: False, 60: False, 128: False, 400: True}
"""Free kilobytes, and whether the new one fits."""


class Store(LocalFileSystem):
    """A folder that fsspec sees as a store of objects."""

    protocol = "stored"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("stored://"))


fsspec.register_implementation("stored", Store)


def save(path: Path | str, number: float, size: int = 10) -> None:
    tensors = {"a": torch.full((size,), number), "b": torch.full((3,), number)}
    save_tensors(tensors, path, overwrite=True, max_shard_bytes=40)


def saved(path: Path | str) -> float:
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


class Vanished:
    """A tensor that can no longer be read when the export has begun."""

    shape, dtype = (2,), torch.float32

    def __init__(self, url: str) -> None:
        self.url = url

    def __getitem__(self, index: object) -> Tensor:
        assert saved(self.url) == 1
        raise FileNotFoundError(2, "No such file")


@pytest.mark.parametrize("former", [True, False])
def test_killed_exports_to_a_store_leave_the_old_or_the_new(tmp_path: Path, former: bool) -> None:
    """In between no weights are found, and all that is new is there."""
    seen, call, killed = [], 0, True
    while killed:
        folder = tmp_path / str(call)
        path, url = folder / NAME, f"stored://{folder / NAME}"
        path.mkdir(parents=True)
        if former:
            save(url, 1)
        killed = killed_at(call, folder, lambda url=url: save(url, 2))
        try:
            seen.append(saved(url))
        except StateError:  # as the next line shows, it finds no weights
            assert not {"model.safetensors", "model.safetensors.index.json"} & set(os.listdir(path))
            seen.append(None)
            if former:
                for each in path.glob(".*.partial/*"):
                    each.rename(path / each.name)
                assert saved(url) == 2
        save(url, 3)
        assert saved(url) == 3
        assert sum(not name.startswith(".") for name in os.listdir(path)) == 4
        shutil.rmtree(folder)
        call += 1
    moments = [1 if former else None, None, 2] if former else [None, 2]
    assert sorted(seen, key=moments.index) == seen
    assert set(seen) == set(moments)
    assert call > 20


def test_what_a_killed_export_left_in_a_store_goes_after_a_day(tmp_path: Path) -> None:
    url, hour = f"stored://{tmp_path / NAME}", 3600
    for age in (25 * hour, hour):
        left = tmp_path / NAME / f".{int(time.time()) - age}-0123456789abcdef.partial"
        left.mkdir(parents=True)
        (left / "model.safetensors").touch()
    with pytest.raises(StateError, match="set overwrite=True"):
        save_tensors({"a": torch.zeros(2)}, url)
    save(url, 1)
    assert saved(url) == 1
    assert [name for name in os.listdir(tmp_path / NAME) if name.startswith(".")] == [left.name]
    shutil.rmtree(tmp_path / NAME)
    left.mkdir(parents=True)
    save_tensors({"a": torch.zeros(2)}, url)


def test_an_export_to_a_store_that_fails_leaves_the_old(tmp_path: Path) -> None:
    for url in (f"stored://{tmp_path / NAME}", "memory://test_fails/export"):
        save(url, 1)
        with pytest.raises(StateError, match="No such file"):
            save_tensors({"a": Vanished(url)}, url, overwrite=True)
        assert saved(url) == 1
        with pytest.raises(StateError, match=r"set overwrite=True"), complete_directory(url, False, "no"):
            pass
        for entry in UrlPath(url).entries():
            (UrlPath(url) / entry).remove()
        with (
            pytest.raises(StateError, match=r"set overwrite=True"),
            complete_directory(url, False, "it cannot be written"),
        ):
            save(url, 2)
        assert saved(url) == 2
        with pytest.raises(StateError, match="it is a file, which a directory cannot replace"):
            save(f"{url}/model.safetensors.index.json", 1)
    assert len(os.listdir(tmp_path / NAME)) == 4
