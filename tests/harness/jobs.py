"""Jobs of several ranks, each a process of its own, that a test starts, waits for and may kill."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.harness import warm

TargetOfRank = Callable[..., None]
_ports: set[int] = set()
_ports_lock = threading.Lock()


def start_job(num_ranks: int, folder: Path, target: TargetOfRank, *arguments: Any) -> list[BaseProcess]:
    """Start `target(*arguments)` on ranks that a `Trainer(devices=num_ranks)` in it takes as they are.

    Args:
        num_ranks: Processes.
        folder: Where they run. It gets their output, in `0.txt` and so on.
        target: A function of a module.
        arguments: Picklable.
    """
    port = _free_port()
    ranks = [
        warm.context().Process(target=_run, args=(number, num_ranks, port, folder, target, arguments))
        for number in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    return list(ranks)


def _free_port() -> int:
    """A port that no other job of this process gets: several threads may start jobs."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        with _ports_lock:
            if port not in _ports:
                _ports.add(port)
                return port


def end_job(ranks: list[BaseProcess], seconds: float) -> list[int | None]:
    """Wait for all, and kill those that take longer. Returns the exit codes."""
    deadline = time.monotonic() + seconds
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
        rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks]


def run_job(num_ranks: int, folder: Path, target: TargetOfRank, *arguments: Any, seconds: float = 120) -> None:
    """Run a job to its end.

    Raises:
        AssertionError: A rank failed; with the ends of their outputs.
    """
    codes = end_job(start_job(num_ranks, folder, target, *arguments), seconds)
    assert codes == [0] * num_ranks, f"exit codes {codes}\n{output_of_job(folder)}"


def output_of_job(folder: Path) -> str:
    """The end of what each rank wrote."""
    return "\n".join(f"rank {path.stem}:\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("[0-9].txt")))


def _run(
    number: int, num_ranks: int, port: int, folder: Path, target: TargetOfRank, arguments: tuple[Any, ...]
) -> None:
    with open(folder / f"{number}.txt", "a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(folder)  # a trainer without a directory of its own writes here
    warm.start_as_usual()
    if num_ranks > 1:
        os.environ.update(LOCAL_RANK=str(number), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    target(*arguments)
