"""Hidden names beside a path: of the living they stay, of the dead they go, and nobody can know them before."""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_d9d.checkpoint import is_directory, open_directory, remove_directory, save_directory
from lightning_d9d.state import complete_directory
from lightning_d9d.state import owner as owners
from lightning_d9d.state.owner import Owner, owned
from lightning_d9d.strategy.checkpoint_files import AtomicFileIO
from tests.checkpoint.test_killed import loaded
from tests.harness.forked import Held

NAME = "last.ckpt"


class Stops(dict):
    """An empty mapping for the reader, at which the writer stops; a save looks at its values once before it writes."""

    def __init__(self, stop: Callable[[], None], looks: int) -> None:
        super().__init__()
        self.stop, self.looks = stop, looks

    def __reduce__(self) -> tuple[type, tuple[()]]:
        self.looks -= 1
        if self.looks < 0:
            self.stop()
        return OrderedDict, ()


def nowhere() -> None:
    pass


def file(path: Path, number: int, stop: Callable[[], None] = nowhere) -> None:
    AtomicFileIO().save_checkpoint({"number": number, "a": torch.full((9,), number), "stops": Stops(stop, 0)}, path)


def checkpoint(path: Path, number: int, stop: Callable[[], None] = nowhere) -> None:
    tensors = {"a": torch.full((3,), float(number)), "b": torch.tensor(number)}
    save_directory(path, tensors, {"number": number, "stops": Stops(stop, 1)})


def folder(path: Path, number: int, stop: Callable[[], None] = nowhere) -> None:
    with complete_directory(path, True, "it cannot be written") as new:
        (new / "one").write_text(str(number))
        stop()
        (new / "two").write_text(str(number))


def number_of(path: Path) -> int:
    if path.is_file():
        return torch.load(path, weights_only=True)["number"]
    if is_directory(path):
        return loaded(path)
    one, two = ((path / name).read_text() for name in ("one", "two"))
    assert one == two
    return int(one)


def hidden(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith("."))


@pytest.mark.parametrize("former", [True, False])
@pytest.mark.parametrize("save", [file, checkpoint, folder])
def test_two_that_save_at_once_are_both_whole(tmp_path: Path, save: Callable[..., None], former: bool) -> None:
    path = tmp_path / NAME
    if former:
        save(path, 1)
    slow = Held(lambda stop: save(path, 2, stop))
    for number in (3, 4):
        save(path, number)
        assert number_of(path) == number
    slow.finish()
    assert number_of(path) == 2
    assert os.listdir(tmp_path) == [NAME]
    assert path.is_file() or len(os.listdir(path)) == 2


def test_tensors_stay_while_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / NAME
    checkpoint(path, 1)
    reader = open_directory(path, alone=True)
    for number in (2, 3):
        checkpoint(path, number)
        assert loaded(path) == number
    assert reader.read()["a"].tolist() == [1, 1, 1]
    assert len(os.listdir(path)) == 3
    del reader
    checkpoint(path, 4)
    assert len(os.listdir(path)) == 2


def test_what_is_replaced_before_it_is_read_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / NAME
    checkpoint(path, 1)

    def read(stop: Callable[[], None]) -> None:
        stops = [stop]

        def before_metadata(event: str, arguments: tuple[object, ...]) -> None:
            if event == "open" and stops and str(arguments[0]).endswith(".metadata"):
                stops.pop()()

        sys.addaudithook(before_metadata)
        assert loaded(path) == 2

    reader = Held(read)
    checkpoint(path, 2)
    reader.finish()


@pytest.mark.parametrize("other", [file, checkpoint])
@pytest.mark.parametrize("save", [file, checkpoint])
def test_what_came_meanwhile_is_replaced(tmp_path: Path, save: Callable[..., None], other: Callable[..., None]) -> None:
    path = tmp_path / NAME
    slow = Held(lambda stop: save(path, 2, stop))
    other(path, 3)
    if other is checkpoint:
        remove_directory(path)
        other(path, 4)
    slow.finish()
    assert number_of(path) == 2
    assert os.listdir(tmp_path) == [NAME]


@pytest.mark.parametrize("save", [file, checkpoint, folder])
def test_leftovers_of_a_killed_process_alone_are_removed(tmp_path: Path, save: Callable[..., None]) -> None:
    path = tmp_path / NAME
    save(path, 1)
    slow, killed = Held(lambda stop: save(path, 2, stop)), Held(lambda stop: save(path, 3, stop))
    of_both = hidden(tmp_path)
    killed.kill()
    save(path, 4)
    assert number_of(path) == 4
    of_slow = hidden(tmp_path)
    assert len(of_slow) == len(of_both) // 2
    assert set(of_slow) < set(of_both)
    slow.finish()
    assert number_of(path) == 2
    assert hidden(tmp_path) == []


