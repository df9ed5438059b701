"""Times, memory and deadlocks of programs small enough to work out by hand."""

from __future__ import annotations

import pytest

from lightning_d9d.errors import ScheduleError
from lightning_d9d.schedule import (
    Backward,
    Costs,
    Forward,
    GPipe,
    OneForwardOneBackward,
    Program,
    SendForward,
    Simulation,
    Span,
    Unshard,
    ZeroBubble,
    bubble_ratio,
    simulate,
)


def times(simulation: Simulation) -> dict[str, tuple[float, float]]:
    return {str(span.action): (span.start, span.end) for span in simulation.spans}


def test_two_ranks_one_microbatch() -> None:
    program = OneForwardOneBackward().program(2, 1)
    costs = Costs(forward=[1, 2], backward_input=[3, 1], backward_weight=[1, 1], transfer=0.5, latency=0.25)
    simulation = simulate(program, costs)
    assert times(simulation) == {
        "0F0": (0, 1),
        "0SEND_F0": (1, 1.75),
        "1RECV_F0": (1, 1.75),
        "1F0": (1.75, 3.75),
        "1B0": (3.75, 5.75),
        "1SEND_B0": (5.75, 6.5),
        "0RECV_B0": (5.75, 6.5),
        "0B0": (6.5, 10.5),
    }
    assert simulation.step_time == 10.5
    assert simulation.compute_time == (5, 4)
    assert simulation.bubble_ratio == pytest.approx(1 - 9 / 21)


