"""Every schedule on 1 to 16 ranks with 1 to 64 microbatches: complete, without deadlock, as fast and small as stated.

F, I and W take 1, B takes 2, links nothing; p ranks, n microbatches, k stages a rank. A stage is 1/k of a rank's part
of the model, so in the papers' units of a rank's part a bubble is k times shorter.

| schedule | bubble on each rank | published as |
|---|---|---|
| GPipe, 1F1B | 3 (p - 1) | (p - 1) (F + B) |
| looped BFS, interleaved 1F1B | 3 (p - 1), n >= p | (p - 1) (F + B) / k of a rank's part |
| ZB-H1 | p - 1, n >= p | (p - 1) (F + I - W) |
| ZB-V | p - 1, n >= (3p - 1) / 2 | 0 between a rank's first and last action; they start up to p - 1 apart |
| DualPipeV | 2 (p - 1) | (p - 1) (F&B + B - 3W), F&B = 3 |

With fewer microbatches than given the pipeline is never full, and the step is the way of single microbatches: the
formulas below, which are ours. The microbatch counts of `counts` are run for most p; all 1024 pairs by `python -m
tests.schedule.test_table`, in some minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest

from lightning_d9d.schedule import (
    DualPipeV,
    GPipe,
    Interleaved1F1B,
    LoopedBFS,
    OneForwardOneBackward,
    Program,
    Schedule,
    Simulation,
    ZeroBubble,
    ZeroBubbleV,
    add_data_parallel,
    check,
    merge_backwards,
    simulate,
)
from lightning_d9d.schedule.actions import (
    Action,
    Backward,
    BackwardInput,
    Forward,
    ReceiveBackward,
    ReceiveForward,
    SendBackward,
    SendForward,
    compute_parts,
)
from lightning_d9d.schedule.check import matching
from lightning_d9d.schedule.communications import COSTS


@dataclass(frozen=True)
class Row:
    schedule: Schedule
    step_time: Callable[[int, int], int]
    """The time of a step, from p and n."""
    peak: Callable[[int, int, int], int]
    """The number of live activations at the peak, from p, n and rank."""
    least: Callable[[int], int] = lambda p: 1
    """The least n."""


def group(p: int, n: int) -> int:
    """The largest group of microbatches of the interleaved schedules."""
    return -(-n // max(1, n // p))


def looped(k: int) -> Callable[[int, int], int]:
    return lambda p, n: 3 * (k * n + p - 1 + (k - 1) * max(0, p - n))


def interleaved_peak(k: int) -> Callable[[int, int, int], int]:
    return lambda p, n, rank: min(k * n, (k - 1) * group(p, n) + 2 * (p - 1 - rank) + 1)


TABLE = {
    "gpipe": Row(GPipe(), looped(1), lambda p, n, rank: n),
    "looped_bfs": Row(LoopedBFS(), looped(2), lambda p, n, rank: 2 * n),
    "1f1b": Row(OneForwardOneBackward(), looped(1), lambda p, n, rank: min(n, p - rank)),
    "interleaved_1f1b": Row(Interleaved1F1B(), looped(2), interleaved_peak(2)),
    "zero_bubble": Row(ZeroBubble(), lambda p, n: 3 * n + p - 1 + max(0, p - n), lambda p, n, rank: min(n, p)),
    "zero_bubble_v": Row(
        ZeroBubbleV(),
        lambda p, n: max(6 * n + p - 1, 4 * n + 4 * p - 2),
        lambda p, n, rank: min(2 * n, n + 1 + rank, 2 * p),
    ),
    "dual_pipe_v": Row(
        DualPipeV(), lambda p, n: 6 * n + 2 * (p - 1), lambda p, n, rank: 2 * p + 1, least=lambda p: 2 * p
    ),
}
MORE = {
    "looped_bfs of 3": Row(LoopedBFS(3), looped(3), lambda p, n, rank: 3 * n),
    "interleaved_1f1b of 1": Row(Interleaved1F1B(1), looped(1), interleaved_peak(1)),
    "interleaved_1f1b of 4": Row(Interleaved1F1B(4), looped(4), interleaved_peak(4)),
}


def counts(p: int) -> list[int]:
    """Return the counts at which something changes, and every 24th in between, others for each p."""
    edges = {1, 2, p - 1, p, p + 1, 3 * p // 2, 2 * p - 1, 2 * p, 2 * p + 1}
    return sorted(n for n in range(1, 65) if n in edges or (n + 5 * p) % 24 == 0)


def check_one(row: Row, p: int, n: int) -> None:
    where = f"{type(row.schedule).__name__}, {p} ranks, {n} microbatches"
    program = row.schedule.compute(p, n)
    simulation = simulate(program)
    assert simulation.step_time == row.step_time(p, n), where
    assert simulation.peak_activations == tuple(row.peak(p, n, rank) for rank in range(p)), where
    k = row.schedule.stages_per_rank
    assert simulation.bubble_ratio == pytest.approx(1 - 3 * k * n / row.step_time(p, n)), where
    assert work(program) == all_work(k * p, n), where


def work(program: Program) -> list[str]:
    """Everything that is computed: F, and I and W, of which a full backward is both."""
    parts = [str(part) for actions in program.ranks for action in actions for part in compute_parts(action)]
    return sorted(half for part in parts for half in {part.replace("B", "I"), part.replace("B", "W")})


def all_work(num_stages: int, n: int) -> list[str]:
    return sorted(f"{stage}{kind}{m}" for stage in range(num_stages) for kind in "FIW" for m in range(n))


def check_with_messages(row: Row, p: int, n: int) -> None:
    """Messages cost nothing where links are free; with `COSTS` not even where each holds both ends."""
    program = row.schedule.program(p, n)
    assert simulate(program).step_time == row.step_time(p, n), f"{p} ranks, {n}"
    simulate(program, rendezvous=True)  # with other costs it takes longer, but does not lock
    computed = simulate(merge_backwards(row.schedule.compute(p, n)), COSTS)
    assert simulate(program, COSTS, rendezvous=True).step_time == computed.step_time, f"{p} ranks, {n}"
    check_receives(program, computed)
    check(add_data_parallel(program))


def check_receives(program: Program, computed: Simulation) -> None:
    """Each is posted when its message leaves, or as soon after that as its rank is between two actions."""
    spans = {span.action: span for span in computed.spans}
    ends = {part: span.end for span in computed.spans for part in compute_parts(span.action)}
    for rank, actions in enumerate(program.ranks):
        of_rank = [spans[action] for action in actions if action in spans]
        num_before = 0
        for action in actions:
            if action in spans:
                num_before += 1
            elif isinstance(action, ReceiveForward | ReceiveBackward):
                leaves = next(ends[part] for part in makers(matching(action)) if part in ends)
                running = [span.end for span in of_rank if span.start < leaves < span.end]
                earliest = of_rank[num_before - 1].end if num_before else 0
                latest = of_rank[num_before].start
                assert earliest <= (running or [leaves])[0] <= latest, f"{action} on rank {rank}"


def makers(send: Action) -> tuple[Action, ...]:
    """Actions of which one makes what is sent."""
    if isinstance(send, SendForward):
        return (Forward(send.stage, send.microbatch),)
    assert isinstance(send, SendBackward)
    return Backward(send.stage, send.microbatch), BackwardInput(send.stage, send.microbatch)


@pytest.mark.parametrize("name", [*TABLE, *MORE])
@pytest.mark.parametrize("ranks", [range(1, 5), range(5, 9), (9, 12), (13, 16)], ids=str)
def test_complete_and_as_fast_and_small_as_told(name: str, ranks: Iterable[int]) -> None:
    row = {**TABLE, **MORE}[name]
    for p in ranks:
        for n in counts(p):
            if n >= row.least(p):
                check_one(row, p, n)


@pytest.mark.parametrize("name", TABLE)
def test_messages_delay_nothing_on_free_links(name: str) -> None:
    row = TABLE[name]
    for p, n in [(1, 2), (2, 3), (2, 4), (3, 7), (4, 8), (4, 9), (5, 13), (8, 16), (11, 22), (16, 40)]:
        if n >= row.least(p):
            check_with_messages(row, p, n)


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_zero_bubble_v_has_no_gap_on_any_rank(p: int) -> None:
    for n in (2 * p - 1, 2 * p, 3 * p + 1):
        simulation = simulate(ZeroBubbleV().compute(p, n))
        for rank in range(p):
            spans = [span for span in simulation.spans if span.rank == rank]
            assert spans[-1].end - spans[0].start == 6 * n


@pytest.mark.parametrize("k", [2, 3])
def test_zero_bubble_with_several_stages_a_rank(k: int) -> None:
    for p in range(1, 9):
        for n in range(1, 20):
            missing = max(0, p - n)
            expected = 3 * k * n + p - 1 + k * missing + (k - 1) * max(0, missing - n)
            assert simulate(ZeroBubble(k).compute(p, n)).step_time == expected, (p, n)


@pytest.mark.parametrize("name", TABLE)
def test_forward_only(name: str) -> None:
    schedule = TABLE[name].schedule
    for p in (1, 2, 3, 4, 8, 13):
        for n in (1, 2, p, 2 * p + 1, 33):
            program = schedule.forward_only(p, n)
            assert program.is_forward_only
            k = schedule.stages_per_rank
            simulation = simulate(program, rendezvous=True)
            assert simulation.peak_activations == (1,) * p
            assert work(program) == sorted(f"{stage}F{m}" for stage in range(k * p) for m in range(n))
            # The last microbatch starts when all before it are through a rank's stages, or can only then.
            assert simulation.step_time <= k * n + 2 * (k * p - 1), (p, n)
            assert simulation.step_time >= max(k * n, n + k * p - 1), (p, n)


def test_large_programs_take_seconds() -> None:
    program = OneForwardOneBackward().program(64, 256)
    assert simulate(program).step_time == 3 * (256 + 63)


if __name__ == "__main__":
    for name, row in {**TABLE, **MORE}.items():
        for p in range(1, 17):
            for n in range(row.least(p), 65):
                check_one(row, p, n)
                check_with_messages(row, p, n)
        print(name, file=sys.stderr)