def test_a_child_keeps_its_parents_leftovers_until_it_ends(tmp_path: Path) -> None:
    """A worker that was forked during a save has the lock, too: nothing is lost, and the next save removes them."""
    path = tmp_path / NAME
    read, write = os.pipe()

    def forked(stop: Callable[[], None]) -> None:
        with owned(path) as owner:
            owner.hidden("partial").touch()
            if os.fork() == 0:
                os.close(write)
                os.read(read, 1)
                os._exit(0)
            stop()

    Held(forked).kill()
    with owned(path):
        pass
    assert len(hidden(tmp_path)) == 2
    os.close(write)
    os.close(read)
    deadline = time.monotonic() + 60
    while hidden(tmp_path) and time.monotonic() < deadline:
        with owned(path):
            pass
    assert hidden(tmp_path) == []


def leave(path: Path, machine: str, age: float) -> None:
    """What a killed owner of some machine left, so many seconds ago."""
    with owned(path) as owner:
        left = [owner.hidden(purpose, f"{machine}0123456789") for purpose in ("owner", "partial")]
    for each in left:
        each.touch()
        os.utime(each, (time.time() - age,) * 2)


@pytest.mark.parametrize(("age", "stays"), [(60, True), (7200, False)])
def test_leftovers_of_another_machine_go_when_they_are_old(tmp_path: Path, age: float, stays: bool) -> None:
    path = tmp_path / NAME
    leave(path, "ffffff", age)
    checkpoint(path, 1)
    assert bool(hidden(tmp_path)) is stays
    assert loaded(path) == 1


@pytest.mark.parametrize(("age", "stays"), [(60, True), (7200, False)])
def test_leftovers_where_there_are_no_locks_go_when_they_are_old(
    tmp_path: Path, age: float, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(owners.fcntl, "flock", flock)
    path = tmp_path / NAME
    leave(path, owners._machine(), age)
    checkpoint(path, 1)
    assert len(hidden(tmp_path)) == (2 if stays else 0)
    assert loaded(path) == 1


@pytest.mark.parametrize("save", [file, checkpoint, folder])
def test_new_files_are_made_exclusively_under_names_that_differ(tmp_path: Path, save: Callable[..., None]) -> None:
    """So a link that another user made there is neither known before nor followed."""
    first, second = (Held(lambda stop: save(tmp_path / NAME, 1, stop)) for _ in range(2))
    names = hidden(tmp_path)
    assert len(names) == 4
    assert len({name.split(".")[2] for name in names}) == 2
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in names if name.endswith("owner")} == {0o600}
    first.finish()
    second.finish()


@pytest.mark.parametrize("victim", [Path.touch, Path.mkdir])
@pytest.mark.parametrize("purpose", ["owner", "partial"])
@pytest.mark.parametrize("save", [file, checkpoint, folder])
def test_links_of_others_are_not_followed(
    tmp_path: Path,
    save: Callable[..., None],
    purpose: str,
    victim: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even where they know the name."""
    victim(tmp_path / "victim")
    (tmp_path / "runs").mkdir()
    path = tmp_path / "runs" / NAME
    monkeypatch.setattr(owners.secrets, "token_hex", lambda _: "0123456789")
    with owned(path) as owner:
        name = owner.hidden(purpose)
    monkeypatch.setattr(Owner, "tidy", nowhere_of)
    name.symlink_to(tmp_path / "victim")
    with pytest.raises((RuntimeError, OSError), match="File exists"):
        save(path, 1)
    assert sorted(path.name for path in tmp_path.rglob("[!.]*")) == ["runs", "victim"]
    assert (tmp_path / "victim").is_dir() or (tmp_path / "victim").stat().st_size == 0


def nowhere_of(owner: Owner) -> None:
    pass


def test_a_file_that_must_be_copied_takes_the_place_of_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    (tmp_path / "other").write_text("of the user")
    (tmp_path / NAME).symlink_to("other")
    monkeypatch.setattr(os, "rename", refuse)
    file(tmp_path / NAME, 1)
    assert (tmp_path / "other").read_text() == "of the user"
    assert not (tmp_path / NAME).is_symlink()
    assert number_of(tmp_path / NAME) == 1
