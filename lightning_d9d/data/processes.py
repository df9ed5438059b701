"""Work in several processes that start with the imports and data of this one."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from lightning_d9d.errors import ConfigError

T = TypeVar("T")
R = TypeVar("R")


def num_processes_here() -> int:
    """Return how many processes may work at the same time: one for each CPU, or 1 if processes cannot be forked."""
    if sys.platform != "linux" or multiprocessing.current_process().daemon:
        return 1
    return len(os.sched_getaffinity(0))


def map_in_processes(
    function: Callable[[T], R], items: Iterable[T], num_processes: int, begin: Callable[[], Any] | None = None
) -> Iterator[R]:
    """Yield the result of a function for each item, in their order.

    Args:
        function: Function of a module, because items and results are sent between processes.
        items: All items are handed out at once.
        num_processes: Number of processes; 1 works in this process.
        begin: Called once in each process before its first item.

    Raises:
        ConfigError: A process died. An error of `function` in another process is raised here.
    """
    items = list(items)
    if min(num_processes, len(items)) <= 1:
        if begin is not None:
            begin()
        yield from map(function, items)
        return
    # A fork has what is imported and read. It needs none of the threads that this process has.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with ProcessPoolExecutor(min(num_processes, len(items)), context, _begin, (begin,)) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            while futures:
                yield futures.pop(0).result()
        except BrokenProcessPool as error:
            raise ConfigError(
                "a process that tokenized has died, perhaps for lack of memory. Run the same command again with fewer "
                "processes (--processes): it resumes where it was"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _begin(begin: Callable[[], Any] | None) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    if begin is not None:
        begin()


def _end_with(parent: int) -> None:
    """End this process when its parent is killed; a pool's process would wait for ever."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
