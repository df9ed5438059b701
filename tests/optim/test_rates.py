"""Learning rates in phases: places, curves, limits of a run, state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.optim import SGD

from lightning_d9d.errors import ConfigError
from lightning_d9d.optim import Phase, PiecewiseLR, WarmupStableDecayLR, learning_rates

THREE_PHASES = [Phase(1.0, steps=2), Phase(0.1, until=0.5), Phase(0.01)]


def sgd(*rates: float | torch.Tensor) -> SGD:
    return SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (1.0,)])


def test_rates_of_three_phases() -> None:
    rates = learning_rates(PiecewiseLR(sgd(0.1), THREE_PHASES, total_steps=10), 13)
    assert rates == pytest.approx(
        [0, 0.05, 0.1, 0.07, 0.04, 0.01, 0.0082, 0.0064, 0.0046, 0.0028, 0.001, 0.001, 0.001], abs=1e-12
    )


@pytest.mark.parametrize(
    ("phase", "middle"),
    [
        (Phase(0.2, steps=4), 0.6),
        (Phase(0.2, steps=4, curve="cosine"), 0.6),
        (Phase(0.2, steps=4, curve="polynomial"), 1 - 0.8 / 4),
        (Phase(0.2, steps=4, curve="polynomial", power=0.5), 1 - 0.8 * math.sqrt(0.5)),
        (Phase(0.2, steps=4, curve="exponential"), math.sqrt(0.2)),
        (Phase(0.0, steps=4, curve="exponential"), 1e-4),
    ],
)
def test_curves(phase: Phase, middle: float) -> None:
    rates = learning_rates(PiecewiseLR(sgd(), [phase], initial=1.0), 5)
    assert (rates[0], rates[2], rates[4]) == pytest.approx((1.0, middle, phase.to), abs=1e-12)


def test_a_cosine_is_slow_at_both_ends() -> None:
    rates = learning_rates(PiecewiseLR(sgd(), [Phase(0.0, steps=8, curve="cosine")], initial=1.0), 8)
    assert rates[1] == pytest.approx((1 + math.cos(math.pi / 8)) / 2)


def test_phases_without_steps_move_the_factor() -> None:
    rates = learning_rates(PiecewiseLR(sgd(), [Phase(0.5, steps=0), Phase(1.0, steps=2)]), 3)
    assert rates == [0.5, 0.75, 1.0]


def test_fractions_that_floats_do_not_have() -> None:
    assert 0.29 * 100 < 29
    phases = [Phase(1.0, until=0.29), Phase(0.0, steps=1)]
    rates = learning_rates(PiecewiseLR(sgd(), phases, initial=1.0, total_steps=100), 31)
    assert (rates[29], rates[30]) == (1.0, 0.0)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_groups_keep_their_own_rates(as_tensor: bool) -> None:
    rates = [torch.tensor(value) if as_tensor else value for value in (1.0, 0.25)]
    optimizer = sgd(*rates)
    scheduler = WarmupStableDecayLR(optimizer, warmup_steps=2)
    scheduler.set_total_steps(10)
    for expected in (0.0, 0.5, 1.0, 1.0):
        assert [float(group["lr"]) for group in optimizer.param_groups] == [expected, expected / 4]
        optimizer.step()
        scheduler.step()


def test_warmup_stable_decay() -> None:
    rates = learning_rates(WarmupStableDecayLR(sgd(), warmup_steps=2, decay_fraction=0.4, final=0.2), 10)
    assert rates == pytest.approx([0, 0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4])


def test_a_decay_over_the_whole_run_begins_behind_the_warmup() -> None:
    rates = learning_rates(WarmupStableDecayLR(sgd(), warmup_steps=2, decay_fraction=1, curve="cosine"), 6)
    assert rates == pytest.approx([0, 0.5, *((1 + math.cos(math.pi * step / 4)) / 2 for step in range(4))])


def test_no_warmup_begins_at_the_top() -> None:
    assert learning_rates(WarmupStableDecayLR(sgd(), decay_fraction=0.5), 4) == [1, 1, 1, 0.5]


def test_state_has_the_step_and_no_phases() -> None:
    """So a run that goes on may be longer, and a checkpoint has nothing that only trusted files may have."""
    optimizer = sgd(0.1)
    scheduler = PiecewiseLR(optimizer, THREE_PHASES, total_steps=10)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    state = scheduler.state_dict()
    assert not {"phases", "total_steps", "initial"} & state.keys()
    assert all(isinstance(value, int | float | list) for value in state.values())
    resumed_optimizer = sgd(0.1)
    resumed = PiecewiseLR(resumed_optimizer, THREE_PHASES, total_steps=20)
    resumed.load_state_dict(state)
    resumed_optimizer.load_state_dict(optimizer.state_dict())
    resumed_optimizer.step()
    resumed.step()
    assert resumed.get_last_lr() == [pytest.approx(0.1 * (1 - 0.9 * 3 / 8))]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PiecewiseLR(sgd(), []), "PiecewiseLR got no phases"),
        (lambda: PiecewiseLR(sgd(), THREE_PHASES, initial=-1.0), "initial=-1.0 of PiecewiseLR must be at least 0"),
        (
            lambda: PiecewiseLR(sgd(), [Phase(1, steps=6), Phase(0, steps=5)], total_steps=10),
            r"phase 1 .* ends at step 11, but the run has 10 optimizer steps; give phases fewer steps",
        ),
        (
            lambda: PiecewiseLR(sgd(), [Phase(1, steps=6), Phase(0, steps=5)]).set_total_steps(10),
            r"phase 1 .* ends at step 11, but the run has 10 optimizer steps",
        ),
        (
            lambda: PiecewiseLR(sgd(), [Phase(1), Phase(0, steps=1)], total_steps=10),
            r"phase 1 .* ends at step 11, but the run has 10",
        ),
        (
            lambda: PiecewiseLR(sgd(), [Phase(1, steps=6), Phase(0, until=0.5)], total_steps=10),
            r"phase 1 .* ends at step 5 of 10, but the phases before take 6; set until to at least 6/10",
        ),
        (
            lambda: learning_rates(WarmupStableDecayLR(sgd(), warmup_steps=11), 10),
            r"phase 0 .* ends at step 11, but the run has 10",
        ),
        (lambda: WarmupStableDecayLR(sgd()).factor(1), r"phase 1 .* needs the number of steps of the run.*max_steps"),
        (lambda: WarmupStableDecayLR(sgd()).set_total_steps(None), r"phase 1 .* needs the number of steps"),
        (lambda: WarmupStableDecayLR(sgd(), warmup_steps=-1), "warmup_steps=-1 of WarmupStableDecayLR"),
        (lambda: WarmupStableDecayLR(sgd(), decay_fraction=2), "decay_fraction=2 of WarmupStableDecayLR"),
        (lambda: Phase(1.0, steps=1, until=0.5), "steps=1 and until=0.5, which both set its end"),
        (lambda: Phase(-1.0), "to=-1.0 of Phase"),
        (lambda: Phase(1.0, steps=-1), "steps=-1 of Phase"),
        (lambda: Phase(1.0, until=50), "until=50 of Phase must be between 0 and 1"),
        (lambda: Phase(1.0, curve="cosin"), "curve='cosin' of Phase must be one of .*did you mean 'cosine'"),  # type: ignore[arg-type]
        (lambda: Phase(1.0, power=2.0), "power=2.0 of Phase has no effect on curve='linear'"),
        (lambda: Phase(1.0, curve="polynomial", power=0.0), "power=0.0 of Phase must be above 0"),
    ],
)
def test_what_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
