"""Kernels that are compiled once a machine: the locks, and the hooks that take them."""

from __future__ import annotations

import multiprocessing
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_d9d import startup
from lightning_d9d.ops import rms_norm
from lightning_d9d.ops.kernels import compiling
from lightning_d9d.ops.kernels.compiling import Lock, lock_file

MODULE = "lightning_d9d.ops.kernels.rms_norm"


def is_free(path: Path) -> bool:
    lock = Lock(path, wait_s=0.0)
    lock.release()
    return lock.is_held


def _hold(path: Path, held: Any, go: Any) -> None:
    lock = Lock(path)
    held.set()
    go.wait(60)
    lock.release()


def held_by_a_process(path: Path) -> tuple[Any, Any]:
    """Start a process that has the lock, and return it with the event that lets it go on."""
    spawn = multiprocessing.get_context("spawn")
    held, go = spawn.Event(), spawn.Event()
    process = spawn.Process(target=_hold, args=(path, held, go))
    process.start()
    assert held.wait(60)
    return process, go


def test_a_lock_is_of_one_process_or_thread(tmp_path: Path) -> None:
    process, go = held_by_a_process(tmp_path / "lock")
    assert not is_free(tmp_path / "lock")
    assert not Lock(tmp_path / "lock", wait_s=0.05).is_held, "a process that hangs keeps nobody"
    go.set()
    lock = Lock(tmp_path / "lock", wait_s=60)
    assert lock.is_held
    assert not is_free(tmp_path / "lock"), "nor does another thread get it"
    lock.release()
    assert is_free(tmp_path / "lock")
    process.join()


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    process, _ = held_by_a_process(tmp_path / "lock")
    process.kill()
    process.join()
    assert is_free(tmp_path / "lock")


class Options:
    """What Triton gives to its hooks, as far as it is looked at."""

    def __init__(self, name: str, module: str = MODULE) -> None:
        self.fn = type("Function", (), {"module": module, "name": name})
        self.compile = {"specialization_data": "{}"}


Hook = Callable[[Options], Any]


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Hook, Hook, list[str]]:
    """Ours, around those of a user; and what the user's have seen."""
    runtime, seen = compiling.knobs.runtime, list[str]()
    monkeypatch.setattr(compiling.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(startup, "_seconds", startup.Counter())
    monkeypatch.setattr(runtime, "jit_cache_hook", lambda **options: seen.append(f"before {options['fn'].name}"))
    monkeypatch.setattr(runtime, "jit_post_compile_hook", lambda **options: seen.append(f"after {options['fn'].name}"))
    compiling.add_hooks()
    begin, end = runtime.jit_cache_hook, runtime.jit_post_compile_hook
    return lambda options: begin(**vars(options)), lambda options: end(**vars(options)), seen


def test_a_kernel_is_locked_while_it_is_compiled(hooks: tuple[Hook, Hook, list[str]]) -> None:
    begin, end, seen = hooks
    begin(Options("a"))
    assert not is_free(lock_file(MODULE, "a", "{}"))
    assert is_free(lock_file(MODULE, "b", "{}"))
    order: list[str] = []

    def wait() -> None:
        begin(Options("a"))
        order.append("second")
        end(Options("a"))

    other = threading.Thread(target=wait)
    other.start()
    order.append("first")
    end(Options("a"))
    other.join(60)
    assert order == ["first", "second"]
    assert is_free(lock_file(MODULE, "a", "{}"))
    assert sorted(seen) == ["after a"] * 2 + ["before a"] * 2
    assert startup.seconds_of_parts()["kernels"] > 0


@pytest.mark.parametrize("then", ["fails", "a"])
def test_what_fails_to_compile_keeps_no_lock_when_the_next_begins(
    hooks: tuple[Hook, Hook, list[str]], then: str
) -> None:
    """This also holds if the next one is the same again."""
    begin, end, _ = hooks
    begin(Options("fails"))
    begin(Options(then))
    end(Options(then))
    assert is_free(lock_file(MODULE, "fails", "{}"))


def test_kernels_of_others_are_theirs(hooks: tuple[Hook, Hook, list[str]], tmp_path: Path) -> None:
    begin, end, seen = hooks
    begin(Options("a", "user.kernels"))
    end(Options("a", "user.kernels"))
    assert [*tmp_path.iterdir()] == []
    assert seen == ["before a", "after a"]


def test_a_cache_that_cannot_be_written_is_not_locked(
    hooks: tuple[Hook, Hook, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, end, _ = hooks
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(compiling.knobs.cache, "dir", str(tmp_path / "file"))
    begin(Options("a"))
    end(Options("a"))


def _compile(meeting: Any, compiled: Any) -> None:
    num_new = 0

    def count(**options: Any) -> None:
        nonlocal num_new
        num_new += not options["cache_hit"]

    compiling.knobs.compilation.listener = count
    x = torch.ones(64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    meeting.wait(60)
    rms_norm(x, weight, 1e-6).sum().backward()
    torch.cuda.synchronize()
    compiled.put(num_new)


@pytest.mark.gpu
def test_processes_that_begin_together_compile_each_kernel_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    spawn = multiprocessing.get_context("spawn")
    totals = []
    for num_processes in (3, 1):
        meeting, compiled = spawn.Barrier(num_processes), spawn.Queue()
        processes = [spawn.Process(target=_compile, args=(meeting, compiled)) for _ in range(num_processes)]
        for process in processes:
            process.start()
        totals.append(sum(compiled.get(timeout=300) for _ in processes))
        for process in processes:
            process.join()
        for path in tmp_path.iterdir():
            shutil.rmtree(path, ignore_errors=True)
    assert totals[0] == totals[1] > 1, "three processes compile as many kernels as one"