def test_durations_of_single_actions_come_first() -> None:
    program = OneForwardOneBackward().program(2, 1)
    costs = Costs(backward=1, durations={Forward(1, 0): 5, SendForward(0, 0): 2, Backward(0, 0): 0})
    assert times(simulate(program, costs))["1F0"] == (3, 8)
    assert simulate(program, costs).step_time == 9


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (Costs(forward=[1, 2, 3]), "Costs.forward has 3 numbers for 2 stages; give one for each"),
        (Costs(latency=-1), "Costs.latency=-1 must not be negative"),
        (Costs(unshard=[0, -2]), r"Costs.unshard=\[0, -2\] must not be negative"),
        (Costs(durations={Forward(0, 0): -0.5}), "Costs.durations={.*} must not be negative"),
    ],
)
def test_costs_that_cannot_be(costs: Costs, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(OneForwardOneBackward().program(2, 1), costs)


def test_messages_of_a_link_follow_one_another() -> None:
    program = GPipe().forward_only(2, 3)
    spans = times(simulate(program, Costs(transfer=4)))
    assert [spans[f"0SEND_F{m}"] for m in range(3)] == [(1, 5), (5, 9), (9, 13)]
    assert spans["1F2"] == (13, 14)


def test_with_rendezvous_a_rank_has_one_message_at_a_time() -> None:
    """Rank 1's receive of microbatch 1 holds back its send of microbatch 0, behind which it comes in its order."""
    program = Program.parse(
        "0F0 0SEND_F0 0F1 0SEND_F1\n1RECV_F0 1F0 1RECV_F1 1SEND_F0 1F1 1SEND_F1\n2RECV_F0 2F0 2RECV_F1 2F1"
    )
    costs = Costs(forward=[10, 1, 1], transfer=1)
    assert times(simulate(program, costs))["1SEND_F0"] == (12, 13)
    assert times(simulate(program, costs, rendezvous=True))["1SEND_F0"] == (21, 22)


def test_a_send_waits_for_its_receive_with_rendezvous_alone() -> None:
    program = Program.parse("0F0 0SEND_F0 0F1 0SEND_F1\n1RECV_F0 1F0 1RECV_F1 1F1")
    costs = Costs(forward=[1, 10])
    assert times(simulate(program, costs))["0SEND_F1"] == (2, 2)
    assert times(simulate(program, costs, rendezvous=True))["0SEND_F1"] == (11, 11)


def test_a_pair_starts_when_both_can_and_ends_as_one() -> None:
    program = Program.parse("0F0 0F1 0F2|0B0 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2")
    spans = times(simulate(program, Costs(overlapped=0.5)))
    assert spans["1B0"] == (2, 4)
    assert spans["0F2|0B0"] == (4, 5.5)
    assert spans["1F2"] == (7, 8)


def test_collectives_run_beside_computation() -> None:
    program = Program.parse("0UNSHARD 1UNSHARD 0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD 0RESHARD 1RESHARD")
    simulation = simulate(program, Costs(unshard=2, reduce_gradients=[3, 4]))
    assert times(simulation) == {
        "0UNSHARD": (0, 2),
        "1UNSHARD": (2, 4),
        "0F0": (2, 3),
        "1F0": (4, 5),
        "1B0": (5, 7),
        "1REDUCE_GRAD": (7, 11),
        "0B0": (7, 9),
        "0REDUCE_GRAD": (11, 14),
        "0RESHARD": (14, 14),
        "1RESHARD": (14, 14),
    }
    assert simulation.step_time == 14
    assert times(simulate(program, Costs(durations={Unshard(0): 1})))["0F0"] == (1, 2)


def test_a_split_backward_keeps_activations_until_its_weight_backward() -> None:
    program = Program.parse("0F0 1F0 1I0 0F1 1W0 0B0 1F1 1B1 0B1")
    simulation = simulate(program, Costs(activation=[1.0, 10.0]))
    assert simulation.peak_activations == (3,)
    assert simulation.peak_memory == (12.0,)
    assert simulate(program, Costs(activation=[1.0, 10.0], split_activation=[1.0, 4.0])).peak_memory == (11.0,)
    assert simulate(program, Costs(activation=[1.0, 10.0], split_activation=[1.0, 12.0])).peak_memory == (14.0,)
    assert simulate(Program.parse("0F0 0F1 1F0 1F1")).peak_activations == (1,)
    assert simulate(ZeroBubble().program(4, 8), Costs(activation=2.5)).peak_memory == (10.0,) * 4


def test_an_order_that_waits_in_a_circle() -> None:
    assert simulate(Program.parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")).step_time == 9
    assert simulate(Program.parse("0F0 0F1 0B1 0B0\n1F0 1F1 1B0 1B1")).step_time == 11
    with pytest.raises(
        ScheduleError,
        match=r"^deadlock: rank 0 at 0B0 waits for the backward 1B0 of rank 1; rank 1 at 1F1 waits for 0F1 of rank 0\. "
        "Put one of these actions earlier on its rank",
    ):
        simulate(Program.parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"))


def test_a_circle_that_not_every_rank_is_in() -> None:
    """Rank 2 waits too, but it is not the reason."""
    with pytest.raises(ScheduleError) as caught:
        simulate(Program.parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1\n2F1 2F0 2B0 2B1"))
    assert "rank 0 at 0B0 waits for the backward 1B0 of rank 1" in str(caught.value)
    with pytest.raises(ScheduleError) as caught:
        simulate(Program.parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n2F0 2F1 2B0 2B1"))
    assert str(caught.value).startswith(
        "deadlock: rank 1 at 1B0 waits for the backward 2B0 of rank 2; rank 2 at 2F1 waits for 1F1 of rank 1. "
    )


def test_message_orders_that_cross_deadlock_with_rendezvous_alone() -> None:
    """Both ranks send first. Where messages wait for nobody that works."""
    program = Program.parse(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    )
    assert simulate(program).step_time == 9
    with pytest.raises(
        ScheduleError,
        match="deadlock: rank 0 in 0SEND_F1 waits for 1RECV_F1 of rank 1; "
        "rank 1 in 1SEND_B0 waits for 0RECV_B0 of rank 0",
    ):
        simulate(program, rendezvous=True)


def test_bubble_of_measured_spans() -> None:
    spans = [Span(0, Forward(0, 0), 100, 103), Span(0, SendForward(0, 0), 103, 110), Span(1, Forward(1, 0), 105, 110)]
    assert bubble_ratio(spans) == pytest.approx(1 - 8 / 20)
    assert bubble_ratio([]) == 0
    measured = Costs(durations={span.action: span.end - span.start for span in spans})
    again = simulate(Program.parse("0F0 0SEND_F0\n1RECV_F0 1F0"), measured)
    assert again.step_time == 3 + 7 + 5
