"""The process-wide state that a test may change, put back after it."""

import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SEED = 0


@contextmanager
def restored_state() -> Iterator[list[str]]:
    """Seeds the random generators, then puts back what the body changed of the process.

    Restored: torch's default dtype and deterministic mode, the environment, the working directory. The yielded list is
    filled at the end with what a body should not leave: another default dtype, threads that keep the process alive.
    torch and numpy are touched only where already imported.
    """
    leftovers: list[str] = []
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    environment, directory, threads = dict(os.environ), os.getcwd(), set(threading.enumerate())
    dtype = torch.get_default_dtype() if torch else None
    random.seed(SEED)
    if numpy:
        numpy.random.seed(SEED)
    if torch:
        torch.manual_seed(SEED)
    try:
        yield leftovers
    finally:
        if torch and torch.get_default_dtype() != dtype:
            leftovers.append(f"the default dtype {torch.get_default_dtype()}")
            torch.set_default_dtype(dtype)
        if torch:
            torch.use_deterministic_algorithms(False)
        os.chdir(directory)
        left = dict(os.environ)
        for name in left.keys() - environment.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in environment.items() if left.get(name) != value})
        leftovers += [f"thread {t.name!r}" for t in threading.enumerate() if t not in threads and not t.daemon]
