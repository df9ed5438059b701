"""Kernels are compiled once a machine: several at the same time, and no process does what another one is at.

[Note: compiling] Triton keeps what it has compiled on disk, but compiles a kernel when it is first launched, one after
the other, and so does each process of a machine. Here a lock file for each kernel lets one process compile it while
others wait and then read it. A list in the user's cache has what was compiled before. After an upgrade, or in a new
container, which has the list and no kernels, threads compile what is in it while the model is built, each process
other kernels. The hooks are those of Triton's own settings (`triton.knobs.runtime`); hooks of others still run.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from lightning_d9d.log import logger
from lightning_d9d.startup import add

PART = "kernels"
"""The name of compiling among the parts of a start."""
MAX_RECIPES = 128
"""Kernels in the list; those that were compiled last stay."""
_MAX_THREADS = 8
_WAIT_S = 60.0
"""Longer than a kernel takes: whoever holds its lock for longer will not finish it."""
_PACKAGE = __name__.rpartition(".")[0]
_of_thread = threading.local()


class Recipe(NamedTuple):
    """What Triton needs to compile a kernel for given types, sizes and settings."""

    module: str
    name: str
    specialization: str
    """As Triton writes it for `JITFunction.preload`."""

    @property
    def digest(self) -> str:
        """A name for its lock."""
        return hashlib.sha256("\n".join(self).encode()).hexdigest()[:32]


def list_file() -> Path:
    """Where the list is: `lightning_d9d/kernels.jsonl` in `$XDG_CACHE_HOME`, which is `~/.cache` by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_d9d" / "kernels.jsonl"


def read_recipes(file: Path) -> list[Recipe]:
    """The kernels of a list that are kernels of this package; what else is in it is left out."""
    recipes = []
    with suppress(OSError, ValueError):
        for line in file.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, TypeError):
                recipe = Recipe(*json.loads(line))
                if all(type(each) is str for each in recipe) and recipe.module.startswith(f"{_PACKAGE}."):
                    recipes.append(recipe)
    return [*dict.fromkeys(recipes)]


def remember(recipe: Recipe, file: Path) -> None:
    """Put a kernel at the end of a list, which is made if there is none. Where no file can be written, nothing is."""
    with suppress(OSError), _Lock(file.with_suffix(".lock")):
        known = read_recipes(file)
        if recipe in known:
            return
        lines = [json.dumps(each) for each in [*known, recipe][-MAX_RECIPES:]]
        written = file.with_suffix(f".{os.getpid()}")
        written.write_text("\n".join(lines) + "\n", encoding="utf-8")
        written.replace(file)


class _Lock:
    """A file that one thread of one process holds, where the file system has locks.

    Args:
        path: Of the file.
        wait_s: How long to wait for whoever holds it; then one goes on without.
    """

    def __init__(self, path: Path, wait_s: float = _WAIT_S) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        end = time.monotonic() + wait_s
        while not (held := self._is_taken()) and time.monotonic() < end:
            time.sleep(0.02)
        self.is_held = held

    def _is_taken(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def __enter__(self) -> _Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _lock_of(recipe: Recipe, wait_s: float = _WAIT_S) -> _Lock | None:
    """The lock of a kernel, beside what Triton has compiled; None where nothing can be written."""
    try:
        return _Lock(Path(triton.knobs.cache.dir) / f"lightning_d9d.{recipe.digest}.lock", wait_s)
    except OSError:
        return None


def install() -> None:
    """Begin: hooks that let processes wait for each other, and threads that compile what is in the list. Local.

    Where there is no GPU nothing is compiled, and nothing happens.
    """
    if not torch.cuda.is_available() or triton.knobs.runtime.interpret:
        return
    known = read_recipes(list_file())
    _add_hooks({*known})
    compile_ahead(known, first=int(os.environ.get("LOCAL_RANK", "0")) * len(known) // 8)


def _add_hooks(known: set[Recipe]) -> None:
    """Let Triton wait for other processes that compile the same kernel; count the time, and put it in the list."""
    runtime = triton.knobs.runtime
    before, after = runtime.jit_cache_hook, runtime.jit_post_compile_hook

    def begin(**options: Any) -> bool | None:
        result = before(**options) if before is not None else None
        if not result and (recipe := _recipe_of(options)):
            _of_thread.begin = time.perf_counter()
            _of_thread.lock = _lock_of(recipe)  # one that is left of a failure is closed by that
        return result

    def end(**options: Any) -> bool | None:
        if recipe := _recipe_of(options):
            if lock := _of_thread.__dict__.pop("lock", None):
                lock.__exit__()
            if recipe not in known:
                known.add(recipe)
                remember(recipe, list_file())
            add(PART, time.perf_counter() - _of_thread.begin, f"; they are kept in {triton.knobs.cache.dir}")
        return after(**options) if after is not None else None

    runtime.jit_cache_hook, runtime.jit_post_compile_hook = begin, end


def _recipe_of(options: dict[str, Any]) -> Recipe | None:
    """Of this package's kernels; those of others are theirs."""
    function = options["fn"]
    if not function.module.startswith(f"{_PACKAGE}."):
        return None
    return Recipe(function.module, function.name, options["compile"]["specialization_data"])


def compile_ahead(recipes: list[Recipe], first: int = 0) -> list[threading.Thread]:
    """Compile kernels in threads, or read them where that was done before. Does not wait for the threads.

    They end with the kernel that they are at when the program does. What cannot be compiled any more is left out.

    Args:
        recipes: The kernels.
        first: With which one they begin: each process of a machine with another one.
    """
    left = [*recipes[first:], *recipes[:first]][::-1]
    device = torch.cuda.current_device()

    def work() -> None:
        torch.cuda.set_device(device)  # threads begin with the first one
        while threading.main_thread().is_alive():
            try:
                recipe = left.pop()
            except IndexError:
                return
            _compile(recipe)

    threads = [threading.Thread(target=work, name="kernels") for _ in range(min(_MAX_THREADS, os.cpu_count() or 1))]
    for thread in threads:
        thread.start()
    return threads


def _compile(recipe: Recipe) -> None:
    lock = _lock_of(recipe, wait_s=0.0)
    if lock is None or not lock.is_held:
        return  # somebody is at it
    with lock:
        try:
            _function(recipe).preload(recipe.specialization)
        except Exception as error:  # a list of another version has kernels that there are no more
            logger.debug("kernel %s of %s is not compiled ahead: %r", recipe.name, recipe.module, error)


def _function(recipe: Recipe) -> Any:
    return getattr(import_module(recipe.module), recipe.name)
