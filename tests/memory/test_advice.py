"""What is refused, what is noted, and which settings are named."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lightning_d9d import ConfigError
from lightning_d9d.memory import RankMemory, StepMemory, StepSettings, advice, device_bytes, refuse_too_large
from lightning_d9d.memory.activations import Activations, StageLayers
from lightning_d9d.memory.step import GIB
from lightning_d9d.schedule import LayerCosts, ModelCosts, OneForwardOneBackward

LAYER = LayerCosts(activation_bytes=10 * GIB, selective_bytes=4 * GIB, output_bytes=1 * GIB)
ACTIVATIONS = Activations(
    costs=ModelCosts(layers=(LAYER,) * 4),
    stages={0: StageLayers(layers=range(4), is_first=True, is_last=True)},
    num_stages=1,
    actions=OneForwardOneBackward().program(1, 1).ranks[0],
)
STEP = StepMemory(
    weights=20 * GIB,
    gradients=20 * GIB,
    gradients_in_backward=1 * GIB,
    states=40 * GIB,
    eight_bit_states=21 * GIB,
    activations=ACTIVATIONS,
)
ONE_ROW = StepSettings(num_rows=1)


def test_parts_by_hand() -> None:
    memory = STEP.of(ONE_ROW)
    assert memory == RankMemory(weights=20 * GIB, gradients=20 * GIB, states=40 * GIB, activations=40 * GIB)
    assert memory.certain == 80 * GIB
    assert memory.total == 100 * GIB  # gradients take the place of activations
    accumulated = dataclasses.replace(STEP, accumulates_batches=True, gathered=3 * GIB)
    assert accumulated.of(ONE_ROW).total == 123 * GIB
    assert STEP.of(StepSettings()).activations is None
    small = StepSettings(recompute="full", num_rows=1, step_in_backward=True, eight_bits=True)
    assert STEP.of(small) == RankMemory(weights=20 * GIB, gradients=GIB, states=21 * GIB, activations=13 * GIB)
    assert accumulated.of(small).gradients == 20 * GIB  # all are there before the last microbatch
    halves = STEP.of(StepSettings(num_ranks=2))
    assert halves == RankMemory(weights=10 * GIB, gradients=10 * GIB, states=20 * GIB)


def test_what_fits_is_not_noted() -> None:
    assert refuse_too_large(STEP, ONE_ROW, 112 * GIB) is None


def test_what_is_close_is_noted() -> None:
    note = refuse_too_large(STEP, ONE_ROW, 96 * GIB)  # less than 5 % too little
    assert note == (
        "a training step needs at least 100.0 GiB of 96.0 GiB on this device: weights 20.0 GiB, gradients 20.0 GiB, "
        "states 40.0 GiB, activations 40.0 GiB, buffers 0.0 MiB. If memory runs out, by arithmetic it fits with "
        'ParallelConfig(recompute="full") (80.0 GiB)'
    )


REFUSED = {
    "weights, gradients and states alone": (
        StepSettings(),
        79,
        "needs 80.0 GiB on this device, which has 79.0 GiB: weights 20.0 GiB, gradients 20.0 GiB, states 40.0 GiB, "
        "activations unknown, buffers 0.0 MiB; by arithmetic it fits with D9DStrategy(step_in_backward=True) "
        "(61.0 GiB)",
    ),
    "one change": (ONE_ROW, 95, 'it fits with ParallelConfig(recompute="full") (80.0 GiB)'),
    "the rows, if the kind is full": (
        StepSettings(recompute="full", num_rows=4),
        90,
        "it fits with microbatches of 2 rows (86.0 GiB)",
    ),
    "two changes": (
        ONE_ROW,
        62,
        'it fits with ParallelConfig(recompute="full") and StochasticAdamW(state_dtype=torch.uint8) (61.0 GiB)',
    ),
    "three changes": (
        ONE_ROW,
        60,
        'it fits with ParallelConfig(recompute="full") and D9DStrategy(step_in_backward=True) and '
        "StochasticAdamW(state_dtype=torch.uint8) (54.0 GiB)",
    ),
    "ranks": (
        StepSettings(),
        30,
        "it fits with weights sharded over 4 times as many ranks (MeshConfig.data_parallel_shard) (20.0 GiB)",
    ),
    "ranks and another": (
        ONE_ROW,
        30,
        'it fits with ParallelConfig(recompute="full") and weights sharded over 4 times as many ranks '
        "(MeshConfig.data_parallel_shard) (28.0 GiB)",
    ),
    "nothing": (ONE_ROW, 10, "no setting is known that makes it fit; take a smaller model or shorter sequences"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_fit_is_refused(name: str) -> None:
    settings, available, message = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        refuse_too_large(STEP, settings, available * GIB, can_step_in_backward=True)
    assert str(caught.value).endswith(message)


def test_what_cannot_be_is_not_advised() -> None:
    assert "step_in_backward" not in advice(STEP, ONE_ROW, 60 * GIB)
    other = dataclasses.replace(STEP, states=None, eight_bit_states=None)
    assert "StochasticAdamW" not in advice(other, ONE_ROW, 39 * GIB)
    accumulated = dataclasses.replace(STEP, accumulates=True)
    assert accumulated.of(ONE_ROW).total == STEP.of(ONE_ROW).total
    assert "step_in_backward" not in advice(accumulated, ONE_ROW, 70 * GIB, can_step_in_backward=True)


def test_the_advice_fits() -> None:
    """What is named for one amount of memory is not refused there."""
    for available in range(54, 130):
        text = advice(STEP, ONE_ROW, available * GIB, can_step_in_backward=True)
        settings = StepSettings(
            num_rows=1,
            recompute=next((kind for kind in ("full", "offload") if kind in text), "none"),
            eight_bits="uint8" in text,
            step_in_backward="in_backward" in text,
        )
        assert refuse_too_large(STEP, settings, int(available * GIB / 0.9) + 1) is None


def test_only_a_gpu_has_memory_of_its_own() -> None:
    assert device_bytes(torch.device("cpu")) is None


@pytest.mark.gpu
def test_memory_of_a_gpu() -> None:
    found = device_bytes(torch.device("cuda", 0))
    assert found == torch.cuda.mem_get_info()[1]
