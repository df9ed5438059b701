"""`Snapshot` describes where one rank is, as its own threads see it: Python stacks, collectives, and its waits.

torch's flight recorder numbers the collectives of each process group, on gloo and on NCCL. Messages between two ranks
are recorded only on NCCL; a rank that waits for one on gloo is recognised by its stack.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

from lightning_d9d.coordination.messages import is_count, value_of

NUM_CALLS = 8
"""Number of last collectives of each group that are shown, besides all pending ones."""
_NUM_FRAMES = 60
_LIBRARIES = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"])
_OWN = str(Path(__file__).parents[1])
_COALESCED = "nccl:coalesced"
_HANDLER = "_do_nothing"
"""Python's handler of the report's signal: a long call in C that checks for signals shows it as its caller."""
_WAITS = ("torch/distributed/distributed_c10d.py", "pipeline/transfer.py", "coordination/watchdog.py")
"""Ends of the file names of functions that wait for other ranks."""

Frame = tuple[str, int, str]
"""File, line and function."""


@dataclass(frozen=True)
class Call:
    """A collective that a rank has called."""

    group: str
    """Torch's name of the process group, the same on its ranks."""
    number: int
    """Number of the collective in its group on this rank, counted from 1."""
    operation: str
    sizes: list[list[int]]
    """Shapes of the inputs."""
    dtypes: list[str]
    is_pending: bool
    """True if it has not ended on this rank."""
    seconds: float
    """Seconds since the call."""
    limit_seconds: float = float("inf")
    """Time limit of its group."""

    @property
    def is_on_nccl(self) -> bool:
        """True if torch ends the process some time after the limit, without a message."""
        return self.operation.startswith("nccl")

    def __str__(self) -> str:
        tensors = ", ".join(f"{dtype}{size}" for dtype, size in zip(self.dtypes, self.sizes, strict=False))
        return f"{self.operation}({tensors})"


@dataclass(frozen=True)
class Stack:
    """A thread and its stack: the innermost frame is first."""

    name: str
    frames: list[Frame]


@dataclass(frozen=True)
class Snapshot:
    """The state of a rank, as it sees itself."""

    rank: int
    main: Stack
    """The thread that trains."""
    others: list[Stack] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    """The last collectives, in the order of their calls."""
    groups: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    """The name in the mesh and the ranks of each group, by torch's name."""
    meets_at: str | None = None
    """The "epoch" or "evaluation" at whose end the rank waits for the others."""
    busy: float | None = None
    """The share of a processor that the main thread has used recently, from 0 to 1."""

    def to_json(self) -> str:
        """Return the content that `from_json` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(key: str, content: bytes) -> Snapshot:
        """Return the snapshot that a rank has written under a key.

        Raises:
            ForeignValueError: The content is not a snapshot.
        """
        return _build(value_of(key, content, _is_snapshot))

    @property
    def pending(self) -> list[Call]:
        """The pending collectives."""
        return [call for call in self.calls if call.is_pending]

    @property
    def waits_for_ranks(self) -> bool:
        """True if the main thread is inside a call that waits for other ranks."""
        inner = self.main.frames[:8]
        return self.meets_at is not None or any(file.endswith(_WAITS) for file, _, _ in inner)

    @property
    def place(self) -> str:
        """Where the main thread is: its innermost frame, and the innermost frame of the user's own code."""
        if not self.main.frames:
            return "outside of Python"
        own = next((each for each in self.main.frames if _is_own(each[0])), None)
        first = f"at {_shown(self.main.frames[0])}"
        if own is None or own == self.main.frames[0]:
            return first
        return f"{first}, called from {_shown(own)}"


def _shown(frame: Frame) -> str:
    file, line, function = frame
    return f"{file}:{line} in {function}"


def _is_own(file: str) -> bool:
    return not file.startswith((*_LIBRARIES, _OWN, "<")) and "site-packages" not in file


def take(
    rank: int,
    main_thread: int,
    *,
    error: BaseException | None = None,
    meets_at: str | None = None,
    busy: float | None = None,
) -> Snapshot:
    """Take a snapshot of this process. Local; needs the interpreter, but neither files nor other ranks.

    Args:
        rank: This rank.
        main_thread: The identifier of the thread that trains.
        error: The error that the main thread has raised; the snapshot shows where.
        meets_at: As in `Snapshot`.
        busy: Likewise.
    """
    names = {each.ident: each.name for each in threading.enumerate()}
    stacks = {ident: _frames(frame) for ident, frame in sys._current_frames().items()}
    main = stacks.pop(main_thread, [])
    if error is not None and error.__traceback__ is not None:
        main = _raised(error.__traceback__)
    own = threading.get_ident()
    others = [Stack(names.get(ident) or str(ident), frames) for ident, frames in stacks.items() if ident != own]
    calls = _calls()
    if error is not None and calls:  # most likely the call that failed, which the recorder takes for one that ended
        calls[-1] = replace(calls[-1], is_pending=True)
    return Snapshot(rank, Stack("main", main), others, calls, _groups(), meets_at, busy)


