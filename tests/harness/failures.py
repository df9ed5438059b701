"""Words for what went wrong on the ranks."""

import re
import signal
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from tests.harness.messages import Died, Passed, Raised, Result, Skipped, Stuck

Frame = tuple[str, int, str]
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_CONTEXT = str(Path(__file__).with_name("ranks.py"))  # its collectives only pass on
_MAX_LINE = 200


def describe(results: Sequence[Result]) -> str:
    """The first failing rank in full, one line for each kind of the others, the stacks of those that are stuck.

    A dead rank says nothing: the traceback of the first rank that raised tells which message of it was missing.
    """
    first = _first_failing(results)
    origin = results[first]
    lines = [f"rank {first} of {len(results)} {'raised ' if isinstance(origin, Raised) else ''}{_line(origin)}"]
    if isinstance(origin, Raised):
        lines.append(origin.traceback.rstrip())
    others: dict[str, list[int]] = {}
    for rank, result in enumerate(results):
        if rank != first:
            line = _line(result)
            if isinstance(result, Raised) and line == _line(origin):
                line = f"same {result.type_name}"
            others.setdefault(line, []).append(rank)
    lines += [f"{name_ranks(ranks)}: {line}" for line, ranks in others.items()]
    if isinstance(origin, Died) and (raised := [result for result in results if isinstance(result, Raised)]):
        lines.append(min(raised, key=lambda result: result.at_seconds).traceback.rstrip())
    for rank, result in enumerate(results):
        if isinstance(result, Stuck):
            lines += [f"stack of rank {rank}, innermost last:"]
            lines += [f'  File "{path}", line {line} in {function}' for path, line, function in reversed(result.frames)]
    return "\n".join(lines)


def name_ranks(ranks: list[int]) -> str:
    """`rank 2`, `ranks 0, 3-5`."""
    runs = []
    for _, run in groupby(enumerate(sorted(ranks)), key=lambda item: item[1] - item[0]):
        members = [rank for _, rank in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(runs)}"


def main_thread_frames(dump: str, main_thread: int) -> list[Frame]:
    """The frames of one thread in faulthandler's dump, innermost first, without those of the worker itself."""
    frames: list[Frame] = []
    inside = False
    for line in dump.splitlines():
        if header := re.match(r"(?:Current thread|Thread) 0x([0-9a-f]+)", line):
            inside = int(header[1], 16) == main_thread
        elif inside and (match := _FRAME.match(line)):
            if match[1] == str(Path(__file__).with_name("worker.py")):
                break
            frames.append((match[1], int(match[2]), match[3]))
    return frames


def _first_failing(results: Sequence[Result]) -> int:
    """A death comes first (its peers raise before it is noticed), then exceptions by time, then the rest."""

    def order(rank: int) -> tuple[int, float]:
        result = results[rank]
        match result:
            case Died():
                return 0, result.at_seconds
            case Raised():
                return 1, result.at_seconds
            case Stuck():
                return 2, rank
            case _:
                return 3, rank

    return min(range(len(results)), key=order)


def _line(result: Result) -> str:
    match result:
        case Died(exit_code=code) if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        case Died(exit_code=code):
            return f"exited with code {code}"
        case Raised(type_name=name, text=text):
            return f"{name}: {' '.join(text.split())}"[:_MAX_LINE]
        case Stuck(waited=waited, frames=frames):
            return f"is still in {_place(frames)} {waited}"
        case Skipped(reason=reason):
            return f"skipped: {reason}"
        case Passed():
            return "finished"
        case _:
            return "finished and cleaned up"


def _place(frames: list[Frame]) -> str:
    """The call of torch.distributed that the rank is in (else the innermost function), and the line that made it."""
    if not frames:
        return "native code (no Python stack)"
    name = frames[0][2]
    for path, _, function in frames:
        if "/torch/" not in path:
            break
        if "/torch/distributed/" in path and not path.endswith("c10d_logger.py"):
            name = function
    caller = next((frame for frame in frames if "/torch/" not in frame[0] and frame[0] != _CONTEXT), frames[0])
    return f"{name} ({Path(caller[0]).name}:{caller[1]})"
