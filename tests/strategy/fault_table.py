"""Tables of faults: what tests each cell, how it ends, and the rows of the page that shows it."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.harness import warm
from tests.loop.test_launchers import free_port
from tests.strategy import fault_job as job
from tests.strategy.fault_job import SHUTDOWN_SECONDS, Fault

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "faults.md"
JOB_SECONDS = 120.0
BODY_SECONDS = 60.0
NOTICING_SECONDS = SHUTDOWN_SECONDS + 58.0  # for others to notice, ask, print and exit, however busy the machine is


@dataclass(frozen=True)
class Job:
    """Processes of their own: the fault ends one of them or stops all, the others must end by themselves."""

    rank: int
    act: Callable[[Any], Any]
    exit_code: int
    """The exit code of the rank with the fault."""
    text: str
    """Text in the output of each other rank; for a stop, in that of rank 0."""
    steps: tuple[int, ...]
    """Checkpoints that are there afterwards, all of which a run goes on from."""
    waits_seconds: float = 0.0
    """Seconds until a time limit of the job passes."""
    kind: str = "plain"
    """A key of `fault_job.MODULES`."""
    skip: int = 0
    """The number of times that the phase is left alone before the fault."""
    loop: str = "fit"
    """The Trainer's method."""
    num_ranks: int = 2
    others_exit_code: int = 1
    device: str = "cpu"
    """Or "cuda"."""

    @property
    def limit_seconds(self) -> float:
        return self.waits_seconds + NOTICING_SECONDS

    @property
    def others(self) -> list[int]:
        return [number for number in range(self.num_ranks) if number != self.rank]

    @property
    def ends(self) -> str:
        who = f"rank {self.others[0]} ends" if self.num_ranks == 2 else "all others end"
        texts = "`, `".join(self.text.splitlines())
        saved = f"; saved and good: step {', '.join(map(str, self.steps))}" if self.steps else ""
        return f"{who}: `{texts}`{saved}"

    def run(self, directory: Path, phase: str, rank: int | None = -1) -> Ended:
        """Start the ranks and wait until all have ended that do; print what they said. `rank` acts, None for all."""
        port = free_port(range(25000, 32000))
        fault = Fault(phase.split()[0], self.rank if rank == -1 else rank, self.act, self.skip)
        ranks = [
            warm.context().Process(
                target=job.run_rank,
                args=(directory, number, self.num_ranks, port, self.kind, fault, self.loop, self.device),
            )
            for number in range(self.num_ranks)
        ]
        deadline = time.monotonic() + JOB_SECONDS
        try:
            for rank in ranks:
                rank.start()
            for number in [*self.others, *([] if self.exit_code == -signal.SIGKILL else [self.rank])]:
                wait([ranks[number].sentinel], max(0.0, deadline - time.monotonic()))
            ended = time.monotonic()
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        outputs = [(directory / f"{number}.txt").read_text() for number in range(self.num_ranks)]
        print(*outputs, sep="\n" + 80 * "=" + "\n")
        seconds = ended - float((directory / "acted").read_text())
        print(f"ended after {seconds:.1f} s")
        return Ended([rank.exitcode for rank in ranks], outputs, seconds)

    def check(self, ended: Ended, directory: Path) -> list[Path]:
        """What the table says of the end. Returns the checkpoints that are there."""
        assert ended.exit_codes[self.rank] == self.exit_code
        for number in self.others:
            assert ended.exit_codes[number] == self.others_exit_code
            assert self.text in ended.outputs[number]
        assert ended.seconds < self.limit_seconds
        kept = [job.saved(directory, step) for step in self.steps]
        assert sorted((directory / "saved").glob("step=*")) == kept
        return kept


@dataclass(frozen=True)
class Ended:
    """A job that has ended, by rank."""

    exit_codes: list[int | None]
    outputs: list[str]
    seconds: float
    """Seconds from the fault to the end."""


@dataclass(frozen=True)
class ByTest:
    """A case that a test covers, in this file or elsewhere, in the living processes of the pool or in its own."""

    node_id: str
    """The node id of one test, or of all its parameters."""
    limit_seconds: float
    ends: str


@dataclass(frozen=True)
class LeftOut:
    """A case that cannot happen, or that does not exist for this fault."""

    reason: str


Cell = tuple[str, str]


@dataclass(frozen=True)
class Table:
    """Entries by (fault, phase)."""

    cells: Mapping[Cell, Job | ByTest | LeftOut]
    test_of_jobs: str
    """Node id of the test whose parameters are the cells that are jobs, "fault-phase"."""

    @property
    def jobs(self) -> dict[str, Job]:
        return {"-".join(cell): entry for cell, entry in self.cells.items() if isinstance(entry, Job)}

    def node_id(self, cell: Cell) -> str | None:
        """The test of a cell, if it has one."""
        entry = self.cells[cell]
        if isinstance(entry, Job):
            return f"{self.test_of_jobs}[{'-'.join(cell)}]"
        return entry.node_id if isinstance(entry, ByTest) else None

    @property
    def node_ids(self) -> list[str]:
        return [test for cell in self.cells if (test := self.node_id(cell)) is not None]

    def page_rows(self, seconds: Callable[[str], str]) -> list[str]:
        """The rows of the page's table; `seconds` gives a test's time."""
        rows = []
        for (fault, phase), entry in self.cells.items():
            test = self.node_id((fault, phase))
            if isinstance(entry, LeftOut):
                rows.append(f"| {fault} | {phase} | left out: {entry.reason} | | | |")
            elif test is not None:
                name = test.rpartition("/")[2].replace("|", "\\|")
                rows.append(
                    f"| {fault} | {phase} | {entry.ends} | {seconds(test)} | {entry.limit_seconds:g} | `{name}` |"
                )
        return rows

    def shown(self) -> list[str]:
        """Return this table's rows of the page, with ? in place of measured values. The page has other tables, too."""
        own = tuple(f"| {fault} | {phase} |" for fault, phase in self.cells)
        rows = [row for row in PAGE.read_text().splitlines() if row.startswith(own)]
        return [re.sub(r" \| \d+\.\d \| (?=\d+ \|)", " | ? | ", row) for row in rows]
