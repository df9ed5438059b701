"""Passes that add communication: messages between stages, and the collectives of data parallelism.

[Note: one global order] Messages are written into a program in one order over all ranks. It is the order in which they
would leave if links took no time. Every rank has its part of that order. Ranks may run their messages one at a time,
each message holding both ends (NCCL on one stream). They never wait in a circle: the first message of the order that
has not run yet is the next one of both its ranks. The computation before such a message began before the message left,
and depends only on earlier messages of the order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator

from lightning_d9d.errors import ScheduleError
from lightning_d9d.schedule.actions import (
    Action,
    BackwardWeight,
    Forward,
    MessageAction,
    ReduceGradients,
    Reshard,
    SendBackward,
    SendForward,
    Unshard,
    compute_parts,
)
from lightning_d9d.schedule.check import matching, peer_stage
from lightning_d9d.schedule.program import Program
from lightning_d9d.schedule.simulate import Costs, Span, simulate

COSTS = Costs(forward=20, backward_input=32, backward_weight=13)
"""Rough costs of a transformer: attention and elementwise operations have only an input backward. Measured on layers of
Qwen3-MoE. Whole numbers keep times exact.
"""


def add_messages(program: Program) -> Program:
    """Add the sends and receives that a program of compute actions needs.

    A send directly follows the action that computes its content. Its receive follows the action that the receiving rank
    runs when the message leaves, if actions take as long as `COSTS` says. So if one of the two must wait, it is the
    message. On GPUs a waiting receive slows overlapping compute more, and its buffer would be allocated earlier.

    Raises:
        ScheduleError: The program is illegal, deadlocks, or has messages.
    """
    if program.has_messages:
        raise ScheduleError("the program already has sends and receives; pass a program of compute actions only")
    spans = _by_rank(program)
    behind: list[list[tuple[int, MessageAction]]] = [[] for _ in program.ranks]
    """The messages of each rank, each with the position of the compute action that it follows (-1: none)."""
    for time, rank, position, send in _sends(program, spans):
        behind[rank].append((position, send))
        receiver = program.placement[peer_stage(send)]
        behind[receiver].append((_running(spans[receiver], time), matching(send)))
    ranks = (tuple(_woven(*rank)) for rank in zip(program.ranks, behind, strict=True))
    return Program(tuple(ranks), program.placement, program.num_microbatches)


def _by_rank(program: Program) -> list[list[Span]]:
    """Return when actions run if links take no time. Every action takes some, so dependent actions never coincide."""
    spans = iter(simulate(program, COSTS).spans)
    return [[next(spans) for _ in actions] for actions in program.ranks]


def _sends(program: Program, spans: list[list[Span]]) -> list[tuple[float, int, int, MessageAction]]:
    """Return the global order: time, rank, position of the action that computes the content, and send."""
    order: list[tuple[float, int, int, MessageAction]] = []
    for rank, of_rank in enumerate(spans):
        for position, span in enumerate(of_rank):
            for part in compute_parts(span.action):
                if isinstance(part, BackwardWeight):
                    continue
                send = (SendForward if isinstance(part, Forward) else SendBackward)(part.stage, part.microbatch)
                receiver = peer_stage(send)
                if 0 <= receiver < program.num_stages and program.placement[receiver] != rank:
                    order.append((span.end, rank, position, send))
    return sorted(order, key=lambda sent: sent[:3])


def _running(spans: list[Span], time: float) -> int:
    """Return the position of the action that runs at `time` or ends then, else of the last one (-1: none)."""
    position = bisect_left(spans, time, key=lambda span: span.end)
    return position if position < len(spans) and spans[position].start < time else position - 1


def _woven(actions: tuple[Action, ...], messages: list[tuple[int, MessageAction]]) -> Iterator[Action]:
    """Return `actions` with each message inserted after its position."""
    waiting = deque(messages)
    for position in range(-1, len(actions)):
        if position >= 0:
            yield actions[position]
        while waiting and waiting[0][0] == position:
            yield waiting.popleft()[1]


def add_data_parallel(program: Program) -> Program:
    """Mark when a rank gathers, frees and reduces its stages; the executor ignores marks of unsharded stages.

    A stage is gathered while the stage used before it runs for the first time; the first two are gathered at the start.
    It is freed after its last use. Its gradients are reduced as soon as the last microbatch has added its own. The
    collectives of a rank have one order. It is the same on all its data-parallel replicas, which run the same program.
    """
    return Program(
        tuple(tuple(_with_collectives(actions)) for actions in program.ranks),
        program.placement,
        program.num_microbatches,
    )


def _with_collectives(actions: tuple[Action, ...]) -> Iterator[Action]:
    uses = [[part.stage for part in compute_parts(action)] for action in actions]
    first_use = list(dict.fromkeys(stage for stages in uses for stage in stages))
    last_use = {stage: position for position, stages in enumerate(uses) for stage in stages}
    trained = {part.stage for action in actions for part in compute_parts(action) if not isinstance(part, Forward)}
    gathered: set[int] = set()
    for position, action in enumerate(actions):
        needed = [first_use.index(stage) + 2 for stage in uses[position]]
        for stage in first_use[: max(needed, default=0)]:
            if stage not in gathered:
                gathered.add(stage)
                yield Unshard(stage)
        yield action
        for stage in uses[position]:
            if last_use[stage] == position:
                last_use[stage] = -1
                yield Reshard(stage)
                if stage in trained:
                    yield ReduceGradients(stage)
