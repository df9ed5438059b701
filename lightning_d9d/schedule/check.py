"""Checks a program statically: each rank's order is possible, and the ranks together leave nothing out.

`simulate` finds ranks that wait for one another in a circle.
"""

from __future__ import annotations

from collections import defaultdict

from lightning_d9d.errors import ScheduleError
from lightning_d9d.schedule.actions import (
    COMPUTE,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    ComputeAction,
    DataParallelAction,
    Forward,
    MessageAction,
    Overlapped,
    ReceiveBackward,
    ReceiveForward,
    ReduceGradients,
    Reshard,
    SendBackward,
    SendForward,
    Unshard,
)
from lightning_d9d.schedule.program import Program


def check(program: Program) -> None:
    """Refuse a program that leaves work out, repeats it, or uses results that do not exist yet.

    Every stage runs every microbatch forward once and, unless the program is forward-only, backward once: full, or
    input and then weight. An action comes after the actions of its rank whose results it uses. Messages may be absent.
    If there are some, each that crosses ranks is sent and received once, and both ranks have their messages in the same
    order. Data-parallel actions may be absent; if there are some, stages are unsharded when used, and gradients are
    reduced once, when complete.

    Raises:
        ScheduleError: An action is wrong. The message has the first such action, its rank, and the remedy.
    """
    if sorted(set(program.placement)) != list(range(program.num_ranks)):
        raise ScheduleError(
            f"stages are on ranks {program.placement} of {program.num_ranks}; every rank needs at least one stage"
        )
    walk = _Walk(program)
    for rank, actions in enumerate(program.ranks):
        for position, action in enumerate(actions):
            try:
                walk.take(rank, action)
            except _WrongError as wrong:
                raise ScheduleError(f"rank {rank}, action {position}: {action} {wrong}") from None
    walk.finish()


class _WrongError(Exception):
    """Raised because the current action is wrong, with the reason."""


