"""`Auto`: chooses schedule, stages and size of microbatches before there are parameters or batches.

[Note: the search] Candidates are the schedules of the package with every size of microbatch that divides the batch.
Each is split so that its longest stage is as short as possible. Then the split is made more even over the ranks: by
memory first, if the first split does not fit. A lower bound of a candidate's time is known without a simulation. The
candidates with the lowest bounds are simulated first. Those whose bound is above the best time of the same schedule are
skipped.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self, cast

from lightning_d9d.errors import ScheduleError
from lightning_d9d.schedule.actions import Action, BackwardInput, BackwardWeight, Forward, compute_parts
from lightning_d9d.schedule.breadth_first import GPipe, LoopedBFS
from lightning_d9d.schedule.dual_pipe_v import DualPipeV
from lightning_d9d.schedule.layers import LayerSeconds, Machine, ModelCosts
from lightning_d9d.schedule.measured import Calibration, MeasuredCosts
from lightning_d9d.schedule.one_forward_one_backward import Interleaved1F1B, OneForwardOneBackward, ZeroBubble
from lightning_d9d.schedule.partition import level, split_evenly
from lightning_d9d.schedule.program import Program, merge_backwards
from lightning_d9d.schedule.schedule import Schedule
from lightning_d9d.schedule.simulate import Costs, simulate
from lightning_d9d.schedule.zero_bubble_v import ZeroBubbleV

GIB = 2**30

PeakOfCandidate = Callable[[Schedule, Sequence[range], int, int], float]
"""Finds the memory of a schedule with the layers of its stages, rows of a microbatch, and number of microbatches."""

_SCHEDULES: dict[str, Schedule] = {
    "1f1b": OneForwardOneBackward(),
    "interleaved_1f1b, 2 stages": Interleaved1F1B(2),
    "interleaved_1f1b, 4 stages": Interleaved1F1B(4),
    "zero_bubble": ZeroBubble(1),
    "zero_bubble, 2 stages": ZeroBubble(2),
    "zero_bubble_v": ZeroBubbleV(),
    "dual_pipe_v": DualPipeV(),
    "gpipe": GPipe(),
    "looped_bfs, 2 stages": LoopedBFS(2),
}
"""Schedules that `Auto` chooses from, by the names in its table. Simple ones come first: they are chosen if times are
equal.
"""

_CLOSE = 1.1
"""Schedules slower than the fastest by more than this factor are left out of the table."""

_EQUAL = 1.001
"""Steps whose times differ by less than this factor count as equally fast; the one with the least memory is chosen."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A chosen schedule with its stages and its predicted time and memory. `str` of it is a table."""

    name: str
    """Name of the schedule with its stages on each rank, as in the table."""
    microbatch_size: int
    """Number of rows in a microbatch."""
    num_microbatches: int
    layers_of_stage: tuple[range, ...]
    """The layers of each stage by their index in `ModelCosts.layers`, for `StageInfo.layers`. The parts before and
    after the layers are on the first and the last stage.
    """
    step_time: float
    """Predicted seconds of all forwards and backwards of a batch, without collectives and optimizer."""
    bubble_ratio: float
    """The share of all ranks' time in which they compute nothing, from 0 to 1."""
    peak_memory: float
    """Bytes on the rank that needs the most: parameters, gradients, optimizer state, and activations."""
    alternatives: tuple[Choice, ...] = ()
    """The best choice of each other schedule, fastest first."""

    @property
    def schedule(self) -> Schedule:
        """The schedule to run."""
        return _SCHEDULES[self.name]

    def to_dict(self) -> dict[str, Any]:
        """Return the choice in types of JSON."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values["layers_of_stage"] = [[layers.start, layers.stop] for layers in self.layers_of_stage]
        values["alternatives"] = [each.to_dict() for each in self.alternatives]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read `to_dict()` back.

        Raises:
            ScheduleError: The dictionary names a schedule that this version does not choose from, or is not one of
                `to_dict()`.
        """
        try:
            if values["name"] not in _SCHEDULES:
                raise ScheduleError(
                    f"a saved choice names the schedule {values['name']!r}; this version knows {sorted(_SCHEDULES)}. "
                    "Name a schedule yourself instead of Auto"
                )
            return cls(**{
                **values,
                "layers_of_stage": tuple(range(*bounds) for bounds in values["layers_of_stage"]),
                "alternatives": tuple(cls.from_dict(each) for each in values["alternatives"]),
            })  # fmt: skip
        except (KeyError, TypeError) as error:
            raise ScheduleError(f"a saved choice of a schedule cannot be read ({error!r}): {values!r}") from error

    def __str__(self) -> str:
        header = ("schedule", "microbatches", "step", "bubble", "memory")
        rows = [header, *(each._row() for each in (self, *self.alternatives))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
        sizes = ", ".join(str(len(layers)) for layers in self.layers_of_stage)
        return "\n".join([*lines, f"Auto takes the first, with stages of {sizes} layers"])

    def _row(self) -> tuple[str, ...]:
        return (
            self.name,
            f"{self.num_microbatches} of {self.microbatch_size}",
            f"{self.step_time * 1e3:.1f} ms",
            f"{self.bubble_ratio:.1%}",
            f"{self.peak_memory / GIB:.1f} GiB",
        )


class Auto(Schedule):
    """A schedule that chooses schedule, stages and size of microbatches by the predicted times of steps.

    It simulates the schedules of this package with all sizes of microbatches, under a memory cap. It has no program of
    its own: `choose` returns the schedule to use. In a run it knows what ranks hold, send and compute again: the costs
    are those of `lightning-d9d plan`.

    Args:
        batch_size: Number of rows that one data-parallel rank gets for a step.
        sequence_length: Number of tokens in a row.
        memory_gib: Memory that a rank may use, in GiB; leave some for buffers and fragmentation. None uses all of the
            device's.
        costs: A file of `MeasuredCosts`. None predicts costs from operations and bytes.
        machine: Speeds of the ranks, for costs that `costs` does not contain.
    """

    def __init__(
        self,
        batch_size: int,
        sequence_length: int,
        memory_gib: float | None = None,
        costs: str | Path | None = None,
        machine: Machine = Machine(),
    ) -> None:
        for name, value in (("batch_size", batch_size), ("sequence_length", sequence_length)):
            if not isinstance(value, int) or value < 1:
                raise ScheduleError(f"Auto.{name}={value!r} must be a whole number of at least 1")
        if memory_gib is not None and not (math.isfinite(memory_gib) and memory_gib > 0):
            raise ScheduleError(f"Auto.memory_gib={memory_gib!r} must be greater than 0, or None for no cap")
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self.memory_gib = memory_gib
        self.costs = costs
        self.machine = machine

    @property
    def stages_per_rank(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The number of stages on each rank, which is unknown before the choice.

        Raises:
            ScheduleError: No schedule has been chosen yet.
        """
        self._unresolved()

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        """Refuse, like `stages_per_rank`, before the choice."""
        self._unresolved()

    def takes(self, num_ranks: int, num_microbatches: int) -> bool:
        """Refuse, like `stages_per_rank`, before the choice."""
        self._unresolved()

    def order(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterable[Action]:
        """Refuse, like `stages_per_rank`, before the choice."""
        self._unresolved()

    def _unresolved(self) -> NoReturn:
        raise ScheduleError(
            "Auto has not chosen a schedule yet; use the `schedule` of the Choice that choose() returns"
        )

    def choose(
        self,
        num_ranks: int,
        model: ModelCosts,
        *,
        state_ratio: float,
        device_memory: float | None = None,
        peak: PeakOfCandidate | None = None,
    ) -> Choice:
        """Return the fastest of all candidates that fit. The search is deterministic; `schedule/tune.py` describes it.

        Local. To be certain that all ranks have the same choice, choose on one rank and send the choice to the others.

        Args:
            num_ranks: Pipeline ranks.
            model: Costs of the model for one row of `sequence_length` tokens on one rank.
            state_ratio: Bytes of parameters, gradients and optimizer state that a rank keeps for each byte of its
                stages' weights. It is 5 for bf16 weights with fp32 gradients and bf16 Adam on every rank, and less if
                they are sharded.
            device_memory: The cap in bytes if `memory_gib` is None. None sets no cap.
            peak: Returns the bytes of the rank that needs most. It gets a schedule, the layers of its stages, the rows
                of a microbatch and their number. None: states and activations are summed.

        Raises:
            ScheduleError: Nothing fits, and the message has the least memory needed; or there are more ranks than
                layers. Or `costs` belongs to another model or sequence length.
        """
        if state_ratio < 0 or not math.isfinite(state_ratio):
            raise ScheduleError(f"state_ratio={state_ratio!r} must be finite and at least 0")
        if not 1 <= num_ranks <= len(model.layers):
            raise ScheduleError(
                f"Auto cannot split {len(model.layers)} layers for {num_ranks} pipeline ranks; each needs at least one"
            )
        cap = device_memory if self.memory_gib is None else self.memory_gib * GIB
        measured = None if self.costs is None else MeasuredCosts.read(self.costs)
        calibration = Calibration.none(model) if measured is None else measured.calibrate(model, self.machine)
        if measured is not None and measured.sequence_length != self.sequence_length:
            raise ScheduleError(
                f"{self.costs} was measured with sequences of {measured.sequence_length} tokens, but Auto has "
                f"sequence_length={self.sequence_length}; measure again"
            )
        candidates = []
        for microbatch_size in (size for size in range(1, self.batch_size + 1) if self.batch_size % size == 0):
            num_microbatches = self.batch_size // microbatch_size
            layers = _Layers(model, self.machine, calibration, microbatch_size, state_ratio)
            if measured is None:  # whose times would have the host's
                layers.add_host(model)
            ranges_by_placement: dict[tuple[int, ...], list[list[range]]] = {}
            for name, schedule in list(_SCHEDULES.items())[: 1 if num_ranks == 1 else None]:
                placement = schedule.placement(num_ranks)
                if len(placement) <= len(model.layers) and schedule.takes(num_ranks, num_microbatches):
                    if placement not in ranges_by_placement:
                        ranges_by_placement[placement] = layers.ranges_for_speed(placement)
                    candidates += [
                        _Candidate(name, num_ranks, num_microbatches, layers, ranges)
                        for ranges in ranges_by_placement[placement]
                    ]
        return _search(candidates, math.inf if cap is None else cap, peak)


def _search(candidates: Sequence[_Candidate], cap: float, peak: PeakOfCandidate | None) -> Choice:
    """Return the best candidate of all, with the best of each other schedule as alternatives."""
    best: dict[str, Choice] = {}
    fastest = least = math.inf
    for candidate in sorted(candidates, key=lambda each: each.bound):
        limit = min(_CLOSE * fastest, best[candidate.name].step_time if candidate.name in best else math.inf)
        if candidate.bound >= limit:
            continue
        need = candidate.need(cap, peak)
        least = min(least, need)
        if need > cap or candidate.without_messages() >= limit:
            continue
        found = candidate.simulated(None if peak is None else need)
        if found.step_time < limit:
            best[candidate.name] = found
            fastest = min(fastest, found.step_time)
    if not best:
        raise ScheduleError(
            f"no schedule fits into {cap / GIB:.1f} GiB a rank; the least that one needs is {least / GIB:.1f} GiB. Use "
            "more pipeline ranks, shard weights or experts over more ranks, recompute activations, shorten sequences, "
            "or raise Auto.memory_gib"
        )
    chosen = min(
        (each for each in best.values() if each.step_time <= _EQUAL * fastest), key=lambda each: each.peak_memory
    )
    close = (each for each in best.values() if each is not chosen and each.step_time <= _CLOSE * fastest)
    others = sorted(close, key=lambda each: each.step_time)
    return replace(chosen, alternatives=tuple(others))


class _Actions(NamedTuple):
    """Seconds of each stage's actions."""

    forward: list[float]
    backward_input: list[float]
    backward_weight: list[float]
    backward: list[float]


class _Layers:
    """Running totals over a model's layers, for one size of microbatch: layers 3 to 5 have totals[6] - totals[3].

    The parts before and after the layers count as part of the first and the last layer.
    """

    def __init__(
        self, model: ModelCosts, machine: Machine, calibration: Calibration, num_rows: int, state_ratio: float
    ) -> None:
        self.num_rows = num_rows
        self.machine = machine
        parts = model.parts
        seconds = [
            LayerSeconds(*map(operator.mul, machine.seconds(part, num_rows), factors))
            for part, factors in zip(parts, calibration.seconds, strict=True)
        ]
        rows = [num_rows * factor for factor in calibration.activation]
        self.forward = _totals(each.forward for each in seconds)
        self.backward_input = _totals(each.backward_input for each in seconds)
        self.backward_weight = _totals(each.backward_weight for each in seconds)
        self.backward = _totals(each.backward for each in seconds)
        self.activation = _totals(n * part.activation_bytes for n, part in zip(rows, parts, strict=True))
        self.split_activation = _totals(n * part.split_activation_bytes for n, part in zip(rows, parts, strict=True))
        self.state = _totals(
            state_ratio * part.weight_bytes if part.state_bytes is None else part.state_bytes for part in parts
        )
        self.work = list(map(operator.add, self.forward, self.backward))
        self.transfer = num_rows * max(part.output_bytes for part in parts) / machine.link_bytes_per_second
        if calibration.link_seconds_per_row is not None:
            self.transfer = num_rows * calibration.link_seconds_per_row
        self.host = [0.0] * (len(model.layers) + 1)

    def add_host(self, model: ModelCosts) -> None:
        """Count the seconds of the host, if those of all layers are known: [Note: time of the host]."""
        of_layers = [self.machine.host_seconds([layer]) for layer in model.layers]
        if None not in of_layers:
            self.host = list(accumulate(cast(list[float], of_layers), initial=0.0))

    def actions(self, ranges: Sequence[range], placement: Sequence[int]) -> _Actions:
        """Return the seconds of the actions of stages with these ranges of layers, on the ranks of a placement."""
        more = self.machine.action_seconds
        forward, backward = _of_stages(self.forward, ranges, more), _of_stages(self.backward, ranges, more)
        device = _of_ranks(map(operator.add, forward, backward), placement)
        host = _of_ranks(_of_stages(self.host, ranges), placement)
        slower = [max(1.0, host[rank] / device[rank]) if host[rank] else 1.0 for rank in placement]

        def slowed(actions: Iterable[float]) -> list[float]:
            return list(map(operator.mul, actions, slower))

        return _Actions(
            forward=slowed(forward),
            backward_input=slowed(_of_stages(self.backward_input, ranges, more)),
            backward_weight=slowed(_of_stages(self.backward_weight, ranges, more)),
            backward=slowed(backward),
        )

    def costs(self, ranges: Sequence[range], placement: Sequence[int]) -> Costs:
        """Return the costs of such stages."""
        return Costs(
            **self.actions(ranges, placement)._asdict(),
            overlapped=self.machine.overlapped,
            transfer=self.transfer,
            latency=self.machine.link_latency,
            activation=_of_stages(self.activation, ranges),
            split_activation=_of_stages(self.split_activation, ranges),
        )

    def ranges_for_speed(self, placement: Sequence[int]) -> list[list[range]]:
        """Return ranges with the shortest longest stage, and ranges with the smallest load of the most loaded rank.

        The longest stage bounds schedules that run one stage of a rank for several microbatches; the rank bounds
        others. A stage may be the longest of the device or of the host.
        """
        found: list[list[range]] = []
        for work in [self.work, self.host] if self.host[-1] else [self.work]:
            even = split_evenly([behind - before for before, behind in pairwise(work)], len(placement))
            levelled = level(even, placement, lambda ranges: [(load,) for load in self.loads(ranges, placement)])
            found += [ranges for ranges in (even, levelled) if ranges not in found]
        return found

    def loads(self, ranges: Sequence[range], placement: Sequence[int]) -> list[int]:
        """Return the nanoseconds that a microbatch takes in the stages of each rank."""
        device, host = (_of_ranks(_of_stages(work, ranges), placement) for work in (self.work, self.host))
        return [round(1e9 * seconds) for seconds in map(max, device, host)]


def _totals(of_parts: Iterable[float]) -> list[float]:
    before, *layers, after = of_parts
    layers[0] += before
    layers[-1] += after
    return list(accumulate(layers, initial=0.0))


def _of_stages(totals: Sequence[float], ranges: Sequence[range], more: float = 0.0) -> list[float]:
    return [totals[layers.stop] - totals[layers.start] + more for layers in ranges]


def _of_ranks(of_stages: Iterable[float], placement: Sequence[int]) -> list[float]:
    sums = [0.0] * (max(placement) + 1)
    for rank, value in zip(placement, of_stages, strict=True):
        sums[rank] += value
    return sums


class _Candidate:
    """A schedule with a number of microbatches of one size, and its split of the layers."""

    def __init__(self, name: str, num_ranks: int, num_microbatches: int, layers: _Layers, ranges: list[range]) -> None:
        self.name = name
        self.schedule = _SCHEDULES[name]
        self.num_ranks = num_ranks
        self.num_microbatches = num_microbatches
        self.placement = self.schedule.placement(num_ranks)
        self.stages_of = [self.schedule.stages_of(rank, num_ranks) for rank in range(num_ranks)]
        self.layers = layers
        self.ranges = ranges
        self.bound = self._bound()

    def _bound(self) -> float:
        """Return a lower bound in seconds for every order of the actions, with the ranges for speed.

        A rank begins when the first microbatch has reached it, and runs all of them. After its last backward (of inputs
        where split) gradients go back to the first stage.
        """
        layers = self.layers
        forward, inputs, weight, whole = layers.actions(self.ranges, self.placement)
        awaited = whole
        if isinstance(self.schedule, ZeroBubble | ZeroBubbleV | DualPipeV):
            awaited, whole = inputs, list(map(min, whole, map(operator.add, inputs, weight)))
        number = self.num_microbatches
        if isinstance(self.schedule, DualPipeV):
            number *= min(1.0, layers.machine.overlapped)
        hop = layers.transfer + layers.machine.link_latency
        bounds = []
        for stages in self.stages_of:
            before = stages[0]  # the first microbatch passes this many stages, each on another rank
            begin = sum(forward[:before]) + before * hop
            end = sum(awaited[:before]) + before * hop
            all_work = number * sum(forward[stage] + whole[stage] for stage in stages)
            awaited_work = number * sum(forward[stage] + awaited[stage] for stage in stages)
            bounds.append(begin + max(all_work, awaited_work + end))
        return max(bounds)

    def fit(self, cap: float) -> float:
        """Change the stages if they do not fit.

        Return the memory of the rank that needs the most; it may still not fit.
        """
        if math.isinf(cap):
            return 0.0
        layers, placement = self.layers, self.placement
        live = [
            _largest(_kept(actions, stages))
            for actions, stages in zip(self.compute().ranks, self.stages_of, strict=True)
        ]

        def needs(ranges: Sequence[range]) -> list[float]:
            activation, split = _of_stages(layers.activation, ranges), _of_stages(layers.split_activation, ranges)
            found = _of_ranks(_of_stages(layers.state, ranges), placement)
            for rank, stages in enumerate(self.stages_of):
                kept = [*(activation[stage] for stage in stages), *(split[stage] for stage in stages)]
                found[rank] += max(sum(map(operator.mul, counts, kept)) for counts in live[rank])
            return found

        def loads(ranges: Sequence[range]) -> list[tuple[int, int]]:
            over = (math.ceil(max(0.0, need - cap)) for need in needs(ranges))
            return list(zip(over, layers.loads(ranges, placement), strict=True))

        if max(needs(self.ranges)) > cap:
            self.ranges = level(self.ranges, placement, loads)
        return max(needs(self.ranges))

    def need(self, cap: float, peak: PeakOfCandidate | None) -> float:
        """Change the stages if they do not fit, as `fit`. Returns the memory, by `peak` if there is one.

        What `peak` finds beside states and activations is left free in a second try.
        """
        need = self.fit(cap)
        if peak is None or need > cap:
            return need

        def found() -> float:
            return peak(self.schedule, self.ranges, self.layers.num_rows, self.num_microbatches)

        if (beside := found() - need) + need > cap:
            self.fit(cap - beside)
            return found()
        return beside + need

    def compute(self) -> Program:
        """Return the actions without messages."""
        return merge_backwards(self.schedule.compute(self.num_ranks, self.num_microbatches))

    def without_messages(self) -> float:
        """Return the simulated seconds if messages take no time: a cheap lower bound."""
        return simulate(self.compute(), self.layers.costs(self.ranges, self.placement)).step_time

    def simulated(self, memory: float | None) -> Choice:
        """Return the simulation with messages; its memory is summed unless it is given."""
        program = self.schedule.program(self.num_ranks, self.num_microbatches)
        simulation = simulate(program, self.layers.costs(self.ranges, self.placement))
        state = _of_ranks(_of_stages(self.layers.state, self.ranges), self.placement)
        return Choice(
            name=self.name,
            microbatch_size=self.layers.num_rows,
            num_microbatches=self.num_microbatches,
            layers_of_stage=tuple(self.ranges),
            step_time=simulation.step_time,
            bubble_ratio=simulation.bubble_ratio,
            peak_memory=max(map(operator.add, state, simulation.peak_memory)) if memory is None else memory,
        )


def _kept(actions: Sequence[Action], stages: Sequence[int]) -> set[tuple[int, ...]]:
    """Return all occurring counts of kept microbatches: whole activations of each stage, then split ones of each."""
    place = {stage: index for index, stage in enumerate(stages)}
    counts = [0] * (2 * len(stages))
    found = set()
    for part in (part for action in actions for part in compute_parts(action)):
        whole, split = place[part.stage], place[part.stage] + len(stages)
        if isinstance(part, Forward):
            counts[whole] += 1
        elif isinstance(part, BackwardWeight):
            counts[split] -= 1
        else:
            counts[whole] -= 1
            counts[split] += isinstance(part, BackwardInput)
        found.add(tuple(counts))
    return found


def _largest(found: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Keep the tuples that no other tuple exceeds or equals in every number."""
    largest: list[tuple[int, ...]] = []
    for counts in sorted(found, key=sum, reverse=True):
        if not any(all(map(operator.ge, other, counts)) for other in largest):
            largest.append(counts)
    return largest
