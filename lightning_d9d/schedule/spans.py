"""Costs derived from the spans of a measured step."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from lightning_d9d.schedule.actions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    ComputeAction,
    Forward,
    compute_parts,
)
from lightning_d9d.schedule.simulate import Costs, Span


def mean_times(spans: Iterable[Span]) -> dict[tuple[type[ComputeAction], int], float]:
    """Return the mean time of the compute actions of each kind and stage that ran.

    The halves of an overlapped pair must have separate spans.
    """
    times: dict[tuple[type[ComputeAction], int], list[float]] = defaultdict(list)
    for span in spans:
        for part in compute_parts(span.action):
            times[type(part), part.stage].append(span.end - span.start)
    return {key: statistics.fmean(of_key) for key, of_key in times.items()}


def message_time(spans: Iterable[Span], placement: Sequence[int]) -> float | None:
    """Return how long a message takes: the median over those that a rank waited for. None if no rank waited.

    The time is measured from the end of the action that computed the content to the start of the action that used it.
    It counts only if the receiving rank was otherwise idle. Clocks that differ lengthen it in one direction and shorten
    it in the other.

    Args:
        spans: Measured spans; spans of messages are not needed.
        placement: The rank of each stage.
    """
    gaps = list(_waits([span for span in spans if compute_parts(span.action)], placement))
    return max(0.0, statistics.median(gaps)) if gaps else None


def mean_costs(spans: Iterable[Span], placement: Sequence[int]) -> Costs:
    """Return costs to simulate the step: mean times of each kind and stage (0: did not run) and of a message."""
    spans = list(spans)
    times = mean_times(spans)

    def of_stages(kind: type[ComputeAction]) -> list[float]:
        return [times.get((kind, stage), 0.0) for stage in range(len(placement))]

    return Costs(
        forward=of_stages(Forward),
        backward=of_stages(Backward),
        backward_input=of_stages(BackwardInput),
        backward_weight=of_stages(BackwardWeight),
        latency=message_time(spans, placement) or 0.0,
    )


def _waits(spans: list[Span], placement: Sequence[int]) -> Iterator[float]:
    made = {_content(part): span.end for span in spans for part in compute_parts(span.action)}
    for rank in set(placement):
        of_rank = sorted((span for span in spans if span.rank == rank), key=lambda span: span.start)
        for before, span in pairwise(of_rank):
            for part in compute_parts(span.action):
                source = part.stage - 1 if isinstance(part, Forward) else part.stage + 1
                if isinstance(part, BackwardWeight) or not 0 <= source < len(placement) or placement[source] == rank:
                    continue
                end = made.get((isinstance(part, Forward), source, part.microbatch))
                if end is not None and before.end <= end:
                    yield span.start - end


def _content(part: ComputeAction) -> tuple[bool | None, int, int]:
    """Return what the action makes for another stage: output (True) or gradient (False), stage, microbatch; or None."""
    kind = None if isinstance(part, BackwardWeight) else isinstance(part, Forward)
    return kind, part.stage, part.microbatch
