"""The pool of living rank processes that the tests marked `ranks(n)` run on."""

import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.harness import failures, records, warm
from tests.harness.messages import (
    STACK_SIGNAL,
    Assignment,
    Died,
    Finish,
    Finished,
    Passed,
    Raised,
    Ready,
    Result,
    Setup,
    Skipped,
    Stuck,
)

START_SECONDS = 180.0
GRACE_SECONDS = 2.0
"""How long the other ranks may go on once one has failed."""
FINISH_SECONDS = 10.0
GROUP_TIMEOUT_SECONDS = 3600.0
"""Later than the limit of any test, at which the pool can show where every rank is: a group's timeout only raises."""
_POLL_SECONDS = 0.05
_ROOT = Path(__file__).parents[2]
_MAX_OUTPUT = 20_000


class PoolStartError(RuntimeError):
    """A rank process did not come up."""


@dataclass(frozen=True, kw_only=True, order=True)
class PoolKey:
    """What a pool is started for."""

    device_type: str
    num_ranks: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How one body ended on all ranks together."""

    failure: str | None = None
    """The whole story; the pool is dead then."""
    skip_reason: str | None = None
    leftovers: list[str] = field(default_factory=list)
    """What some rank left changed; it has been put back."""
    outputs: dict[int, str] = field(default_factory=dict)
    """What each rank wrote to stdout and stderr, if anything."""


class RankPool:
    """`key.num_ranks` processes in one process group, which run one test body after another until one fails.

    Each process leads a session of its own: Ctrl-C reaches pytest alone, and what a body starts dies with its rank.
    Should pytest itself be killed, the kernel kills the ranks.
    """

    def __init__(self, key: PoolKey, *, show_output: bool) -> None:
        from torch.distributed import TCPStore

        self.key = key
        self.alive = True
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._ranks: list[_RankProcess] = []
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        try:
            port = _free_port()
            for rank in range(key.num_ranks):
                setup = Setup(
                    rank=rank,
                    world_size=key.num_ranks,
                    device_type=key.device_type,
                    directory=self._directory,
                    store_port=self._store.port,
                    group_timeout=timedelta(seconds=GROUP_TIMEOUT_SECONDS),
                )
                self._ranks.append(_RankProcess(setup, port, show_output))
            self._start()
        except BaseException:
            self.kill()
            raise

    def run(self, assignment: Assignment, timeout_seconds: float) -> Verdict:
        """Runs one body on every rank; a rank still busy after `timeout_seconds` is a failure."""
        try:
            for rank in self._ranks:
                rank.mark_output()
                rank.send(assignment)
            verdict = self._judge(assignment, timeout_seconds)
        except BaseException:  # Ctrl-C above all
            self.kill()
            raise
        if verdict.failure:
            self.kill()
        return verdict

    def kill(self) -> None:
        """Ends every rank and whatever it started; nothing is asked of them."""
        self.alive = False
        while self._ranks:
            self._ranks.pop().kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self) -> None:
        results = self._collect(START_SECONDS)
        if not all(isinstance(result, Ready) for result in results):
            raise PoolStartError(
                f"no pool of {self.key.num_ranks} ranks: {failures.describe(results)}\n{self._ranks[0].output()}"
            )
        for rank, result in zip(self._ranks, results, strict=True):
            assert isinstance(result, Ready)
            rank.main_thread = result.main_thread

    def _judge(self, assignment: Assignment, timeout_seconds: float) -> Verdict:
        results = self._collect(timeout_seconds)
        outputs = {rank.setup.rank: output for rank in self._ranks if (output := rank.output())}
        skips = [result for result in results if isinstance(result, Skipped)]
        if len(skips) != len(results) and not all(isinstance(result, Passed) for result in results):
            failed = any(isinstance(result, Raised | Died) for result in results)
            story = [failures.describe(results), *([] if failed else self._mismatches(assignment))]
            return Verdict(failure="\n".join(story), outputs=outputs)
        if mismatches := self._mismatches(assignment):
            return Verdict(failure="\n".join(mismatches), outputs=outputs)
        for rank in self._ranks:
            rank.send(Finish())
        results = self._collect(FINISH_SECONDS)
        finished = [result for result in results if isinstance(result, Finished)]
        if len(finished) < len(results):
            story = ["every body returned, but then the ranks could not meet at a barrier", failures.describe(results)]
            return Verdict(failure="\n".join(story), outputs=outputs)
        if not all(result.reusable for result in finished):
            self.kill()
        leftovers = sorted({leftover for result in finished for leftover in result.leftovers})
        return Verdict(skip_reason=skips[0].reason if skips else None, leftovers=leftovers, outputs=outputs)

    def _mismatches(self, assignment: Assignment) -> list[str]:
        if not assignment.record:
            return []
        return records.mismatches([records.read(rank.setup.record_path) for rank in self._ranks])

    def _collect(self, timeout_seconds: float) -> list[Result]:
        """One result of every rank, in rank order: its message, its death, or where it is stuck when time is up."""
        deadline = time.monotonic() + timeout_seconds
        waited = f"after {timeout_seconds:g} s"
        results: dict[int, Result] = {}
        while missing := [rank for rank in self._ranks if rank.setup.rank not in results]:
            wait([rank.connection for rank in missing if not rank.connection.closed], _POLL_SECONDS)
            for rank in missing:
                if result := rank.poll():
                    results[rank.setup.rank] = result
                    if isinstance(result, Raised | Died) and time.monotonic() + GRACE_SECONDS < deadline:
                        deadline = time.monotonic() + GRACE_SECONDS
                        waited = f"{GRACE_SECONDS:g} s after rank {rank.setup.rank} failed"
            if time.monotonic() > deadline:
                stuck = [rank for rank in missing if rank.setup.rank not in results]
                results |= {rank.setup.rank: Stuck(waited=waited, frames=rank.stack()) for rank in stuck}
        return [results[rank.setup.rank] for rank in self._ranks]


class _RankProcess:
    """The pool's handle on one rank: its process, connection and files."""

    def __init__(self, setup: Setup, port: int, show_output: bool) -> None:
        self.setup = setup
        self.main_thread = 0
        self._output_start = 0
        self.connection, theirs = Pipe()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(_ROOT), *sys.path]),
            "OMP_NUM_THREADS": "1",
            "RANK": str(setup.rank),
            "LOCAL_RANK": str(setup.rank),
            "WORLD_SIZE": str(setup.world_size),
            "LOCAL_WORLD_SIZE": str(setup.world_size),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "rank-pool",
        }
        setup.output_path.touch()
        # A process with CUDA cannot be a fork of one that has asked for it.
        processes = multiprocessing.get_context("spawn") if setup.device_type == "cuda" else warm.context()
        output = None if show_output else setup.output_path
        self._process = processes.Process(target=warm.run_rank, args=(theirs, environment, output))
        self._process.start()
        theirs.close()
        self.send(setup)

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send(self, message: Any) -> None:
        """Says `message`; that the rank is dead is `poll`'s to find."""
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def poll(self) -> Result | None:
        """The rank's next message or its death, if there is one."""
        if not self.connection.closed:
            try:
                if self.connection.poll():
                    return self.connection.recv()
            except (EOFError, OSError):
                self.connection.close()
        exit_code = self._process.exitcode
        return None if exit_code is None else Died(at_seconds=time.monotonic(), exit_code=exit_code)

    def stack(self) -> list[failures.Frame]:
        """Return the stack of the rank's main thread, innermost first, also if it is blocked in native code."""
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(self._pid, STACK_SIGNAL)
        frames: list[failures.Frame] = []
        deadline = time.monotonic() + 10  # on a machine that has much else to do
        while time.monotonic() < deadline:
            found = failures.main_thread_frames(self.setup.stack_path.read_text(), self.main_thread)
            if found and found == frames:  # twice the same: all of it is written
                break
            frames = found
            time.sleep(_POLL_SECONDS)
        return frames

    def mark_output(self) -> None:
        """Mark the place in the output from which on it is the next body's."""
        self._output_start = self.setup.output_path.stat().st_size

    def output(self) -> str:
        with open(self.setup.output_path, "rb") as file:
            file.seek(max(self._output_start, self.setup.output_path.stat().st_size - _MAX_OUTPUT))
            return file.read().decode(errors="replace")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # nothing of it is left, or it leads no session yet
            os.killpg(self._pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self.connection.close()


def _free_port() -> int:
    """Return a free port, for what a body starts at MASTER_PORT."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
