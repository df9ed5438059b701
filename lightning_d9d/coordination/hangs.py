"""`HangWatch` writes one file about where all ranks are, on request or when a wait for other ranks ends in an error.

Ranks answer through the store. A separate thread records where the main thread is before a time limit passes, because
the error that follows destroys this state. It does not use the store, which may be the part that does not answer.

[Note: ranks that do not answer] If a C call holds the interpreter, no thread of a rank can answer. Python's
`faulthandler` needs no interpreter. Its handler of the report's signal is written in C, and writes all stacks into a
file that the rank opened at the start. A rank of the same host sends the signal and reads the file. In a job of several
nodes, a timer in C writes the same without a signal; the thread restarts the timer repeatedly. The system shows a host
whether one of its processes is stopped or gone.

[Note: without a store] The store usually lives in rank 0's process. If that process does not answer, ranks write their
snapshots as files into the directory of the report. The first rank to create the report collects them.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from lightning_d9d.coordination import snapshots
from lightning_d9d.coordination.hang_report import Known, Silent, diagnose, report_text
from lightning_d9d.coordination.messages import Failure, ForeignValueError, is_count, say, value_of
from lightning_d9d.coordination.snapshots import Call, Snapshot

ANSWER_SECONDS = 10.0
"""Longest time for which a report waits for the ranks."""
BUSY_SECONDS = 1.0
"""Time for which a rank of the same host may answer before its process is examined."""
HELD_SECONDS = 15.0
"""Time without the interpreter after which the timer in C writes the stacks, in a job of several nodes."""
_AGAIN_SECONDS = 10.0
"""A signal that arrives sooner after a report belongs to it, as when a scheduler sends it to all ranks."""
_POLL_SECONDS = 0.05
_MAX_STACKS, _MAX_REASON = 200_000, 1000
_STACKS = ".stacks-"
_HELD = "its threads do not answer (a call in C may hold the interpreter, or its network is down); it is"

_registered: list[HangWatch] = []
"""The watches of a Trainer, and of another Trainer that runs inside of it."""


@dataclass(frozen=True)
class Place:
    """The place of a rank's process, and of its stacks."""

    host: str
    process: int
    started: str
    """Start time of the process, as the system counts; empty if it is unknown."""
    stacks: str
    """The path of the file that `faulthandler` writes."""
    signal: int
    """The signal that makes it write them; 0 for none."""
    moment: str
    """Start time of the run."""

    @staticmethod
    def is_valid(value: Any) -> bool:
        """Return whether JSON holds the fields of this class."""
        return (
            isinstance(value, dict)
            and value.keys() == set(Place.__annotations__)
            and all(type(each) is (int if name in ("process", "signal") else str) for name, each in value.items())
        )


class Cause(StrEnum):
    """The kind of event for which a report is written."""

    SIGNAL = "signal"
    WAIT = "wait"
    """A rank waits for others. The report also explains an error that soon ends the wait."""
    ERROR = "error"


@dataclass(frozen=True)
class Question:
    """A request for a report, which a rank writes to the store."""

    rank: int
    """The rank that writes the report."""
    cause: Cause
    reason: str
    """The cause in words, for the report."""

    def to_json(self) -> str:
        """Return the request as JSON."""
        return json.dumps([self.rank, self.cause, self.reason[:_MAX_REASON]])

    @staticmethod
    def from_json(key: str, content: bytes) -> Question:
        """Return the request that a rank wrote to the store.

        Raises:
            ForeignValueError: The content is not such a request.
        """
        rank, cause, reason = value_of(key, content, _is_question)
        return Question(rank, Cause(cause), reason)


@dataclass(frozen=True)
class Written:
    """A report that was written."""

    path: str
    lines: list[str]
    """The lines that name the rank for which the others wait."""

    def __str__(self) -> str:
        return "\n".join([*self.lines, f"stacks and collectives of all ranks are in {self.path}"])


