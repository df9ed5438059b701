"""Compiles each kernel once on each machine, so that processes do not repeat each other's work.

[Note: compiling] Triton caches compiled kernels on disk. But processes of a machine that need a kernel at the same time
all compile it. Here a lock file for each kernel lets one process compile, while the others wait and then read the
result. The hooks are those of Triton's own settings (`triton.knobs.runtime`); hooks of others still run.
"""

from __future__ import annotations

import fcntl
import hashlib
import threading
import time
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import JITFunction, driver

from lightning_d9d.ops.compile_ahead import only_compiles
from lightning_d9d.startup import add

PART = "kernels"
"""The name of compiling among the parts of a start."""
_WAIT_S = 60.0
"""Longer than a kernel takes: a process that holds its lock for longer will not finish."""
_PACKAGE = __name__.rpartition(".")[0]
_of_thread = threading.local()


class Kernel(JITFunction[Any]):
    """A function that Triton compiles, and that a thread may compile without launching it. [Note: compiling ahead]."""

    def __getitem__(self, grid: Any) -> Any:
        """Return the launcher of the kernel."""
        return self._compile if only_compiles() else super().__getitem__(grid)

    def _compile(self, *args: Any, **kwargs: Any) -> None:
        compiled: Any = self.run(*args, grid=(1,), warmup=True, **kwargs)
        active: Any = driver.active
        if compiled is not None:  # a hook of a user may have compiled it in another way
            # This caches the launcher on disk. The thread that launches the kernel loads it.
            active.launcher_cls(compiled.src, compiled.metadata)


def jit(function: Any = None, **options: Any) -> Any:
    """Make a kernel that the host launches, as `triton.jit` does: a decorator, also with its options."""
    if function is None:
        return lambda function: jit(function, **options)
    return triton.jit(function, **options) if knobs.runtime.interpret else Kernel(function, **options)


class Lock:
    """A lock file that one thread of one process holds, if the file system has locks.

    Args:
        path: Path of the file.
        wait_s: Seconds to wait for the holder; then continue without the lock.
    """

    def __init__(self, path: Path, wait_s: float = _WAIT_S) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        end = time.monotonic() + wait_s
        while not (held := self._is_taken()) and time.monotonic() < end:
            time.sleep(0.02)
        self.is_held = held

    def release(self) -> None:
        """Release the lock."""
        self._file.close()

    def _is_taken(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True


def install() -> None:
    """Make processes wait for each other's compilation; the interpreter does not compile. Local."""
    if torch.cuda.is_available() and not knobs.runtime.interpret:
        add_hooks()


def add_hooks() -> None:
    """Take a kernel's lock before it is compiled or read, release it afterwards, and record the time. Local."""
    runtime = knobs.runtime
    before, after = runtime.jit_cache_hook, runtime.jit_post_compile_hook

    def begin(**options: Any) -> bool | None:
        result = before(**options) if before is not None else None
        if not result and _is_ours(options):
            _release()  # a lock that a failure left
            _of_thread.begin = time.perf_counter()
            _of_thread.lock = _lock_of(options)
        return result

    def end(**options: Any) -> bool | None:
        if _is_ours(options):
            _release()
            if not only_compiles():  # only the main thread's time counts as startup
                add(PART, time.perf_counter() - _of_thread.begin, f"; they are kept in {knobs.cache.dir}")
        return after(**options) if after is not None else None

    runtime.jit_cache_hook, runtime.jit_post_compile_hook = begin, end


def _release() -> None:
    """Release the lock of this thread."""
    if lock := _of_thread.__dict__.pop("lock", None):
        lock.release()


def lock_file(module: str, name: str, specialization: str) -> Path:
    """Return the lock's path for a kernel with given types, sizes and settings, in Triton's cache."""
    digest = hashlib.sha256("\n".join([module, name, specialization]).encode()).hexdigest()[:32]
    return Path(knobs.cache.dir) / f"lightning_d9d.{digest}.lock"


def _is_ours(options: dict[str, Any]) -> bool:
    """Return True for kernels of this package."""
    return options["fn"].module.startswith(f"{_PACKAGE}.")


def _lock_of(options: dict[str, Any]) -> Lock | None:
    """Return the lock of a kernel; None if its folder cannot be written."""
    function = options["fn"]
    try:
        return Lock(lock_file(function.module, function.name, options["compile"]["specialization_data"]))
    except OSError:
        return None
