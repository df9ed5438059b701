"""Costs read off spans are those that the spans were simulated with."""

from __future__ import annotations

import pytest

from lightning_d9d.schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Costs,
    Forward,
    Simulation,
    Span,
    resolve_schedule,
    simulate,
)
from lightning_d9d.schedule.actions import COMPUTE
from lightning_d9d.schedule.spans import mean_costs, mean_times, message_time

COSTS = Costs(
    forward=[1.0, 2.0, 3.0, 4.0] * 2,
    backward_input=[1.5, 2.5, 3.5, 4.5] * 2,
    backward_weight=[0.5, 0.25, 0.75, 1.0] * 2,
    backward=[1.75, 2.5, 4.0, 5.0] * 2,
    latency=0.125,
)


def measured(simulation: Simulation) -> list[Span]:
    """Return only the computation of a step, as it is measured."""
    return [span for span in simulation.spans if isinstance(span.action, COMPUTE)]


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zero_bubble_v"])
def test_costs_of_a_step_give_its_simulation(schedule: str) -> None:
    program = resolve_schedule(schedule).program(4, 8)
    simulation = simulate(program, COSTS)
    costs = mean_costs(measured(simulation), program.placement)
    assert costs.latency == pytest.approx(COSTS.latency)
    assert costs.forward == pytest.approx(COSTS.forward)
    again = simulate(program, costs)
    assert again.step_time == pytest.approx(simulation.step_time)
    assert again.bubble_ratio == pytest.approx(simulation.bubble_ratio)


def test_mean_times_are_of_each_stage_and_kind() -> None:
    spans = [
        Span(0, Forward(0, 0), 0.0, 1.0),
        Span(0, Forward(0, 1), 1.0, 4.0),
        Span(1, Backward(1, 0), 1.0, 3.0),
        Span(1, BackwardInput(1, 1), 3.0, 4.0),
    ]
    assert mean_times(spans) == {(Forward, 0): 2.0, (Backward, 1): 2.0, (BackwardInput, 1): 1.0}
    costs = mean_costs(spans, (0, 1))
    assert costs == Costs(
        forward=[2.0, 0.0],
        backward=[0.0, 2.0],
        backward_input=[0.0, 1.0],
        backward_weight=[0.0, 0.0],
        latency=costs.latency,
    )


def test_only_who_waits_knows_the_time_of_a_message() -> None:
    busy = [
        Span(0, Forward(0, 0), 0.0, 1.0),
        Span(1, Forward(1, 7), 0.0, 5.0),
        Span(1, Forward(1, 0), 5.0, 6.0),
        Span(1, BackwardWeight(1, 7), 6.0, 7.0),
    ]
    assert message_time(busy, (0, 1)) is None
    waits = [*busy, Span(0, Forward(0, 1), 6.5, 8.0), Span(1, Forward(1, 1), 8.25, 9.0)]
    assert message_time(waits, (0, 1)) == 0.25
    early = [*busy, Span(0, Forward(0, 1), 6.5, 8.0), Span(1, Forward(1, 1), 7.5, 9.0)]
    assert message_time(early, (0, 1)) == 0.0
    assert message_time(waits, (0, 0)) is None
