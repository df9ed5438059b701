"""The text of a report: which rank did not reach which collective, and where all ranks are. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_d9d.coordination.snapshots import Call, Snapshot, Stack

_DIFFER_BY_RANK = ("all_to_all", "alltoall", "gather", "scatter", "send", "recv", "broadcast", "coalesced")
"""Words in names of operations whose inputs may differ between ranks."""
_GATHERS_EQUAL = ("all_gather", "reduce_scatter")


_LONGEST_NAME = 48
_BUSY = 0.05
"""A thread that computes gets more of a processor than this share, however many others do."""


@dataclass(frozen=True)
class Silent:
    """A rank that has not answered, and the known facts about it."""

    reason: str
    stacks: str = ""
    """Stacks of its threads, written by C code that does not need the interpreter."""


@dataclass(frozen=True)
class Known:
    """All known facts about the ranks of a job."""

    names: Sequence[str]
    """Host and process of each rank."""
    snapshots: Mapping[int, Snapshot]
    silent: Mapping[int, Silent]


@dataclass
class _Wait:
    """A collective in which some ranks of a group wait."""

    call: Call
    group: str
    """The group's name in the mesh."""
    ranks: list[int]
    waiting: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.call}, number {self.call.number} of group {_short(self.group)} ({ranks_in_words(self.ranks)}), in "
            f"which {ranks_in_words(self.waiting)} {'waits' if len(self.waiting) == 1 else 'wait'} since "
            f"{self.call.seconds:.1f} s"
        )


