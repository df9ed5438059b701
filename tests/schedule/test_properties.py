"""Random legal programs run as the reference says; broken ones are refused when it says so."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_d9d.errors import ScheduleError
from lightning_d9d.schedule import (
    Costs,
    Program,
    ReceiveBackward,
    ReceiveForward,
    SendBackward,
    SendForward,
    add_data_parallel,
    add_messages,
    check,
    merge_backwards,
    simulate,
)
from lightning_d9d.schedule.check import matching
from lightning_d9d.schedule.communications import COSTS
from tests.schedule.programs import broken, programs
from tests.schedule.reference import Machine, Stuck

# The same examples every time; a slow machine is no failure.
STABLE = settings(max_examples=120, deadline=None, derandomize=True, database=None)

DURATIONS = st.fixed_dictionaries({kind: st.integers(1, 4) for kind in "FIWB"})


def costs(durations: dict[str, int], transfer: int, latency: int) -> Costs:
    return Costs(
        forward=durations["F"],
        backward_input=durations["I"],
        backward_weight=durations["W"],
        backward=durations["B"],
        transfer=transfer,
        latency=latency,
    )


@STABLE
@given(programs(), DURATIONS, st.integers(0, 3), st.integers(0, 2), st.booleans(), st.booleans())
def test_times_are_the_references(
    program: Program, durations: dict[str, int], transfer: int, latency: int, rendezvous: bool, messages: bool
) -> None:
    if messages:
        program = add_messages(program)
    simulation = simulate(program, costs(durations, transfer, latency), rendezvous=rendezvous)
    reference = Machine(program, durations, transfer, latency, rendezvous)
    assert simulation.step_time == reference.run()
    assert sorted((rank, str(action), start, end) for rank, action, start, end in simulation.spans) == sorted(
        reference.spans
    )


@STABLE
@given(programs())
def test_messages_are_one_order_and_cost_nothing_on_free_links(program: Program) -> None:
    whole = add_messages(program)
    check(whole)
    before: dict[str, set[str]] = {}
    for actions in whole.ranks:
        sends = []
        for action in actions:
            if isinstance(action, SendForward | SendBackward):
                sends.append(str(action))
            elif isinstance(action, ReceiveForward | ReceiveBackward):
                sends.append(str(matching(action)))
        for one, other in pairwise(sends):
            before.setdefault(other, set()).add(one)
    list(TopologicalSorter(before).static_order())  # raises CycleError if ranks' orders have none in common
    for times in (Costs(), COSTS):
        free, run = simulate(program, times), simulate(whole, times)
        assert run.step_time == free.step_time
        assert run.peak_activations == free.peak_activations
        simulate(whole, times, rendezvous=True)  # one message may hold up the next, but none locks
    assert compute(whole) == compute(program)


def compute(program: Program) -> list[list[str]]:
    return [[str(action) for action in actions if "_" not in str(action)] for actions in program.ranks]


def test_orders_that_cross_have_no_order_in_common() -> None:
    with pytest.raises(CycleError):
        list(TopologicalSorter({"a": {"b"}, "b": {"a"}}).static_order())


@STABLE
@given(programs())
def test_passes_keep_programs_legal_and_text_reads_back(program: Program) -> None:
    whole = add_data_parallel(add_messages(merge_backwards(program)))
    check(whole)
    for text in (str(whole), whole.csv()):
        assert Program.parse(text) == whole
    reduced = [str(action) for actions in whole.ranks for action in actions if "REDUCE" in str(action)]
    stages = [] if program.is_forward_only else [f"{stage}REDUCE_GRAD" for stage in range(program.num_stages)]
    assert sorted(reduced) == sorted(stages)


@settings(STABLE, max_examples=500)
@given(broken(), st.booleans())
def test_what_cannot_run_is_refused_and_nothing_else(program: Program, rendezvous: bool) -> None:
    try:
        Machine(program, dict.fromkeys("FIWB", 1), rendezvous=rendezvous).run()
    except Stuck:
        with pytest.raises(ScheduleError):
            simulate(program, rendezvous=rendezvous)
    else:
        simulate(program, rendezvous=rendezvous)


@STABLE
@given(programs(), st.data())
def test_nothing_can_be_left_out_or_doubled(program: Program, data: st.DataObject) -> None:
    """This holds for each action of a training program."""
    program = add_messages(program)
    if program.is_forward_only or program.num_stages * program.num_microbatches == 1:
        return  # without its only backward it would be a forward-only program
    ranks = [list(actions) for actions in program.ranks]
    rank = data.draw(st.integers(0, len(ranks) - 1))
    place = data.draw(st.integers(0, len(ranks[rank]) - 1))
    for changed in (ranks[rank][:place] + ranks[rank][place + 1 :], [*ranks[rank], ranks[rank][place]]):
        wrong = [*ranks[:rank], changed, *ranks[rank + 1 :]]
        with pytest.raises(ScheduleError):
            check(Program(tuple(map(tuple, wrong)), program.placement, program.num_microbatches))
