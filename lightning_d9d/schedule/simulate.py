"""Simulates a program: when every action starts and ends, how long ranks are idle, and the memory that they keep.

Every rank runs its compute actions one after the other, each as soon as its inputs are there.
Messages and data-parallel collectives run beside them:

- A message starts when it is sent, takes `transfer` on its link, and arrives `latency` later. A link from one rank to
  another transfers one message at a time. The receiver need not be ready. With `rendezvous=True` each rank runs its
  messages, sends and receives alike, one at a time in the order of its program. Each message holds both ends, as with
  NCCL on one stream. Orders that cross then deadlock.
- A rank's collectives run one at a time in its order. The first use of a stage waits for its `Unshard`.
- In a program without messages each rank sees the results of all others at once.

A microbatch is live in a stage from the start of its forward to the end of its backward. If
that is split, it is live to the end of its weight backward, perhaps with other memory after its input backward. In a
forward-only program it is live during the forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

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
    ReceiveForward,
    ReduceGradients,
    SendBackward,
    SendForward,
    Unshard,
    compute_parts,
)
from lightning_d9d.schedule.check import check, matching, peer_stage
from lightning_d9d.schedule.program import Program

_COMPUTES = (*COMPUTE, Overlapped)

PerStage = float | Sequence[float]
"""One number for all stages, or one for each."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Times of actions, in any one unit, and the memory of a live microbatch, in any unit."""

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    backward: PerStage | None = None
    """Time of a full backward; None is the sum of input and weight backward."""
    overlapped: float = 1.0
    """Duration of a pair as a share of the sum of its two actions."""
    unshard: PerStage = 0.0
    reduce_gradients: PerStage = 0.0
    transfer: float = 0.0
    """Time for which a message holds its link."""
    latency: float = 0.0
    """Time from when a message leaves its link until it arrives."""
    activation: PerStage = 1.0
    """Memory of one live microbatch in a stage."""
    split_activation: PerStage | None = None
    """The same from its input backward to its weight backward; None means unchanged."""
    durations: Mapping[Action, float] = field(default_factory=dict)
    """Times of single actions, such as measured ones; they override the times above. A message's key is its send."""

    def check(self, num_stages: int) -> None:
        """Refuse costs that are for another number of stages, or negative.

        Raises:
            ScheduleError: A cost is wrong. The message names field and value.
        """
        for each in fields(self):
            value = getattr(self, each.name)
            numbers = [value]
            if isinstance(value, Mapping):
                numbers = list(value.values())
            elif isinstance(value, Sequence):
                numbers = value
                if len(numbers) != num_stages:
                    raise ScheduleError(
                        f"Costs.{each.name} has {len(numbers)} numbers for {num_stages} stages; give one for each"
                    )
            if any(number is not None and number < 0 for number in numbers):
                raise ScheduleError(f"Costs.{each.name}={value!r} must not be negative")

    def duration(self, action: Action) -> float:
        """Return how long `action` takes."""
        if action in self.durations:
            return self.durations[action]
        match action:
            case Forward(stage):
                return _of_stage(self.forward, stage)
            case BackwardInput(stage):
                return _of_stage(self.backward_input, stage)
            case BackwardWeight(stage):
                return _of_stage(self.backward_weight, stage)
            case Backward(stage) if self.backward is not None:
                return _of_stage(self.backward, stage)
            case Backward(stage):
                return _of_stage(self.backward_input, stage) + _of_stage(self.backward_weight, stage)
            case Overlapped(first, second):
                return self.overlapped * (self.duration(first) + self.duration(second))
            case Unshard(stage):
                return _of_stage(self.unshard, stage)
            case ReduceGradients(stage):
                return _of_stage(self.reduce_gradients, stage)
            case SendForward() | SendBackward():
                return self.transfer
        return 0.0


def _of_stage(cost: PerStage, stage: int) -> float:
    return cost[stage] if isinstance(cost, Sequence) else cost


