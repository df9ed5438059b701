"""A program: what every pipeline rank runs, in its order, and where the stages are."""

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
    """The actions of all pipeline ranks for one batch. A value: passes make new ones.

    `str(program)` has one line a rank, and `parse` reads it back.
    """

    ranks: tuple[tuple[Action, ...], ...]
    """For each rank its actions, in the order in which it runs them."""
    placement: tuple[int, ...]
    """For each stage the rank that holds it."""
    num_microbatches: int

    @classmethod
    def of(cls, ranks: Iterable[Iterable[Action]]) -> Program:
        """A program of these actions; stages are where their forwards are, microbatches as many as there are forwards.

        Raises:
            ScheduleError: A stage is on two ranks, or one between has no forward.
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
        """Read `str(program)` or `program.csv()`: a line a rank, actions between spaces or commas.

        Empty cells (idle slots), empty lines and what follows a `#` are left out.

        Raises:
            ScheduleError: Something is no action. The message names line and text.
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
        """The program as comma-separated values, a row a rank."""
        return "".join(",".join(map(str, actions)) + "\n" for actions in self.ranks)

    def __repr__(self) -> str:
        size = f"{self.num_ranks} ranks, {self.num_stages} stages, {self.num_microbatches} microbatches"
        return f"<Program of {size}>"

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """Stages over all ranks."""
        return len(self.placement)

    @property
    def has_messages(self) -> bool:
        """Whether sends and receives are written down. Without, a rank is taken to see what others computed."""
        return any(isinstance(action, MESSAGES) for actions in self.ranks for action in actions)

    @property
    def is_forward_only(self) -> bool:
        """Whether nothing runs backward: a program for validation and prediction."""
        return not any(_runs_backward(action) for actions in self.ranks for action in actions)


def _runs_backward(action: Action) -> bool:
    if isinstance(action, Overlapped):
        return not (isinstance(action.first, Forward) and isinstance(action.second, Forward))
    return isinstance(action, COMPUTE) and not isinstance(action, Forward)


def loop_placement(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Stages round and round over the ranks: with 2 ranks and 2 stages a rank 0, 1, 0, 1."""
    return tuple(stage % num_ranks for stage in range(num_ranks * stages_per_rank))


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Two stages a rank, down the ranks and up again: with 2 ranks 0, 1, 1, 0. Rank 0 has first and last stage."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


def merge_backwards(program: Program) -> Program:
    """Make an input backward of stage 0 that its weight backward follows directly one full backward.

    One backward is cheaper than its two halves. On stage 0 it delays nobody. On other stages the stage before would
    get its gradient later by a weight backward, which is what the schedule split them for, so they stay.
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
