"""Kernels that are compiled once a machine: the list, the locks and, on a GPU, what is compiled ahead."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_d9d.ops.kernels import compiling
from lightning_d9d.ops.kernels.compiling import MAX_RECIPES, Recipe, _Lock, read_recipes, remember

MODULE = "lightning_d9d.ops.kernels.rms_norm"


def recipe(name: str, module: str = MODULE) -> Recipe:
    return Recipe(module, name, "{}")


def test_the_list_keeps_what_was_compiled_last(tmp_path: Path) -> None:
    file = tmp_path / "new" / "kernels.jsonl"
    for i in [*range(MAX_RECIPES + 5), MAX_RECIPES]:
        remember(recipe(str(i)), file)
    assert [each.name for each in read_recipes(file)] == [str(i) for i in range(5, MAX_RECIPES + 5)]
    assert sorted(path.name for path in file.parent.iterdir()) == ["kernels.jsonl", "kernels.lock"]


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[1, 2, 3]\n{}\nnull\n[[", json.dumps(["os", "system", "ls"]).encode()]
)
def test_other_content_of_the_list_is_left_out(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "kernels.jsonl"
    file.write_bytes(content)
    assert read_recipes(file) == []
    remember(recipe("a"), file)
    assert read_recipes(file) == [recipe("a")]


def test_a_cache_that_cannot_be_written_is_not_needed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    remember(recipe("a"), tmp_path / "file" / "kernels.jsonl")


def _remember_some(file: Path, first: int) -> None:
    for i in range(first, first + 20):
        remember(recipe(str(i)), file)


def test_processes_write_one_list(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=_remember_some, args=(tmp_path / "k.jsonl", 20 * i)) for i in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert {each.name for each in read_recipes(tmp_path / "k.jsonl")} == {str(i) for i in range(60)}


def _hold(path: Path, held: Any, go: Any) -> None:
    with _Lock(path):
        held.set()
        go.wait(60)


def test_a_lock_is_of_one_process_or_thread(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    held, go = spawn.Event(), spawn.Event()
    process = spawn.Process(target=_hold, args=(tmp_path / "lock", held, go))
    process.start()
    assert held.wait(60)
    with _Lock(tmp_path / "lock", wait_s=0.0) as lock:
        assert not lock.is_held
    with _Lock(tmp_path / "lock", wait_s=0.05) as lock:
        assert not lock.is_held, "a process that hangs keeps nobody"
    go.set()
    with _Lock(tmp_path / "lock") as lock:
        assert lock.is_held
        with _Lock(tmp_path / "lock", wait_s=0.0) as other:
            assert not other.is_held
    process.join()


class Options:
    """What Triton's hooks get."""

    def __init__(self, name: str, module: str = MODULE) -> None:
        self.fn = type("Function", (), {"module": module, "name": name})
        self.compile = {"specialization_data": "{}"}


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Options], Any]:
    runtime = compiling.triton.knobs.runtime
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiling.triton.knobs.cache, "dir", str(tmp_path / "triton"))
    for name in ("jit_cache_hook", "jit_post_compile_hook"):
        monkeypatch.setattr(runtime, name, None)
    compiling._add_hooks(set())
    return lambda name, options: getattr(runtime, name)(**vars(options))


def test_a_kernel_is_locked_while_it_is_compiled_and_then_in_the_list(
    hooks: Callable[[str, Options], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_WAIT_S", 60.0)
    lock = tmp_path / "triton" / f"lightning_d9d.{recipe('a').digest}.lock"
    hooks("jit_cache_hook", Options("a"))
    assert not _Lock(lock, wait_s=0.0).is_held
    assert read_recipes(compiling.list_file()) == []
    order: list[str] = []

    def wait() -> None:
        hooks("jit_cache_hook", Options("a"))
        order.append("second")
        hooks("jit_post_compile_hook", Options("a"))

    other = threading.Thread(target=wait)
    other.start()
    order.append("first")
    hooks("jit_post_compile_hook", Options("a"))
    other.join(60)
    assert order == ["first", "second"]
    assert read_recipes(compiling.list_file()) == [recipe("a")]
    assert _Lock(lock, wait_s=0.0).is_held


def test_what_fails_to_compile_keeps_no_lock_when_the_next_begins(
    hooks: Callable[[str, Options], Any], tmp_path: Path
) -> None:
    hooks("jit_cache_hook", Options("fails"))
    hooks("jit_cache_hook", Options("a"))
    hooks("jit_post_compile_hook", Options("a"))
    assert _Lock(tmp_path / "triton" / f"lightning_d9d.{recipe('fails').digest}.lock", wait_s=0.0).is_held
    assert read_recipes(compiling.list_file()) == [recipe("a")]


def test_kernels_of_others_are_theirs(hooks: Callable[[str, Options], Any], tmp_path: Path) -> None:
    hooks("jit_cache_hook", Options("a", "user.kernels"))
    hooks("jit_post_compile_hook", Options("a", "user.kernels"))
    assert [*tmp_path.iterdir()] == []


RUN = """
import sys, time
import torch
from lightning_d9d.ops import rms_norm
if "ahead" in sys.argv:
    from lightning_d9d.ops.kernels import compiling
    import threading
    [thread.join() for thread in threading.enumerate() if thread.name == "kernels"]
    compiled = []
    import triton
    triton.knobs.compilation.listener = lambda **options: compiled.append(options["cache_hit"])
x = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
rms_norm(x, torch.ones(64, device="cuda", dtype=torch.bfloat16), 1e-6).sum().backward()
torch.cuda.synchronize()
if "ahead" in sys.argv:
    print(compiled)
"""


@pytest.mark.gpu
def test_kernels_of_the_list_are_compiled_ahead(tmp_path: Path) -> None:
    """In a process that finds the list, and no kernels."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "list")}

    def run(cache: str, *arguments: str) -> str:
        there = {**environment, "TRITON_CACHE_DIR": str(tmp_path / cache)}
        return subprocess.run(
            [sys.executable, "-c", RUN, *arguments], env=there, check=True, capture_output=True, text=True
        ).stdout

    run("first")
    assert len(read_recipes(tmp_path / "list" / "lightning_d9d" / "kernels.jsonl")) == 2
    assert run("second", "ahead").strip() == "[True, True]"