class Span(NamedTuple):
    """The time in which a rank ran an action. A message has a span at either end, from its start to its arrival."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """Time and memory of a simulated program."""

    program: Program
    spans: tuple[Span, ...]
    """Spans of all actions, rank by rank in the order of the program."""
    step_time: float
    """Time from the start of the first action to the end of the last."""
    compute_time: tuple[float, ...]
    """Time of each rank in compute actions."""
    peak_activations: tuple[int, ...]
    """Largest number of (stage, microbatch) live at once on each rank, as the module defines it."""
    peak_memory: tuple[float, ...]
    """Largest memory of activations that are live at once, by `Costs.activation` and `Costs.split_activation`."""

    @property
    def bubble_ratio(self) -> float:
        """The share of all ranks' time in which they compute nothing, from 0 to 1."""
        return bubble_ratio(self.spans)


def bubble_ratio(spans: Iterable[Span]) -> float:
    """Return the share of time (0 to 1) in which ranks compute nothing, from the first start to the last end of all.

    Args:
        spans: Spans that were simulated, or measured by synchronous clocks.
    """
    spans = list(spans)
    if not spans:
        return 0.0
    computed = sum(span.end - span.start for span in spans if isinstance(span.action, _COMPUTES))
    step_time = max(span.end for span in spans) - min(span.start for span in spans)
    return 1 - computed / (step_time * len({span.rank for span in spans})) if step_time else 0.0


def simulate(
    program: Program, costs: Costs | None = None, *, rendezvous: bool = False, is_checked: bool = False
) -> Simulation:
    """Simulate `program` on the machine that the module describes.

    Args:
        program: A program with or without messages.
        costs: Times of actions; by default 1 for F, I and W, 2 for B, and 0 for all others.
        rendezvous: If True, a message needs both ends at once, in each rank's order.
        is_checked: True if the program has been checked. Otherwise it is.

    Raises:
        ScheduleError: `check` refuses the program, `Costs.check` refuses the costs, or ranks wait for one another in a
            circle.
    """
    if not is_checked:
        check(program)
    costs = costs or Costs()
    costs.check(program.num_stages)
    run = _Run(program, costs, rendezvous)
    run.run()
    spans = tuple(span for rank in run.ranks for span in rank.spans)
    memory = [peak(actions, run.costs, forward_only=program.is_forward_only) for actions in program.ranks]
    return Simulation(
        program,
        spans,
        step_time=max((span.end for span in spans), default=0.0),
        compute_time=tuple(rank.compute_time for rank in run.ranks),
        peak_activations=tuple(count for count, _ in memory),
        peak_memory=tuple(weighted for _, weighted in memory),
    )


_Message = tuple[bool, int, int]
"""True for a message of the forward, the stage that receives it, and the microbatch."""


def _message_of(action: MessageAction) -> _Message:
    """Return the message of a send or a receive."""
    match action:
        case SendForward(stage, microbatch):
            return True, stage + 1, microbatch
        case SendBackward(stage, microbatch):
            return False, stage - 1, microbatch
    return isinstance(action, ReceiveForward), action.stage, action.microbatch


class _Rank:
    """The progress of one rank."""

    def __init__(self, rank: int, actions: tuple[Action, ...]) -> None:
        self.rank = rank
        self.actions = actions
        self.position = 0
        self.time = 0.0
        self.compute_time = 0.0
        self.collectives_end = 0.0
        self.unsharded_at: dict[int, float] = {}
        self.spans: list[Span] = []
        self.messages: list[tuple[int, MessageAction]] = []
        """Messages with their positions in `spans`, which are filled in when they have arrived."""
        self.posted: deque[tuple[float, MessageAction]] = deque()
        """Messages that wait for their turn with `rendezvous`, and since when."""
        self.messages_end = 0.0

    def add(self, action: Action, start: float, end: float) -> None:
        self.spans.append(Span(self.rank, action, start, end))


