"""A program: the actions of every pipeline rank in order, and the ranks of the stages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_d9d.errors import ScheduleError
from lightning_d9d.schedule.actions import (
    COMPUTE,
    MESSAGES,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Overlapped,
    compute_parts,
    parse,
)


@dataclass(frozen=True, slots=True, repr=False)
class Program:
    """The actions of all pipeline ranks for one batch. It is immutable: passes make new programs.

    `str(program)` has one line for each rank, and `parse` reads it back.
    """

    ranks: tuple[tuple[Action, ...], ...]
    """The actions of each rank, in the order in which it runs them."""
    placement: tuple[int, ...]
    """The rank that holds each stage."""
    num_microbatches: int

    @classmethod
    def of(cls, ranks: Iterable[Iterable[Action]]) -> Program:
        """Make a program of these actions. Forwards define the ranks of stages and the number of microbatches.

        Raises:
            ScheduleError: A stage is on two ranks, or a stage below the last has no forward.
        """
        orders = tuple(tuple(actions) for actions in ranks)
        holders: dict[int, int] = {}
        num_microbatches = 0
        for rank, actions in enumerate(orders):
            for part in (part for action in actions for part in compute_parts(action) if isinstance(part, Forward)):
                num_microbatches = max(num_microbatches, part.microbatch + 1)
                if holders.setdefault(part.stage, rank) != rank:
                    raise ScheduleError(
                        f"rank {rank} runs {part}, but stage {part.stage} is on rank {holders[part.stage]}; "
                        "a stage's actions belong on one rank"
                    )
        for stage in range(max(holders, default=0) + 1):
            if stage not in holders:
                raise ScheduleError(f"no rank runs a forward of stage {stage}; stages count from 0 without gaps")
        return cls(orders, tuple(holders[stage] for stage in sorted(holders)), num_microbatches)

    @classmethod
    def parse(cls, text: str) -> Program:
        """Read `str(program)` or `program.csv()`: a line for each rank, actions between spaces or commas.

        Empty cells (idle slots), empty lines and text after a `#` are skipped.

        Raises:
            ScheduleError: A word is not an action. The message names line and text.
        """
        ranks = []
        for number, line in enumerate(text.splitlines(), 1):
            cells = [cell for cell in re.split(r"[,\s]+", line.partition("#")[0]) if cell]
            try:
                actions = [parse(cell) for cell in cells]
            except ScheduleError as error:
                raise ScheduleError(f"line {number}: {error}") from None
            if actions:
                ranks.append(actions)
        return cls.of(ranks)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in self.ranks)

    def csv(self) -> str:
        """Return the program as comma-separated values, one row for each rank."""
        return "".join(",".join(map(str, actions)) + "\n" for actions in self.ranks)

    def __repr__(self) -> str:
        size = f"{self.num_ranks} ranks, {self.num_stages} stages, {self.num_microbatches} microbatches"
        return f"<Program of {size}>"

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self.placement)

    @property
    def has_messages(self) -> bool:
        """True if the program has sends and receives. Without them, each rank is assumed to see others' results."""
        return any(isinstance(action, MESSAGES) for actions in self.ranks for action in actions)

    @property
    def is_forward_only(self) -> bool:
        """True if nothing runs backward: a program for validation and prediction."""
        return not any(_runs_backward(action) for actions in self.ranks for action in actions)


def _runs_backward(action: Action) -> bool:
    if isinstance(action, Overlapped):
        return not (isinstance(action.first, Forward) and isinstance(action.second, Forward))
    return isinstance(action, COMPUTE) and not isinstance(action, Forward)


def loop_placement(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Place stages round-robin over the ranks: with 2 ranks and 2 stages a rank 0, 1, 0, 1."""
    return tuple(stage % num_ranks for stage in range(num_ranks * stages_per_rank))


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Place two stages on each rank, down the ranks and up again: 0, 1, 1, 0 with 2.

    Rank 0 then has the first and the last stage.
    """
    return (*range(num_ranks), *reversed(range(num_ranks)))


def merge_backwards(program: Program) -> Program:
    """Merge each input backward of stage 0 and a weight backward directly after it into one full backward.

    One backward is cheaper than its two halves. On stage 0 no other rank waits for it. On other stages it would delay
    the gradient of the previous stage by a weight backward. The schedule split them to avoid this delay, so they stay
    split.
    """
    return Program(
        tuple(tuple(_merged(actions)) for actions in program.ranks), program.placement, program.num_microbatches
    )


def _merged(actions: tuple[Action, ...]) -> list[Action]:
    merged: list[Action] = []
    for action in actions:
        if isinstance(action, BackwardWeight) and action.stage == 0 and merged:
            input_backward = BackwardInput(0, action.microbatch)
            if merged[-1] == input_backward:
                merged[-1] = Backward(0, action.microbatch)
                continue
        merged.append(action)
    return merged
