"""`Schedule`, the base class of all schedules, and a class for programs written by hand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from lightning_d9d.errors import ScheduleError, reason
from lightning_d9d.legal import nearest
from lightning_d9d.schedule.actions import Action, Backward, BackwardInput, BackwardWeight, Forward
from lightning_d9d.schedule.check import check
from lightning_d9d.schedule.communications import add_messages
from lightning_d9d.schedule.program import Program, loop_placement, merge_backwards
from lightning_d9d.schedule.simulate import simulate

_SEARCHED = 1000
"""Range around an unsupported number of microbatches in which supported ones are searched."""

_Kind = TypeVar("_Kind", Forward, Backward, BackwardInput, BackwardWeight)


class Schedule(ABC):
    """The order in which pipeline ranks run forwards and backwards.

    A subclass defines `order`, and, if they differ from the defaults, `stages_per_rank`, `placement` and `takes`. It
    stores its arguments as attributes: ranks compare them to check that they have the same schedule.
    """

    stages_per_rank: int = 1

    @abstractmethod
    def order(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterable[Action]:
        """Return the actions of pipeline rank `rank`: `Forward`, and `Backward` or its two halves, or pairs.

        `program` adds messages between ranks; an order that has some must have all. `takes` is True for
        `num_microbatches`.
        """

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        """Return the rank of each stage; by default stages are placed round-robin over the ranks."""
        return loop_placement(num_ranks, self.stages_per_rank)

    def takes(self, num_ranks: int, num_microbatches: int) -> bool:
        """Return True if there is an order for this number of microbatches (at least 1) on `num_ranks` ranks."""
        return True

    def stages_of(self, rank: int, num_ranks: int) -> list[int]:
        """Return the stages on `rank`, ascending."""
        return [stage for stage, holder in enumerate(self.placement(num_ranks)) if holder == rank]

    def compute(self, num_ranks: int, num_microbatches: int) -> Program:
        """Return the program of compute actions only, unchecked.

        Raises:
            ScheduleError: The number of microbatches is not supported. The message names the nearest supported numbers.
        """
        self._check_numbers(num_ranks, num_microbatches)
        ranks = tuple(self._ordered(rank, num_ranks, num_microbatches) for rank in range(num_ranks))
        return Program(ranks, self.placement(num_ranks), num_microbatches)

    def _ordered(self, rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
        order = self.order(rank, num_ranks, num_microbatches)
        if not isinstance(order, Iterable):
            raise ScheduleError(
                f"{type(self).__name__}.order(rank={rank}, ...) returned {order!r}; return or yield actions"
            )
        actions = tuple(order)
        for action in actions:
            if not isinstance(action, Action):
                raise ScheduleError(
                    f"{type(self).__name__}.order(rank={rank}, ...) has {action!r}, which is not an action; make "
                    "one with Forward(stage, microbatch) and the like, or parse('0F1')"
                )
        return actions

    def program(self, num_ranks: int, num_microbatches: int) -> Program:
        """Return the checked program of `num_ranks` ranks for a batch of `num_microbatches`, with messages.

        Raises:
            ScheduleError: The number of microbatches is not supported, or `order` gives an illegal program.
        """
        program = self.compute(num_ranks, num_microbatches)
        if not program.has_messages:
            return add_messages(merge_backwards(program))
        simulate(program, rendezvous=True)  # refuses an illegal program, and one without a single order of messages
        return program

    def forward_only(self, num_ranks: int, num_microbatches: int) -> Program:
        """Return the forwards of a batch with messages, for validation and prediction, for any number of microbatches.

        Ranks prefer their later stages, so that microbatches leave the pipeline as early as possible.
        """
        _check_positive("num_ranks", num_ranks)
        _check_positive("num_microbatches", num_microbatches)
        placement = self.placement(num_ranks)
        return add_messages(Program(_deepest_first(placement, num_microbatches), placement, num_microbatches))

    def _check_numbers(self, num_ranks: int, num_microbatches: int) -> None:
        name = type(self).__name__
        _check_positive("num_ranks", num_ranks)
        _check_positive(f"{name}.stages_per_rank", self.stages_per_rank)
        if num_microbatches >= 1 and self.takes(num_ranks, num_microbatches):
            return
        searched = range(max(1, num_microbatches - _SEARCHED + 1), num_microbatches + _SEARCHED)
        legal = nearest(num_microbatches, (n for n in searched if self.takes(num_ranks, n)))
        raise ScheduleError(
            f"{name} on {num_ranks} pipeline ranks does not support {num_microbatches} microbatches; nearest "
            f"supported: {' or '.join(map(str, legal)) or 'none near'}"
        )


def _check_positive(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise ScheduleError(f"{name}={value!r} must be a whole number of at least 1")


def _deepest_first(placement: tuple[int, ...], num_microbatches: int) -> tuple[tuple[Forward, ...], ...]:
    """Return each rank's forwards if all take equally long and a rank runs the last of its stages that has an input."""
    num_stages = len(placement)
    ranks: list[list[Forward]] = [[] for _ in range(max(placement) + 1)]
    num_done = [0] * num_stages
    while num_done[-1] < num_microbatches:
        available = [num_microbatches, *num_done[:-1]]
        busy: set[int] = set()
        for stage in reversed(range(num_stages)):
            rank = placement[stage]
            if rank not in busy and num_done[stage] < available[stage]:
                busy.add(rank)
                ranks[rank].append(Forward(stage, num_done[stage]))
                num_done[stage] += 1
    return tuple(map(tuple, ranks))