class _Run:
    """A run that advances every rank as far as possible, repeatedly.

    An action's time follows from the times of its inputs, so the order in which ranks advance does not matter.
    """

    def __init__(self, program: Program, costs: Costs, rendezvous: bool) -> None:
        self.placement = program.placement
        self.num_stages = program.num_stages
        self.has_messages = program.has_messages
        self.costs = costs
        self.of_kind: dict[tuple[type, int], float] = {}
        """The duration of actions without a time of their own, by (kind of action, stage)."""
        self.rendezvous = rendezvous
        self.ranks = [_Rank(rank, actions) for rank, actions in enumerate(program.ranks)]
        # (stage, microbatch) -> time
        self.forward_end: dict[tuple[int, int], float] = {}
        self.gradient_end: dict[tuple[int, int], float] = {}
        self.transfers: dict[_Message, tuple[float, float]] = {}
        """Message -> start and arrival."""
        self.link_free: dict[tuple[int, int], float] = {}

    def run(self) -> None:
        """Compute the spans of all ranks, or raise an error that says what they wait for."""
        goes_on = True
        while goes_on:
            goes_on = False
            for rank in self.ranks:
                goes_on |= self.advance(rank)
        if any(rank.position < len(rank.actions) or rank.posted for rank in self.ranks):
            raise ScheduleError(self.deadlock())
        for rank in self.ranks:
            for position, action in rank.messages:
                rank.spans[position] = Span(rank.rank, action, *self.transfers[_message_of(action)])

    def duration(self, action: Action) -> float:
        if self.costs.durations or isinstance(action, Overlapped):
            return self.costs.duration(action)
        key = type(action), action.stage
        if key not in self.of_kind:
            self.of_kind[key] = self.costs.duration(action)
        return self.of_kind[key]

    def advance(self, rank: _Rank) -> bool:
        """Advance the rank as far as it can, and return True if it did anything."""
        before = rank.position
        while rank.position < len(rank.actions):
            action = rank.actions[rank.position]
            if isinstance(action, _COMPUTES):
                if not self.compute(rank, action):
                    break
            elif isinstance(action, DataParallelAction):
                self.collective(rank, action)
            else:
                self.message(rank, action)
            rank.position += 1
        return self.deliver(rank) or rank.position > before

    def compute(self, rank: _Rank, action: ComputeAction | Overlapped) -> bool:
        parts = compute_parts(action)
        start = rank.time
        for part in parts:
            ready = self.ready_at(part)
            if ready is None:
                return False
            if ready > start:
                start = ready
            if rank.unsharded_at:
                start = max(start, rank.unsharded_at.get(part.stage, 0.0))
        duration = self.duration(action)
        rank.time = end = start + duration
        rank.compute_time += duration
        for part in parts:
            if isinstance(part, Forward):
                self.forward_end[part.stage, part.microbatch] = end
            elif not isinstance(part, BackwardWeight):
                self.gradient_end[part.stage, part.microbatch] = end
        rank.add(action, start, end)
        return True

    def ready_at(self, action: ComputeAction) -> float | None:
        """Return when the input of `action` from another stage arrives; None if not known yet."""
        if isinstance(action, BackwardWeight):
            return 0.0  # its input is from an earlier action of this rank
        stage, microbatch = action.stage, action.microbatch
        is_forward = isinstance(action, Forward)
        before, ends = (stage - 1, self.forward_end) if is_forward else (stage + 1, self.gradient_end)
        if not 0 <= before < self.num_stages:
            return 0.0
        if self.has_messages and self.placement[before] != self.placement[stage]:
            transfer = self.transfers.get((is_forward, stage, microbatch))
            return None if transfer is None else transfer[1]
        return ends.get((before, microbatch))

    def collective(self, rank: _Rank, action: DataParallelAction) -> None:
        start = max(rank.time, rank.collectives_end)
        rank.collectives_end = end = start + self.duration(action)
        if isinstance(action, Unshard):
            rank.unsharded_at[action.stage] = end
        rank.add(action, start, end)

    def message(self, rank: _Rank, action: MessageAction) -> None:
        rank.messages.append((len(rank.spans), action))
        rank.add(action, rank.time, rank.time)
        if self.rendezvous:
            rank.posted.append((rank.time, action))
        elif isinstance(action, SendForward | SendBackward):
            message = _message_of(action)
            link = rank.rank, self.placement[message[1]]
            start = max(rank.time, self.link_free.get(link, 0.0))
            self.link_free[link] = end = start + self.duration(action)
            self.transfers[message] = start, end + self.costs.latency

    def deliver(self, rank: _Rank) -> bool:
        """Run this rank's posted messages while it is also the other end's turn. Return True if any ran."""
        delivered = False
        while rank.posted:
            posted, action = rank.posted[0]
            peer = self.ranks[self.placement[peer_stage(action)]]
            if not peer.posted or peer.posted[0][1] != matching(action):
                break
            peer_posted, peer_action = peer.posted.popleft()
            rank.posted.popleft()
            sends = isinstance(action, SendForward | SendBackward)
            send = action if sends else peer_action
            start = max(posted, peer_posted, rank.messages_end, peer.messages_end)
            rank.messages_end = peer.messages_end = end = start + self.duration(send)
            self.transfers[_message_of(send)] = start, end + self.costs.latency
            delivered = True
        return delivered

    def deadlock(self) -> str:
        """Describe the circle of ranks that wait for one another."""
        rank = next(rank for rank in self.ranks if rank.position < len(rank.actions) or rank.posted)
        circle: list[int] = []
        texts: list[str] = []
        while rank.rank not in circle:
            circle.append(rank.rank)
            text, rank = self.blocked(rank)
            texts.append(text)
        waits = "; ".join(texts[circle.index(rank.rank) :])
        return f"deadlock: {waits}. Put one of these actions earlier on its rank, before the one that is in its way"

    def blocked(self, rank: _Rank) -> tuple[str, _Rank]:
        """Return the action for which a blocked rank waits, and the rank whose turn it is."""
        if rank.posted:
            _, action = rank.posted[0]
            peer = self.ranks[self.placement[peer_stage(action)]]
            return f"rank {rank.rank} in {action} waits for {matching(action)} of rank {peer.rank}", peer
        action = rank.actions[rank.position]
        part = next(part for part in compute_parts(action) if self.ready_at(part) is None)
        forward = isinstance(part, Forward)
        other = part.stage - 1 if forward else part.stage + 1
        peer = self.ranks[self.placement[other]]
        awaited = f"{other}F{part.microbatch}" if forward else f"the backward {other}B{part.microbatch}"
        return f"rank {rank.rank} at {action} waits for {awaited} of rank {peer.rank}", peer