def frames_of(thread: int) -> list[Frame]:
    """Return where a thread of this process is, the innermost frame first. Local; needs no file."""
    return _frames(sys._current_frames().get(thread))


def stack_text(frames: Sequence[Frame]) -> str:
    """Return frames as Python shows a stack, with lines of their sources. Local; reads these."""
    return "".join(traceback.format_list(traceback.StackSummary.from_list([(*each, None) for each in frames[::-1]])))


def _frames(frame: FrameType | None) -> list[Frame]:
    found: list[Frame] = []
    while frame is not None and len(found) < _NUM_FRAMES:
        if found or frame.f_code.co_name != _HANDLER:
            found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found


def _raised(trace: TracebackType | None) -> list[Frame]:
    found: list[Frame] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        found.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return found[::-1][:_NUM_FRAMES]


def _groups() -> dict[str, tuple[str, list[int]]]:
    world = dist.distributed_c10d._world
    found = {}
    for group, name in list(world.pg_names.items()):
        ranks = sorted(world.pg_group_ranks.get(group, {}))
        found[str(name)] = (str(group.group_desc), ranks)
    return found


def _calls() -> list[Call]:
    """Read all recorders of this build of torch; gloo and NCCL have one each."""
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(_distributed_c10d, name, None)
        if dump is not None:
            entries += json.loads(dump(True, False)).get("entries", [])
    return last_calls(calls_of(entries))


def calls_of(entries: Sequence[Mapping[str, Any]]) -> list[Call]:
    """Return the calls that entries of torch's flight recorder describe. Local.

    NCCL records the end of a coalesced set of calls only in an entry of its own, which follows them.

    Args:
        entries: Entries as torch dumps them, in the order of the calls.
    """
    calls: list[Call] = []
    coalesced: dict[tuple[Any, ...], Call] = {}
    for entry in reversed(entries):
        call = _call(entry)
        key = (call.group, entry["collective_seq_id"], entry["p2p_seq_id"])
        if call.operation == _COALESCED:
            coalesced[key] = call
        elif call.is_on_nccl and key in coalesced:
            call = replace(call, is_pending=coalesced[key].is_pending)
        calls.append(call)
    return calls[::-1]


def _call(entry: Mapping[str, Any]) -> Call:
    is_message = bool(entry.get("is_p2p"))
    return Call(
        str(entry["process_group"][0]),
        int(entry["p2p_seq_id" if is_message else "collective_seq_id"]),
        str(entry["profiling_name"]),
        [list(size) for size in entry["input_sizes"]],
        list(entry["input_dtypes"]),
        not entry["retired"] and entry["state"] != "completed",
        max(0.0, time.time() - entry["time_created_ns"] / 1e9),
        entry["timeout_ms"] / 1000,
    )


def last_calls(calls: Iterable[Call]) -> list[Call]:
    """Return the last `NUM_CALLS` calls of each group, and all pending ones, in their order."""
    kept: list[Call] = []
    count: dict[str, int] = {}
    for call in reversed(list(calls)):
        number = count[call.group] = count.get(call.group, 0) + 1
        if call.is_pending or number <= NUM_CALLS:
            kept.append(call)
    return kept[::-1]


def _build(value: Mapping[str, Any]) -> Snapshot:
    return Snapshot(
        value["rank"],
        _stack(value["main"]),
        [_stack(each) for each in value["others"]],
        [Call(**each) for each in value["calls"]],
        {name: (str(desc), [int(rank) for rank in ranks]) for name, (desc, ranks) in value["groups"].items()},
        value["meets_at"],
        value["busy"],
    )


def _stack(value: Mapping[str, Any]) -> Stack:
    frames: Sequence[Any] = value["frames"]
    return Stack(str(value["name"]), [(str(file), int(line), str(function)) for file, line, function in frames])


def _is_snapshot(value: Any) -> bool:
    try:
        snapshot = _build(value)
    except (AttributeError, KeyError, TypeError, ValueError):
        return False
    return (
        is_count(snapshot.rank)
        and all(is_count(each.number) and isinstance(each.seconds, float) for each in snapshot.calls)
        and all(isinstance(each.limit_seconds, float) for each in snapshot.calls)
        and (snapshot.meets_at is None or isinstance(snapshot.meets_at, str))
        and (snapshot.busy is None or isinstance(snapshot.busy, float))
    )