class HangWatch:
    """Observes this rank and reports where all ranks are; one for each run of a rank.

    Args:
        rank: Global rank.
        limit_seconds: Time limit of one wait, after which a rank ends; may be changed.
        directory: Directory of the reports.
        several_nodes: Whether the job runs on more than one node; all nodes must then see the directory, or their part
            is missing.
        signal_number: The signal that requests a report; 0 for none.
        meets_at: Returns the kind of end at which the main thread waits for others, if it does.
    """

    def __init__(
        self,
        rank: int,
        limit_seconds: float,
        directory: Path,
        *,
        several_nodes: bool,
        signal_number: int,
        meets_at: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.rank = rank
        self.limit_seconds = limit_seconds
        self.directory = directory
        self.signal_number = signal_number
        self.written: Written | None = None
        """The last report that this rank wrote."""
        self.overdue: Failure | None = None
        """The failure of a rank that waits longer than its limit in a call of NCCL, which raises no error."""
        self.meets_at = meets_at
        self.places: Sequence[Place] = ()
        self._main_thread = threading.get_ident()
        self._several_nodes = several_nodes
        self._stacks = self._open_stacks()
        self._has_signal = False
        self._closing = threading.Event()
        self._answered = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning_d9d hang watch", daemon=True)
        self._writer: threading.Thread | None = None
        self._number = 1
        self._asked: Question | None = None
        self._last_at = -_AGAIN_SECONDS
        self._last_cause: Cause | None = None
        self._progress_at = time.monotonic()
        self._stalled: Snapshot | None = None
        self._stalled_at = 0.0
        self._has_warned = False
        self._left: Snapshot | None = None
        self._busy: float | None = None
        self._used = (0.0, 0.0)

    def start(self) -> None:
        """Start the thread, and make a process that the system or C++ aborts print its stacks."""
        with suppress(RuntimeError, ValueError, OSError, AttributeError):  # stderr may be no file
            if not faulthandler.is_enabled():
                faulthandler.enable()
        self._thread.start()

    def register_signal(self) -> None:
        """Make the signal write stacks without the interpreter.

        Only the main thread may call it. An existing handler in Python is called afterwards.
        """
        faulthandler.register(self.signal_number, self._stacks, all_threads=True, chain=True)
        self._has_signal = True
        _registered.append(self)

    @property
    def place(self) -> Place:
        """Return where this process is; ranks exchange these places."""
        path = f"/proc/{os.getpid()}/fd/{self._stacks.fileno()}"
        return Place(
            socket.gethostname(),
            os.getpid(),
            _process(os.getpid())[1],
            self._stacks.name if isinstance(self._stacks.name, str) else path,
            self.signal_number if self._has_signal else 0,
            datetime.now().strftime("%Y%m%d-%H%M%S"),
        )

    @property
    def has_written(self) -> bool:
        """True if this rank has written a report."""
        return self.written is not None and len(self.written.lines) > 0

    @property
    def reports(self) -> list[str]:
        """The paths of this run's reports, as far as this rank can see them."""
        names = [self._name(number) for number in range(1, self._number + 1)] if self.places else []
        paths = [str(path) for name in names if (path := self.directory / name).exists()]
        written = [] if self.written is None or self.written.path in paths else [self.written.path]
        return paths + written

    @property
    def is_writing(self) -> bool:
        """True while this rank writes a report, which takes at most a little more than `ANSWER_SECONDS`."""
        return self._writer is not None and self._writer.is_alive()

    # For the main thread

    def progress(self) -> None:
        """Record that the main thread makes progress."""
        self._progress_at = time.monotonic()
        self._stalled, self._has_warned = None, False

    def leave(self, error: BaseException) -> None:
        """Record that the main thread has left a wait for others with an error."""
        if self._left is None:
            self._left = self._stalled or self._take(error)

    def explain(
        self, error: BaseException, reason: str, wake: Callable[[], None] | None, seconds: float, is_first: bool
    ) -> None:
        """Write a report, or let another rank write it, and add to an error which rank this one waited for.

        Args:
            error: The error with which the main thread has left its wait.
            reason: The reason for the report.
            wake: Makes the thread of the store call `talk`; None if the store does not answer.
            seconds: How long to wait for the others without a store.
            is_first: Whether this rank was the first of the job to fail.
        """
        if not self.places or not (is_first or wake is None):
            return
        if wake is None:
            self._report_without_store(reason, seconds)
        elif not (self._is_reported() and self._last_cause is Cause.WAIT):
            self._asked = Question(self.rank, Cause.ERROR, reason)
            wake()
            self._answered.wait(ANSWER_SECONDS + 5)
        if self.written is not None:
            error.add_note(str(self.written))

    def _report_without_store(self, reason: str, seconds: float) -> None:
        """Write the report from the files of other ranks, or leave a file to the rank that writes it."""
        number = self._number
        path = self.directory / self._name(number)
        try:
            _replace(self._part(number, self.rank), self._snapshot().to_json())
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            self.written = Written(str(path), [])
            return
        except OSError:
            return
        self._write(number, reason, None, seconds)
        for rank in range(len(self.places)):
            self._part(number, rank).unlink(missing_ok=True)

    def close(self) -> None:
        """End the threads and restore the signal's handler."""
        self._closing.set()
        if self._writer is not None:
            self._writer.join(ANSWER_SECONDS)
        self._thread.join()
        if self in _registered:
            faulthandler.unregister(self.signal_number)
            _registered.remove(self)
            if _registered:
                outer = _registered[-1]
                faulthandler.register(outer.signal_number, outer._stacks, all_threads=True, chain=True)
        with suppress(FileNotFoundError):  # a report took this rank for one that has ended
            self._stacks.close()

    # For the thread that talks to the store

    def ask(self) -> None:
        """Request a report, as a signal does."""
        if self.places and not self._is_reported():
            reason = f"{signal.Signals(self.signal_number).name} came to rank {self.rank}"
            self._asked = Question(self.rank, Cause.SIGNAL, reason)

    def _is_reported(self) -> bool:
        """Return True if a report was requested a short time ago."""
        return time.monotonic() <= self._last_at + _AGAIN_SECONDS

    def talk(self, store: dist.Store) -> None:
        """Request a report, answer a request, or begin to write one.

        Raises:
            ForeignValueError: The store has a value that no rank wrote.
        """
        if not self.places:
            return
        key = f"hang/{self._number}"
        if self._asked is not None:
            store.compare_set(key, "", self._asked.to_json())
            self._asked = None
        elif not store.check([key]):
            return
        self._answered.clear()
        question = Question.from_json(key, store.get(key))
        self._last_at, self._last_cause = time.monotonic(), question.cause
        if question.rank != self.rank:
            store.set(f"{key}/{self.rank}", self._snapshot().to_json())
            self._number += 1
            self._answered.set()
            return
        self._writer = threading.Thread(
            target=self._write,
            args=(self._number, question.reason, store, ANSWER_SECONDS),
            name="lightning_d9d report",
            daemon=True,
        )
        self._writer.start()
        self._number += 1

    # Writing the report

    def _name(self, number: int) -> str:
        return f"hang-{self.places[0].moment}-{number}.txt"

    def _part(self, number: int, rank: int) -> Path:
        return self.directory / f".{self._name(number)}.{rank}"

    def _write(self, number: int, reason: str, store: dist.Store | None, seconds: float) -> None:
        try:
            known = self._gather(store, number, seconds)
            lines = diagnose(known)
            moment = datetime.now().astimezone().isoformat(" ", "seconds")
            path = self._save(self._name(number), report_text(known, reason, lines, moment))
            self.written = Written(path, lines)
            say(f"[rank {self.rank}] {reason}:\n{self.written}")
            self._remove_stacks(known)
        finally:
            self._answered.set()

    def _remove_stacks(self, known: Known) -> None:
        """Remove the empty files that ranks keep for their stacks, if the ranks have ended."""
        for rank, silent in known.silent.items() if self._several_nodes else ():
            name = Path(self.places[rank].stacks).name
            if not silent.stacks and name.startswith(_STACKS):
                with suppress(OSError):
                    (self.directory / name).unlink()

    def _save(self, name: str, text: str) -> str:
        for directory in (self.directory, Path(tempfile.gettempdir())):
            try:
                _replace(directory / name, text)
            except OSError as error:
                failed = error
            else:
                return str(directory / name)
        return f"no file: {failed}"

    def _gather(self, store: dist.Store | None, number: int, seconds: float) -> Known:
        begin = time.monotonic()
        found: dict[int, Snapshot] = {self.rank: self._snapshot()}
        silent: dict[int, Silent] = {}
        missing = set(range(len(self.places))) - {self.rank}
        while missing and time.monotonic() < begin + seconds:
            is_late = time.monotonic() > begin + min(BUSY_SECONDS, seconds / 2)
            for rank in sorted(missing):
                try:
                    answer = self._answer(store, number, rank)
                except ForeignValueError as error:
                    silent[rank] = Silent(str(error))
                    continue
                if answer is not None:
                    found[rank] = answer
                elif (look := self._look_at(self.places[rank], is_late=is_late)) is not None:
                    silent[rank] = look
            missing -= found.keys() | silent.keys()
            time.sleep(_POLL_SECONDS)
        for rank in missing:
            silent[rank] = Silent("it does not answer: its process has ended or is stopped, or the network is down")
        return Known([f"{each.host}, process {each.process}" for each in self.places], found, silent)

    def _answer(self, store: dist.Store | None, number: int, rank: int) -> Snapshot | None:
        key = f"hang/{number}/{rank}"
        if store is None:
            with suppress(OSError):
                return Snapshot.from_json(key, self._part(number, rank).read_bytes())
        elif store.check([key]):
            return Snapshot.from_json(key, store.get(key))
        return None

    def _look_at(self, place: Place, *, is_late: bool) -> Silent | None:
        """Examine the process of a rank that has not answered; return None while it may still answer."""
        if place.host != self.places[self.rank].host:
            stacks = _read(place.stacks) if is_late and self._several_nodes else ""
            return Silent(_held_at(stacks), stacks) if stacks else None
        state, started = _process(place.process)
        if state in ("", "Z", "X") or started != place.started:
            return Silent("its process has ended") if sys.platform == "linux" else None
        if state == "T":
            return Silent("its process is stopped (SIGSTOP)")
        if state == "t":
            return Silent("a debugger holds its process")
        if not is_late or not place.signal:
            return None
        with suppress(OSError):
            os.kill(place.process, place.signal)
        stacks, end = "", time.monotonic() + BUSY_SECONDS
        while time.monotonic() < end and (not stacks or stacks != _read(place.stacks)):
            stacks = _read(place.stacks)
            time.sleep(_POLL_SECONDS)
        if stacks:
            return Silent(_held_at(stacks), stacks)
        return Silent("it waits in a system call that nothing interrupts, for a disk say") if state == "D" else None

    # Looking at this rank

    def _snapshot(self) -> Snapshot:
        return self._left or self._take()

    def _take(self, error: BaseException | None = None) -> Snapshot:
        return snapshots.take(self.rank, self._main_thread, error=error, meets_at=self.meets_at(), busy=self._busy)

    def _run(self) -> None:
        while not self._closing.wait(min(1.0, self.limit_seconds / 20)):
            self._measure()
            now = time.monotonic()
            is_due = self._has_warned or now > self._stalled_at + self.limit_seconds / 10
            if is_due and now > self._progress_at + 0.8 * self.limit_seconds:
                self._stalled_at = now
                self._look_at_stall(self._take())
            if os.fstat(self._stacks.fileno()).st_size:  # of a time when it was slow, or of an earlier report
                self._stacks.seek(0)
                self._stacks.truncate()
            if self._several_nodes:
                faulthandler.dump_traceback_later(HELD_SECONDS, file=self._stacks)
        if self._several_nodes:
            faulthandler.cancel_dump_traceback_later()

    def _look_at_stall(self, snapshot: Snapshot) -> None:
        pending = snapshot.pending
        if not pending and (not snapshot.waits_for_ranks or (self._stalled is not None and self._stalled.pending)):
            return  # it computes, or leaves a wait with an error
        self._stalled = snapshot
        late = [call for call in pending if call.seconds > self.limit_seconds * self._late_share(call)]
        if late and not self._has_warned and self.places and not self._is_reported():
            self._has_warned = True
            reason = f"rank {self.rank} waits for others since {late[0].seconds:.0f} s"
            self._asked = Question(self.rank, Cause.WAIT, reason)
        stalled_seconds = time.monotonic() - self._progress_at
        for call in late:  # of the step that stalls, or of one that the host has left before
            if self._late_share(call) < 1 and call.limit_seconds < call.seconds < call.limit_seconds + stalled_seconds:
                waits = f"waited more than the {call.limit_seconds:g} s of the group for other ranks"
                self.overdue = Failure(self.rank, f"{waits} in {call}, number {call.number}")

    def _late_share(self, call: Call) -> float:
        """Return the share of the time limit after which a report is requested without an error.

        With NCCL, torch ends a process whose call is late, and its ranks can no longer report anything. Other calls
        without an error belong to groups that are not of this package, and have longer limits.
        """
        return 0.9 if call.is_on_nccl and call.limit_seconds <= self.limit_seconds else 1.2

    def _measure(self) -> None:
        """Measure how busy the main thread was since the last measurement."""
        with suppress(OSError, AttributeError):
            used, now = time.clock_gettime(time.pthread_getcpuclockid(self._main_thread)), time.monotonic()
            before, since = self._used
            self._busy = min(1.0, (used - before) / (now - since)) if since else None
            self._used = (used, now)

    def _open_stacks(self) -> IO[bytes]:
        if sys.platform == "linux" and not self._several_nodes:
            return tempfile.TemporaryFile(buffering=0)
        directory = self.directory if self._several_nodes and os.access(self.directory, os.W_OK) else None
        return tempfile.NamedTemporaryFile(buffering=0, prefix=_STACKS, dir=directory)  # type: ignore[return-value]


def _is_question(value: object) -> bool:
    if not (isinstance(value, list) and len(value) == 3):
        return False
    rank, cause, reason = value
    return is_count(rank) and cause in tuple(Cause) and isinstance(reason, str)


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(text)
    unfinished.replace(path)


def _process(number: int) -> tuple[str, str]:
    """Return the state and the start time of a process of this host; empty if it has ended or they are unknown."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_STACKS).decode(errors="replace")
    except OSError:
        return ""


def _held_at(stacks: str) -> str:
    """Return the call in the main thread's innermost frame: threads are listed in reverse order of their start."""
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', stacks.rpartition("hread 0x")[2])
    return f"{_HELD} {f'at {frames[0][0]}:{frames[0][1]} in {frames[0][2]}' if frames else 'outside of Python'}"


def forget_in_child() -> None:
    """Restore the signal's handler in a forked process, such as a worker of a dataloader."""
    for each in _registered[-1:]:
        faulthandler.unregister(each.signal_number)
    _registered.clear()


os.register_at_fork(after_in_child=forget_in_child)