def peak(actions: Sequence[Action], costs: Costs, *, forward_only: bool = False) -> tuple[int, float]:
    """Return the largest amount that is live at once on a rank: microbatches and their memory.

    Arguments are those of `live`.
    """
    count, memory = 0, 0.0
    for _, microbatches, num_bytes in live(actions, costs, forward_only=forward_only):
        count, memory = max(count, microbatches), max(memory, num_bytes)
    return count, memory


def live(
    actions: Sequence[Action], costs: Costs, *, forward_only: bool = False
) -> Iterator[tuple[ComputeAction, int, float]]:
    """Yield the amount that is live during each computation of a rank, in order: microbatches and their memory.

    Args:
        actions: Actions of the rank, in order.
        costs: Memory that a live microbatch takes in a stage.
        forward_only: If True, only forwards run; a microbatch is then live during its forward.
    """
    count, memory = 0, 0.0
    for part in (part for action in actions for part in compute_parts(action)):
        whole = _of_stage(costs.activation, part.stage)
        kept = whole if costs.split_activation is None else _of_stage(costs.split_activation, part.stage)
        if isinstance(part, Forward):
            count += 1
            memory += whole
        elif isinstance(part, BackwardInput):
            memory += kept - whole
        yield part, count, memory
        if forward_only or isinstance(part, Backward | BackwardWeight):
            count -= 1
            memory -= kept if isinstance(part, BackwardWeight) else whole
