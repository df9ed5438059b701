"""What a machine without power keeps: all of a save is on the disk, names too, before the step that shows it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_d9d.checkpoint import is_directory
from tests.harness.forked import Held
from tests.state.test_full_disk import save as export
from tests.state.test_owner import checkpoint, file

NAME = "last.ckpt"


class Disk:
    """What the system may not have put on the disk yet, under a folder: names in directories, and files. For a process.

    Args:
        folder: Other places are left out.
        path: Where something is to appear.
    """

    def __init__(self, folder: Path, path: Path) -> None:
        self.folder, self.path = folder, path
        self.waiting: set[Path] = set()
        self.shown: list[Path] = []
        self._fsync = os.fsync

    def watch(self) -> None:
        os.fsync = self.sync
        sys.addaudithook(self.before)

    def sync(self, descriptor: int) -> None:
        self._fsync(descriptor)
        self.waiting.discard(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    def before(self, event: str, arguments: tuple[object, ...]) -> None:
        """Notes what comes; an error ends what was about to be done."""
        if not arguments or not str(arguments[0]).startswith(str(self.folder)) or str(arguments[0]).endswith(".owner"):
            return
        path = Path(str(arguments[0]))
        if event == "open" and int(str(arguments[2])) & (os.O_WRONLY | os.O_RDWR):
            self.waiting |= {path, path.parent}
        elif event == "os.mkdir":
            self.waiting.add(path.parent)
        elif event == "os.rename":
            self.rename(path, Path(str(arguments[1])))
        elif event == "shutil.rmtree":
            assert not any(shown.parent in self.waiting for shown in self.shown), f"{path} is removed too early"

    def rename(self, old: Path, new: Path) -> None:
        if new in (self.path, self.path / "values.pt"):
            seen = {each for each in self.waiting if {old, self.path} & {each, *each.parents}}
            seen |= self.waiting & set(self.path.parent.parents)
            assert not seen, f"{seen} may not be on the disk yet when {new} appears"
            self.shown.append(new)
        self.waiting = {new / each.relative_to(old) if old in (each, *each.parents) else each for each in self.waiting}
        self.waiting.add(new.parent)


@pytest.mark.parametrize("former", [True, False])
@pytest.mark.parametrize("save", [file, checkpoint, export])
def test_all_is_on_the_disk_before_it_is_seen(tmp_path: Path, save: Callable[..., None], former: bool) -> None:
    path = tmp_path / "runs" / "1" / NAME
    if former:
        save(path, 1)

    def watched(stop: Callable[[], None]) -> None:
        disk = Disk(tmp_path, path)
        disk.watch()
        save(path, 2)
        (shown,) = disk.shown
        assert shown == (path / "values.pt" if former and is_directory(path) else path)
        assert shown.parent not in disk.waiting
        stop()

    Held(watched).finish()
