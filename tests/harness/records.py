"""The collectives that each rank issued (recorder.py writes them), and whether they fit together.

They fit if

- per group, all its ranks issue the same sequence of (operator, dtype, shape), and in an all-to-all each rank sends to
  each other as much as that one expects;
- every send has its receive, pair by pair in order, with the same dtype and shape;
- ranks that share several groups issue their collectives in the same order between these groups. Only calls of the main
  thread and of autograd's threads count here: another Python thread has no fixed place among them.
"""

import contextlib
import math
import pickle
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, zip_longest
from pathlib import Path

_MAX_PROBLEMS = 8

KINDS = {
    "allgather_base": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall_base": "all_to_all",
    "send": "point_to_point",
}
"""Operators that send, by kind of collective."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One call of one rank."""

    group: str
    ranks: tuple[int, ...]
    """The global ranks of the group."""
    operator: str
    tensors: str = ""
    """What all ranks must agree on, such as `float32[4, 2]`."""
    sends: tuple[int, ...] = ()
    """All-to-all: rows (elements, for lists of tensors) for each rank of the group."""
    receives: tuple[int, ...] = ()
    peer: int | None = None
    """Send and receive: the other global rank; None where any will do. Broadcast and the like: the root."""
    tag: int = 0
    ordered: bool = True
    """Issued by the main thread or by autograd."""

    @property
    def is_message(self) -> bool:
        return self.operator in ("send", "receive")

    def __str__(self) -> str:
        words = [self.operator, self.tensors]
        if self.is_message:
            words.append("to" if self.operator == "send" else "from")
            words.append("any rank" if self.peer is None else f"rank {self.peer}")
            words.append(f"with tag {self.tag}" if self.tag else "")
        elif self.peer is not None:
            words.append(f"with root {self.peer}")
        if self.sends:
            words.append(f"sends {list(self.sends)} receives {list(self.receives)}")
        return " ".join(word for word in words if word)


def read(path: Path) -> list[Entry]:
    """The record of one rank; empty if it never started. An entry cut off by the end of its rank is left out."""
    entries: list[Entry] = []
    if path.exists():
        with open(path, "rb") as file, contextlib.suppress(EOFError, pickle.UnpicklingError):
            while True:
                entries.append(pickle.load(file))
    return entries


def mismatches(records: Sequence[Sequence[Entry]]) -> list[str]:
    """What does not fit together in the records of all ranks, in rank order; empty for a right program."""
    groups = dict.fromkeys((entry.group, entry.ranks) for record in records for entry in record)
    problems = []
    for name, ranks in groups:
        inside = {rank: [e for e in records[rank] if (e.group, e.ranks) == (name, ranks)] for rank in ranks}
        problems += _sequence_problems(_title(name, ranks), inside)
        problems += _message_problems(_title(name, ranks), inside)
    problems = problems or _order_problems(records)
    head = "the ranks issued collectives that do not fit together:"
    return [head, *(f"  {problem}" for problem in problems[:_MAX_PROBLEMS])] if problems else []


def _sequence_problems(title: str, inside: Mapping[int, Sequence[Entry]]) -> list[str]:
    """The first position at which the ranks of a group differ."""
    collectives = [[entry for entry in record if not entry.is_message] for record in inside.values()]
    for position, row in enumerate(zip_longest(*collectives)):
        if not _agree(row):
            issued = "; ".join(
                f"rank {rank}: {entry or 'nothing more'}" for rank, entry in zip(inside, row, strict=True)
            )
            return [f"{title}, collective {position}: {issued}"]
    return []


def _agree(row: Sequence[Entry | None]) -> bool:
    if any(entry is None for entry in row):
        return False
    entries = [entry for entry in row if entry]
    if len({(entry.operator, entry.tensors, entry.peer) for entry in entries}) > 1:
        return False
    return all(
        sender.sends[j] == receiver.receives[i]
        for i, sender in enumerate(entries)
        for j, receiver in enumerate(entries)
        if sender.sends
    )


def _message_problems(title: str, inside: Mapping[int, Sequence[Entry]]) -> list[str]:
    """Sends and receives of each pair and tag, matched in order; receives from any rank take what is then left."""
    sent: dict[tuple[int, int, int], list[Entry]] = defaultdict(list)
    received: dict[tuple[int, int, int], list[Entry]] = defaultdict(list)
    from_any: dict[int, int] = defaultdict(int)
    for rank, record in inside.items():
        for entry in record:
            if entry.is_message and entry.peer is None:
                from_any[rank] += 1
            elif entry.operator == "send" and entry.peer is not None:
                sent[rank, entry.peer, entry.tag].append(entry)
            elif entry.operator == "receive" and entry.peer is not None:
                received[entry.peer, rank, entry.tag].append(entry)
    problems = []
    for pair in dict.fromkeys([*sent, *received]):
        source, target, _ = pair
        for position, (send, receive) in enumerate(zip_longest(sent[pair], received[pair])):
            if send and not receive and from_any[target]:
                from_any[target] -= 1
            elif not send or not receive or send.tensors != receive.tensors:
                problems.append(
                    f"{title}, message {position} of rank {source} to rank {target}: "
                    f"rank {source}: {send or 'no send'}; rank {target}: {receive or 'no receive'}"
                )
                break
    problems += [
        f"{title}: rank {rank}: {num} receives from any rank lack a send" for rank, num in from_any.items() if num
    ]
    return problems


def _order_problems(records: Sequence[Sequence[Entry]]) -> list[str]:
    """The first position at which two ranks differ in the order between the groups they share."""
    problems = []
    for one, other in combinations(range(len(records)), 2):
        shared = [
            [e for e in records[rank] if e.ordered and not e.is_message and one in e.ranks and other in e.ranks]
            for rank in (one, other)
        ]
        for position, (ours, theirs) in enumerate(zip_longest(*shared)):
            if not ours or not theirs or ours.group != theirs.group:
                issued = "; ".join(
                    f"rank {rank}: " + (f"{entry} on {_title(entry.group, entry.ranks)}" if entry else "nothing more")
                    for rank, entry in ((one, ours), (other, theirs))
                )
                problems.append(f"order between groups, collective {position} of ranks {one} and {other}: {issued}")
                break
    return problems


def _title(name: str, ranks: Iterable[int]) -> str:
    return f"group {name} of ranks {list(ranks)}"


def sent_bytes(entry: Entry, rank: int) -> float:
    """The bytes that this rank sends in one call, in a ring."""
    matched = re.fullmatch(r"(?:bool|[a-z]+(\d+)\w*)\[(.*)\]", entry.tensors)
    assert matched is not None, entry
    width = int(matched[1] or 8) // 8
    dims = matched[2].split(", ") if matched[2] else []
    others = (len(entry.ranks) - 1) / len(entry.ranks)
    if entry.operator == "send":
        return width * math.prod(map(int, dims))
    if entry.operator == "alltoall_base":
        rows = sum(entry.sends) - entry.sends[entry.ranks.index(rank)]
        return rows * width * math.prod(map(int, dims[1:]))
    return width * math.prod(map(int, dims)) * others * (2 if entry.operator == "allreduce" else 1)