class _Walk:
    """The record of all actions so far. A stage's actions are on one rank, so its marks follow that rank's order."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.placement = program.placement
        self.num_stages = program.num_stages
        self.num_microbatches = program.num_microbatches
        self.has_messages = program.has_messages
        self.done: dict[type, set[tuple[int, int]]] = {
            kind: set() for kind in (*COMPUTE, SendForward, ReceiveForward, SendBackward, ReceiveBackward)
        }
        self.has_gradient: set[tuple[int, int]] = set()
        """Each (stage, microbatch) whose gradient of the stage's input has been computed."""
        self.shards = any(isinstance(action, Unshard) for actions in program.ranks for action in actions)
        self.unsharded: set[int] = set()
        self.reduced: set[int] = set()
        self.num_weight_gradients: dict[int, int] = defaultdict(int)
        self.sent: dict[tuple[int, int], list[str]] = defaultdict(list)
        self.received: dict[tuple[int, int], list[str]] = defaultdict(list)
        """The messages as their sends, by (sender, receiver)."""

    def take(self, rank: int, action: Action) -> None:
        """Refuse `action`, or record it as done."""
        if isinstance(action, Overlapped):
            self.compute(rank, action.first)
            self.compute(rank, action.second)
            if _waits_for(action.second, action.first):
                raise _WrongError("is a pair whose second action waits for the first; run them one after the other")
        elif isinstance(action, COMPUTE):
            self.compute(rank, action)
        elif isinstance(action, Unshard | Reshard | ReduceGradients):
            self.place(rank, action.stage)
            self.data_parallel(action)
        else:
            self.message(rank, action)

    def place(self, rank: int, stage: int) -> None:
        if stage >= self.num_stages or self.placement[stage] != rank:
            where = f"on rank {self.placement[stage]}" if stage < self.num_stages else "never run forward"
            raise _WrongError(f"belongs to stage {stage}, which is {where}")

    def once(self, action: ComputeAction | MessageAction) -> tuple[int, int]:
        if action.microbatch >= self.num_microbatches:
            raise _WrongError(f"belongs to microbatch {action.microbatch}, but there are {self.num_microbatches}")
        key = (action.stage, action.microbatch)
        done = self.done[type(action)]
        if key in done:
            raise _WrongError("comes a second time; leave one out")
        done.add(key)
        return key

    def compute(self, rank: int, action: ComputeAction) -> None:
        self.place(rank, action.stage)
        stage, microbatch = key = self.once(action)
        if self.shards and stage not in self.unsharded:
            raise _WrongError(f"uses stage {stage} while it is sharded; put {Unshard(stage)} before it")
        if isinstance(action, Forward):
            self.needs_input(stage, microbatch)
        elif isinstance(action, BackwardWeight):
            self.needs(BackwardInput, key)
            self.num_weight_gradients[stage] += 1
        else:
            self.needs(Forward, key)
            self.needs_gradient(stage, microbatch)
            if key in self.has_gradient:
                raise _WrongError("is a second backward; use either B, or I and W")
            self.has_gradient.add(key)
            if isinstance(action, Backward):
                self.num_weight_gradients[stage] += 1

    def needs(self, kind: type[ComputeAction | MessageAction], key: tuple[int, int]) -> None:
        if key not in self.done[kind]:
            raise _WrongError(f"comes before {kind(*key)}; put it after that")

    def needs_input(self, stage: int, microbatch: int) -> None:
        if stage > 0:
            if self.placement[stage - 1] == self.placement[stage]:
                self.needs(Forward, (stage - 1, microbatch))
            elif self.has_messages:
                self.needs(ReceiveForward, (stage, microbatch))

    def needs_gradient(self, stage: int, microbatch: int) -> None:
        if stage < self.num_stages - 1:
            if self.placement[stage + 1] == self.placement[stage]:
                if (stage + 1, microbatch) not in self.has_gradient:
                    raise _WrongError(f"comes before the backward {stage + 1}B{microbatch}; put it after that")
            elif self.has_messages:
                self.needs(ReceiveBackward, (stage, microbatch))

    def message(self, rank: int, action: MessageAction) -> None:
        self.place(rank, action.stage)
        key = self.once(action)
        other = peer_stage(action)
        if not 0 <= other < self.num_stages or self.placement[other] == rank:
            where = "on the same rank" if 0 <= other < self.num_stages else "none"
            raise _WrongError(f"has no other rank as its peer: the stage at the other end is {where}; leave it out")
        if isinstance(action, SendForward):
            self.needs(Forward, key)
        elif isinstance(action, SendBackward) and key not in self.has_gradient:
            raise _WrongError(f"comes before the backward {action.stage}B{action.microbatch}; put it after that")
        if isinstance(action, SendForward | SendBackward):
            self.sent[rank, self.placement[other]].append(str(action))
        else:
            self.received[self.placement[other], rank].append(str(matching(action)))

    def data_parallel(self, action: DataParallelAction) -> None:
        stage = action.stage
        if isinstance(action, ReduceGradients):
            if stage in self.reduced:
                raise _WrongError("comes a second time; leave one out")
            if self.num_weight_gradients[stage] < self.num_microbatches:
                raise _WrongError("comes before the stage's last weight gradient; put it after that")
            self.reduced.add(stage)
        elif isinstance(action, Unshard):
            if stage in self.unsharded:
                raise _WrongError("gathers a stage that is already gathered; leave it out")
            self.unsharded.add(stage)
        elif stage not in self.unsharded:
            raise _WrongError(f"frees a stage that is not gathered; put {Unshard(stage)} before it")
        else:
            self.unsharded.remove(stage)

    def finish(self) -> None:
        """Refuse a program that leaves actions out."""
        forward_only = self.program.is_forward_only
        for stage in range(self.num_stages):
            rank = self.placement[stage]
            for microbatch in range(self.num_microbatches):
                for action in self.missing(stage, microbatch, forward_only):
                    raise ScheduleError(
                        f"rank {rank}: {action} is missing; every microbatch runs through every stage once"
                    )
            if self.reduced and stage not in self.reduced:
                raise ScheduleError(f"rank {rank}: {ReduceGradients(stage)} is missing; reduce all stages or none")
        for (sender, receiver), messages in self.sent.items():
            for ours, theirs in zip(messages, self.received[sender, receiver], strict=True):
                if ours != theirs:
                    raise ScheduleError(
                        f"rank {sender} sends {ours} when rank {receiver} receives {theirs}; put the sends and "
                        "receives of both ranks in the same order"
                    )

    def missing(self, stage: int, microbatch: int, forward_only: bool) -> list[ComputeAction | MessageAction]:
        key = (stage, microbatch)
        wanted: list[ComputeAction | MessageAction] = [Forward(*key)]
        if not forward_only:
            split = key in self.done[BackwardInput]
            wanted += [BackwardInput(*key), BackwardWeight(*key)] if split else [Backward(*key)]
        if self.has_messages:  # the actions that use a receive have asked for it
            if stage > 0 and self.placement[stage - 1] != self.placement[stage]:
                wanted.append(SendForward(stage - 1, microbatch))
            if not forward_only and stage + 1 < self.num_stages and self.placement[stage + 1] != self.placement[stage]:
                wanted.append(SendBackward(stage + 1, microbatch))
        return [action for action in wanted if (action.stage, action.microbatch) not in self.done[type(action)]]


def _waits_for(action: ComputeAction, other: ComputeAction) -> bool:
    """Return whether `action` uses a result of `other` on the same rank."""
    if action.microbatch != other.microbatch:
        return False
    if isinstance(action, Forward):
        return isinstance(other, Forward) and other.stage == action.stage - 1
    if isinstance(action, BackwardWeight):
        return isinstance(other, BackwardInput) and other.stage == action.stage
    if isinstance(other, Forward):
        return other.stage == action.stage
    return not isinstance(other, BackwardWeight) and other.stage == action.stage + 1


def peer_stage(action: MessageAction) -> int:
    """Return the stage at the other end of a message; it may not exist."""
    return action.stage + (1 if isinstance(action, SendForward | ReceiveBackward) else -1)


def matching(action: MessageAction) -> MessageAction:
    """Return the receive of a send, or the send of a receive."""
    return _MATCHING[type(action)](peer_stage(action), action.microbatch)


_MATCHING: dict[type, type[MessageAction]] = {
    SendForward: ReceiveForward,
    ReceiveForward: SendForward,
    SendBackward: ReceiveBackward,
    ReceiveBackward: SendBackward,
}
