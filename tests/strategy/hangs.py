"""Ways in which a rank keeps others waiting, and what the report of the job must say of each.

`test_hangs.py` runs three of them in CI and all with many meshes; `python -m tests.chaos.hangs` runs all, and writes
the table of docs/explanation/faults.md.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d import TimeoutConfig
from lightning_d9d.strategy.ranks import JobRanks
from tests.strategy import fault_job as job
from tests.strategy.fault_job import SHUTDOWN_SECONDS, STEP_SECONDS
from tests.strategy.fault_table import Ended, Job

REPORT_SECONDS = 30.0
"""A report is there so long after the step timeout, at most."""
_HERE = r"tests/strategy/hangs\.py:\d+ in "


def spin(_: Any) -> None:
    while True:
        pass


def wait_for_lock(_: Any) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def wait_for_data(_: Any) -> None:
    os.read(os.pipe()[0], 1)


def hold_interpreter(_: Any) -> None:
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def in_other_order(_: Any) -> None:
    limit = timedelta(seconds=STEP_SECONDS)
    first, second = (dist.new_group(timeout=limit, group_desc=name) for name in ("first", "second"))
    for group in (first, second) if dist.get_rank() == 0 else (second, first):
        dist.all_reduce(_ones(3), group=group)


def leave_out(_: Any) -> None:
    group = dist.new_group(group_desc="some")
    dist.all_reduce(_ones(1), group=group)  # connects the ranks, as groups of a mesh are before the first step
    if dist.get_rank() == 0:
        dist.all_reduce(_ones(3), group=group)


def with_other_shape(_: Any) -> None:
    """The rank that gets more than it has room for is ended by gloo."""
    dist.all_reduce(_ones(7))


def _ones(size: int) -> Tensor:
    return torch.ones(size, device="cuda" if torch.cuda.is_initialized() else "cpu")


def take_all_memory(_: Any) -> None:
    torch.empty(2**50)


def fill_disk_of_log(_: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (job.MAX_FILE_BYTES, job.MAX_FILE_BYTES))
    with tempfile.TemporaryFile(buffering=0) as log:
        while True:
            log.write(b"step 1\n" * 1000)


def ask_for_report(_: Any) -> None:
    """Wait for the report, which finds this rank here."""
    os.kill(os.getpid(), signal.SIGUSR2)
    while not list(Path(tempfile.gettempdir()).glob("hang-*.txt")):  # the directory of the job
        pass


def run_without_groups(directory: Path, number: int, port: int) -> None:
    """One of two ranks; rank 1 does not come to make process groups."""
    job.be_rank(directory, number, 2, port)
    if number == 1:
        JobRanks.spread = wait_for_data  # type: ignore[method-assign]
    job.fit(directory, timeouts=TimeoutConfig(init_seconds=600, groups_seconds=1, shutdown_seconds=SHUTDOWN_SECONDS))


@dataclass(frozen=True)
class Hang:
    """A fault in the forward of one rank of two, or of both."""

    act: Callable[[Any], Any]
    lines: tuple[str, ...]
    """Regular expressions of what the report says; of the outputs, where there is none."""
    shown: str
    """The same for the page."""
    rank: int | None = 1
    exit_code: int = 1
    """The exit code of rank 1."""
    other_exit_code: int = 1
    waits: bool = True
    """Whether ranks wait until the step timeout; otherwise a rank ends, or raises."""
    reports: bool = True
    kind: str = "plain"
    lines_on_nccl: tuple[str, ...] = ()
    """Other lines for NCCL, if it has different ones."""

    def run(self, directory: Path, device: str = "cpu") -> Ended:
        """Start the ranks, wait for their end, and check it. On "cuda" NCCL chooses exit codes."""
        case = Job(1, self.act, self.exit_code, "", (), kind=self.kind, device=device)
        ended = case.run(directory, "forward", self.rank)
        reports = list(directory.rglob("hang-*.txt"))
        last_words = "".join(ended.outputs)
        said = "".join(report.read_text() for report in reports) or last_words
        print(said)
        on_cuda = device == "cuda"
        assert all(ended.exit_codes) if on_cuda else ended.exit_codes == [self.other_exit_code, self.exit_code]
        assert ended.seconds < self.limit_seconds
        assert len(reports) == self.reports
        at_step = "[34]" if on_cuda else "3"  # the host runs ahead of NCCL
        assert re.search(f"Failed after step {at_step}; the last checkpoint is ", last_words), last_words
        assert all(f"Reports: {report}" in last_words for report in reports), last_words
        for line in (self.lines_on_nccl or map(_on_nccl, self.lines)) if on_cuda else self.lines:
            assert re.search(line, said), f"{line}\nis not in\n{said}"
        return ended

    @property
    def limit_seconds(self) -> float:
        """The limit of the seconds from the fault to the end of the job."""
        return self.waits * STEP_SECONDS + REPORT_SECONDS + SHUTDOWN_SECONDS


def _on_nccl(line: str) -> str:
    """Return the line for NCCL. The first missed collective is a different one there, because the host runs ahead."""
    return line.replace(r"gloo:all_reduce\(Float\[\]\)", r"nccl:\w+\(.*\)").replace("gloo:", "nccl:")


_MISSED = r"rank 1 \(.*\) did not come to gloo:all_reduce\(Float\[\]\), number \d+ of group .*rank 0 waits since .*"
_CALLED = (
    "`rank 1 (host, process 42) did not come to gloo:all_reduce(Float[]), number 44 of group 'default_pg' (ranks 0, 1)"
)
HANGS = {
    "SIGSTOP": Hang(
        job.stop,
        (_MISSED + "its process is stopped",),
        f"{_CALLED}, in which rank 0 waits since 3.7 s: its process is stopped (SIGSTOP)`",
        exit_code=-signal.SIGKILL,
    ),
    "endless Python loop": Hang(
        spin,
        (_MISSED + _HERE + "spin, its main thread computes",),
        f"{_CALLED} ...: it is at train.py:42 in spin, its main thread computes`",
    ),
    "lock": Hang(
        wait_for_lock,
        (_MISSED + _HERE + "wait_for_lock, its main thread waits",),
        "as above, `its main thread waits`, with the line of the lock",
    ),
    "data that never come": Hang(
        wait_for_data,
        (_MISSED + _HERE + "wait_for_data, its main thread waits",),
        "as above, with the line that reads",
    ),
    "loop in a stage": Hang(
        spin,
        (
            r"rank 1 \(.*\) waits for no other rank: it is at .*"
            + _HERE
            + "spin, its main thread computes; rank 0 waits",
        ),
        "`rank 1 (...) waits for no other rank: it is at train.py:42 in spin, its main thread computes; rank 0 waits`; "
        "gloo numbers no messages between two ranks",
        kind="pipelined",
    ),
    "C call that holds the interpreter": Hang(
        hold_interpreter,
        (_MISSED + "its threads do not answer.*it is at .*" + _HERE + "hold_interpreter",),
        "as above, `its threads do not answer (a call in C may hold the interpreter, or its network is down); it is at "
        "train.py:42 in step`, with the stacks that C wrote; what launched the rank has to kill it",
        exit_code=-signal.SIGKILL,
    ),
    "a rank leaves a collective out": Hang(
        leave_out,
        (
            r"rank 1 did not come to gloo:all_reduce\(Float\[3\]\), number 2 of group 'some'.*rank 0 waits",
            "ranks wait for each other: one left a collective out",
            r"rank 1 \(.*\): it is at ",
        ),
        "`rank 1 did not come to gloo:all_reduce(Float[3]), number 2 of group 'some' (ranks 0, 1), in which rank 0 "
        "waits since 3.7 s`, where rank 1 waits instead, and `ranks wait for each other: one left a collective out, or "
        "they call them in different orders`",
        rank=None,
        lines_on_nccl=(r"rank 1 \(.*\) did not come to nccl:all_reduce\(Float\[3\]\), number 2 of group 'some'",),
    ),
    "another order": Hang(
        in_other_order,
        (
            r"rank 1 did not come to gloo:all_reduce\(Float\[3\]\), number 1 of group 'first'.*rank 0 waits",
            r"rank 0 did not come to gloo:all_reduce\(Float\[3\]\), number 1 of group 'second'.*rank 1 waits",
            "ranks wait for each other",
            r"rank 1 \(.*\): it is at .*called from .*" + _HERE + "in_other_order",
        ),
        "a line as the last for each of both groups, and where each rank is",
        rank=None,
    ),
    "another shape": Hang(
        with_other_shape,
        (r"rank 1 \(.*\) did not come to gloo:all_reduce\(Float\[7\]\), number \d+ of .*its process has ended",),
        "`rank 1 (...) did not come to gloo:all_reduce(Float[7]), number 44 of ...: its process has ended`; gloo ends "
        "the rank with less room (SIGABRT), which prints its stacks",
        rank=0,
        exit_code=-signal.SIGABRT,
        waits=False,
    ),
    "out of memory": Hang(
        take_all_memory,
        (r"rank 1 failed: RuntimeError: .*can't allocate memory",),
        "`rank 1 failed: RuntimeError: ... can't allocate memory`, and its traceback; no report",
        waits=False,
        reports=False,
    ),
    "full disk while logging": Hang(
        fill_disk_of_log,
        (r"rank 1 failed: OSError: \[Errno 27\] File too large",),
        "`rank 1 failed: OSError: [Errno 27] File too large`, and its traceback; no report",
        waits=False,
        reports=False,
    ),
}


def page_rows(seconds: Callable[[str], str]) -> list[str]:
    """The rows of the page's table; `seconds` gives the time of a hang."""
    return [f"| {name} | {hang.shown} | {seconds(name)} | {hang.limit_seconds:g} |" for name, hang in HANGS.items()]
