"""Files that ranks make once: who makes them, what fails on all, and damage that is seen."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from lightning_d9d.data import cache
from lightning_d9d.data.cache import Progress, digest_of_files, folder_of_cache, made_once, replacing
from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.agreement import Ranks
from tests.harness.ranks import RankContext


class Maker:
    """Makes a file, and counts."""

    def __init__(self, name: str = "a") -> None:
        self.file_name = name
        self.made = 0

    def name(self, tell: Progress) -> str:
        return self.file_name

    def make(self, path: Path, tell: Progress) -> None:
        if not path.is_file():
            self.made += 1
            with replacing(path) as part:
                part.write_text("whole")


def made(folder: Path, maker: Maker) -> Path:
    return made_once(folder, maker.name, maker.make, Ranks())


@pytest.mark.ranks(2)
def test_one_rank_makes_it_for_all(rank: RankContext) -> None:
    maker, folder = Maker(), rank.tmp_dir / "shared"
    assert made(folder, maker).read_text() == "whole"
    assert made(folder, maker) == folder / "a"
    assert rank.all_gather_object(maker.made) == [1, 0]


@pytest.mark.ranks(2)
def test_each_machine_makes_its_own(rank: RankContext) -> None:
    maker, folder = Maker(), rank.tmp_dir / f"of {rank.rank}"
    message = r"rank 1 on machine1 has other files, another tokenizer or other versions"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(socket, "gethostname", lambda: f"machine{rank.rank}")
        assert made(folder, maker).parent == folder
        assert rank.all_gather_object(maker.made) == [1, 1]
        with pytest.raises(ConfigError, match=message):
            made(folder, Maker(f"b{rank.rank}"))


@pytest.mark.ranks(2)
def test_what_fails_on_one_fails_on_all(rank: RankContext) -> None:
    class Broken(Maker):
        def make(self, path: Path, tell: Progress) -> None:
            raise ConfigError("the file a has line 3, which is not JSON")

    with pytest.raises(ConfigError, match="data cannot be prepared: rank 0: the file a has line 3"):
        made(rank.tmp_dir / "shared", Broken())


@pytest.mark.ranks(2)
def test_nobody_waits_for_a_rank_without_progress(rank: RankContext) -> None:
    end = threading.Event()

    class Endless(Maker):
        def make(self, path: Path, tell: Progress) -> None:
            end.wait()

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cache, "_TURN_SECONDS", 0.01)
        monkeypatch.setattr(cache, "SILENT_SECONDS", 0.05)
        with pytest.raises(RuntimeError, match="has made no progress for 0 seconds"):
            made(rank.tmp_dir / "shared", Endless())
    end.set()


def test_jobs_wait_for_each_other_and_not_for_a_killed_one(tmp_path: Path) -> None:
    locked, taken = os.pipe()
    waiting: list[int] = []
    if (child := os.fork()) == 0:
        with cache._alone(tmp_path / "a.lock", lambda: None):
            os.write(taken, b"x")
            signal.pause()
    os.read(locked, 1)

    def other_is_there() -> None:
        waiting.append(1)
        if len(waiting) == 2:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    with cache._alone(tmp_path / "a.lock", other_is_there):
        assert len(waiting) == 2


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/in keeps prepared data but cannot be written: .*LIGHTNING_D9D_CACHE"):
        made(tmp_path / "file" / "in", Maker())


def test_a_folder_that_loses_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"rank 0 has made {tmp_path}/a but does not find it; set another folder"):
        made_once(tmp_path, lambda tell: "a", lambda path, tell: None, Ranks())


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("before")

    def fail() -> None:
        with replacing(tmp_path / "a") as part:
            part.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("a", "before")]


def test_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_D9D_CACHE", "/named")
    assert folder_of_cache("/given") == Path("/given")
    assert folder_of_cache(None) == Path("/named")
    monkeypatch.delenv("LIGHTNING_D9D_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/of/user")
    assert folder_of_cache(None) == Path("/of/user/lightning_d9d")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert folder_of_cache(None) == Path.home() / ".cache" / "lightning_d9d"


def test_a_digest_is_that_of_the_content(tmp_path: Path) -> None:
    for name, content in (("a.txt", "one"), ("b.txt", "two"), ("saved/x", "three")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)

    def digest(*names: str) -> str:
        return digest_of_files([tmp_path / name for name in names], tmp_path / "cache", lambda: None)

    before = digest("a.txt", "b.txt"), digest("saved")
    assert digest("b.txt", "a.txt") != before[0]
    (tmp_path / "a.txt").rename(tmp_path / "c.txt")
    assert digest("c.txt", "b.txt") == before[0]
    (tmp_path / "saved/x").write_text("four")
    assert digest("saved") != before[1]
    with pytest.raises(ConfigError, match=r"a\.txt cannot be read: it does not exist"):
        digest("a.txt")


def _digest(path: Path, folder: Path) -> tuple[str, int]:
    """The hash, and how many parts of the file were read for it."""
    parts: list[int] = []
    return digest_of_files([path], folder, lambda: parts.append(1)), len(parts)


def _written_long_ago(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a few seconds pass."""
    now = path.stat().st_ctime_ns + 3_000_000_000
    monkeypatch.setattr(cache.time, "time_ns", lambda: now)


def test_a_file_that_nobody_has_written_to_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, folder = tmp_path / "a.txt", tmp_path / "cache"
    file.write_text("one")
    first = _digest(file, folder)
    assert first[1] == 1
    assert _digest(file, folder) == first  # written to just now: the next write may have the same time
    _written_long_ago(file, monkeypatch)
    assert _digest(file, folder) == first
    assert _digest(file, folder) == (first[0], 0)
    times = file.stat()
    file.write_text("two")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as `touch -r` and `cp -p` do
    changed = _digest(file, folder)
    assert changed[1] == 1
    assert changed[0] != first[0]


def test_a_file_that_is_written_to_while_it_is_hashed_is_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, folder = tmp_path / "a.txt", tmp_path / "cache"
    file.write_text("one")
    _written_long_ago(file, monkeypatch)

    parts: list[int] = []

    def write() -> None:
        parts.append(1)
        if len(parts) == 1:
            with file.open("a") as end:
                end.write("more")

    digest_of_files([file], folder, write)
    assert not folder.exists()


@pytest.mark.parametrize("damage", ["", "{}", '{"stamp": 1, "sha256": "x"}'])
def test_a_damaged_note_of_a_hash_is_written_again(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, folder = tmp_path / "a.txt", tmp_path / "cache"
    file.write_text("one")
    _written_long_ago(file, monkeypatch)
    first = _digest(file, folder)
    (note,) = (folder / "digests").iterdir()
    note.write_text(damage)
    assert _digest(file, folder) == first
    assert _digest(file, folder) == (first[0], 0)