def _short(name: str) -> str:
    """Return the name of a group in the mesh, shortened if it serves many axes."""
    return repr(name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}...")


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return ranks as text: "rank 3" or "ranks 0 to 2, 5"."""
    numbers = sorted(ranks)
    parts, index = list[str](), 0
    while index < len(numbers):
        end = index
        while end + 1 < len(numbers) and numbers[end + 1] == numbers[end] + 1:
            end += 1
        step = end if end > index + 1 else index
        parts.append(f"{numbers[index]} to {numbers[end]}" if step > index else str(numbers[index]))
        index = step + 1
    return f"rank{'s' * (len(numbers) != 1)} {', '.join(parts)}"


def diagnose(known: Known) -> list[str]:
    """Return lines that name the rank for which the others wait, the most likely cause first.

    Args:
        known: The answers of all ranks.
    """
    waits = _waits(known)
    lines = _mismatches(known, waits)
    is_waiting = {rank for wait in waits if wait.missing for rank in wait.waiting}
    absent = {rank for wait in waits for rank in wait.missing}
    roots = sorted((absent - is_waiting) | known.silent.keys())
    for rank in roots:
        missed = [wait for wait in waits if rank in wait.missing]
        oldest = max(missed, key=lambda wait: wait.call.seconds, default=None)
        missing = "" if oldest is None else f" did not come to {oldest}"
        lines.append(f"{_named(known, rank)}{missing}: {_where(known, rank)}")
    if not lines and is_waiting:
        oldest_first = sorted(waits, key=lambda wait: -wait.call.seconds)
        lines += [f"{ranks_in_words(wait.missing)} did not come to {wait}" for wait in oldest_first if wait.missing]
        lines.append("ranks wait for each other: one left a collective out, or they call them in different orders")
        lines += [f"{_named(known, rank)}: {_where(known, rank)}" for rank in sorted(is_waiting)]
    if not lines:
        lines += _outside(known)
    return lines or ["no rank waits for another one now"]


def _outside(known: Known) -> list[str]:
    """Return lines for a wait outside of known collectives: messages on gloo, or the end of an epoch."""
    waiting = [rank for rank, each in known.snapshots.items() if each.waits_for_ranks]
    if not waiting:
        return []
    pending = ranks_in_words(waiting)
    lines = [
        f"{_named(known, rank)} waits for no other rank: {_where(known, rank)}; {pending} "
        f"{'waits' if len(waiting) == 1 else 'wait'}"
        for rank, each in sorted(known.snapshots.items())
        if not each.waits_for_ranks
    ]
    return lines or [f"all ranks wait in a collective or for a message: {pending}"]


def _named(known: Known, rank: int) -> str:
    return f"rank {rank} ({known.names[rank]})"


def _where(known: Known, rank: int) -> str:
    if rank in known.silent:
        return known.silent[rank].reason
    snapshot = known.snapshots[rank]
    if snapshot.meets_at is not None:
        return f"it waits for the others at the end of an {snapshot.meets_at}, {snapshot.place}"
    busy = "" if snapshot.busy is None else f", its main thread {'computes' if snapshot.busy > _BUSY else 'waits'}"
    return f"it is {snapshot.place}{busy}"


def _waits(known: Known) -> list[_Wait]:
    """Return every pending collective, the oldest of each group and rank."""
    waits: dict[tuple[str, tuple[int, ...], int], _Wait] = {}
    for rank, snapshot in sorted(known.snapshots.items()):
        pending: dict[str, Call] = {}
        for call in snapshot.calls:
            if call.is_pending and call.number and call.group in snapshot.groups:
                pending.setdefault(call.group, call)
        for call in pending.values():
            name, ranks = snapshot.groups[call.group]
            key = (call.group, tuple(ranks), call.number)
            wait = waits.setdefault(key, _Wait(call, name, ranks))
            wait.waiting.append(rank)
            if call.seconds > wait.call.seconds:
                wait.call = call
    for wait in waits.values():
        wait.missing = [rank for rank in wait.ranks if rank not in wait.waiting and not _came(known, rank, wait)]
    return list(waits.values())


def _came(known: Known, rank: int, wait: _Wait) -> bool:
    snapshot = known.snapshots.get(rank)
    return snapshot is not None and any(
        call.group == wait.call.group and call.number >= wait.call.number for call in snapshot.calls
    )


def _mismatches(known: Known, waits: Sequence[_Wait]) -> list[str]:
    """Return lines about collectives with the same number that ranks of the group have called differently."""
    lines = []
    for wait in waits:
        calls: dict[str, list[int]] = {}
        for rank in wait.ranks:
            snapshot = known.snapshots.get(rank)
            for call in () if snapshot is None else snapshot.calls:
                if (call.group, call.number) == (wait.call.group, wait.call.number):
                    calls.setdefault(_compared(call), []).append(rank)
        if len(calls) > 1:
            each = "; ".join(f"{ranks_in_words(ranks)} {call}" for call, ranks in calls.items())
            lines.append(
                f"number {wait.call.number} of group {_short(wait.group)} ({ranks_in_words(wait.ranks)}) is not the "
                f"same on all ranks: {each}"
            )
            lines += [f"{_named(known, rank)}: {_where(known, rank)}" for rank in wait.ranks if rank in known.snapshots]
    return lines


def _compared(call: Call) -> str:
    """Return as text the properties that must be equal on all ranks."""
    name = call.operation
    differs = any(word in name for word in _DIFFER_BY_RANK) and not any(word in name for word in _GATHERS_EQUAL)
    return name if differs else str(call)


def report_text(known: Known, reason: str, lines: Sequence[str], moment: str) -> str:
    """Return the whole report.

    Args:
        known: The answers of all ranks.
        reason: The reason for the report.
        lines: The lines of `diagnose`.
        moment: The date and time.
    """
    parts = [f"Where the ranks are, {moment}\nWritten because {reason}\n", "\n".join(lines), "\nCollectives\n"]
    parts += _table(known)
    parts.append("\nStacks of all threads, the innermost frame first")
    for rank, name in enumerate(known.names):
        parts.append(f"\nrank {rank} ({name}): {_where(known, rank)}")
        snapshot = known.snapshots.get(rank)
        if snapshot is None:
            parts.append(known.silent[rank].stacks or "  (no stacks)")
        else:
            parts += [_stack_text(each) for each in (snapshot.main, *snapshot.others)]
    return "\n".join(parts) + "\n"


def _table(known: Known) -> list[str]:
    """Return for each group one line a rank: the number of its last collective, and pending ones."""
    rows = []
    groups = sorted(
        {(name, tuple(ranks), desc) for s in known.snapshots.values() for name, (desc, ranks) in s.groups.items()}
    )
    for group, ranks, name in groups:
        lines = []
        for rank in ranks:
            snapshot = known.snapshots.get(rank)
            calls = [] if snapshot is None else [call for call in snapshot.calls if call.group == group]
            if calls:
                state = f"under way since {calls[-1].seconds:.1f} s" if calls[-1].is_pending else "ended"
                lines.append(f"  rank {rank}: number {calls[-1].number}, {calls[-1]}, {state}")
            else:
                lines.append(f"  rank {rank}: {'no answer' if snapshot is None else 'none'}")
        if not all(line.endswith(": none") for line in lines):
            rows += [f"group {_short(name)}, torch's {group!r}, {ranks_in_words(ranks)}", *lines]
    return rows


def _stack_text(stack: Stack) -> str:
    return "\n".join([f"  thread {stack.name}", *(f"    {file}:{line} in {name}" for file, line, name in stack.frames)])