class StageCursor:
    """A cursor that returns a stage's actions in the order of microbatches, for schedules written as loops."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.num_forwards = 0
        """Number of forwards handed out so far."""
        self.num_backwards = 0
        """Number of backwards handed out so far, full and input."""
        self.split: deque[int] = deque()
        """Microbatches whose input backward is handed out and whose weight backward is still due."""

    def next(self, kind: type[_Kind]) -> _Kind:
        """Return the next action of this kind; weight backwards follow the order of input backwards."""
        if kind is BackwardWeight:
            return kind(self.stage, self.split.popleft())
        if kind is Forward:
            self.num_forwards += 1
            return kind(self.stage, self.num_forwards - 1)
        if kind is BackwardInput:
            self.split.append(self.num_backwards)
        self.num_backwards += 1
        return kind(self.stage, self.num_backwards - 1)


class WrittenProgram(Schedule):
    """A program written by hand, for one number of ranks and of microbatches.

    Args:
        text: Text with a line for each pipeline rank, actions between spaces or commas: "0F0 0B0". The forwards define
            the ranks of stages and the number of microbatches. Sends and receives are added if there are none.
        path: Path of a file with such text, instead of `text`, such as a CSV file.
    """

    def __init__(self, text: str | None = None, path: str | Path | None = None) -> None:
        if (text is None) == (path is None):
            raise ScheduleError(f"WrittenProgram(text={text!r}, path={path!r}) needs exactly one of the two")
        self.text = text
        self.path = path
        self.written = Program.parse(_read(path) if path is not None else text or "")
        check(self.written)
        self.stages_per_rank = max(self.written.placement.count(rank) for rank in range(self.written.num_ranks))

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        """Return the written placement.

        Raises:
            ScheduleError: The program is written for another number of ranks.
        """
        if num_ranks != self.written.num_ranks:
            raise ScheduleError(
                f"the written program has {self.written.num_ranks} lines, but there are {num_ranks} pipeline ranks; "
                "write one line for each"
            )
        return self.written.placement

    def takes(self, num_ranks: int, num_microbatches: int) -> bool:
        """Return True for the written number of microbatches only."""
        return num_microbatches == self.written.num_microbatches

    def order(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
        """Return the written actions of the rank."""
        self.placement(num_ranks)
        return iter(self.written.ranks[rank])


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(
            f"WrittenProgram(path={str(path)!r}) cannot be read in {str(Path.cwd())!r}: {reason(error)}; give another "
            "path"
        ) from error
