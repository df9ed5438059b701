"""What is refused, what is noted, and which settings are named."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lightning_d9d import ConfigError
from lightning_d9d.memory import (
    GPU_OVERHEAD,
    Overhead,
    StagesHeld,
    StepMemory,
    StepSettings,
    advice,
    device_bytes,
    most_in_use,
    refuse_too_large,
)
from lightning_d9d.memory.held import StageHeld
from lightning_d9d.memory.layers import Microbatch, StageShares
from lightning_d9d.memory.peak import GradientRules, PeakBytes
from lightning_d9d.memory.spread import Part, Share, Weight
from lightning_d9d.memory.step import GIB
from lightning_d9d.schedule import LayerCosts, ModelCosts, OneForwardOneBackward

LAYER = LayerCosts(activation_bytes=10 * GIB, selective_bytes=4 * GIB, output_bytes=1 * GIB, weight_bytes=5 * GIB)
WEIGHT = Weight(shape=(5, GIB // 2), dtype=torch.bfloat16, part=Part.MLP)
SHARE = Share(weight=WEIGHT, gathered=WEIGHT.shape, shape=WEIGHT.shape, num_shards=1, num_copies=1, is_unit=False)
HELD = StagesHeld(
    microbatch=Microbatch(costs=ModelCosts(layers=(LAYER,) * 4), tokens=1, rows=1),
    stages={0: StageHeld(layers=range(4), shares=StageShares([(SHARE,)] * 4, (), ()))},
    actions=OneForwardOneBackward().program(1, 1).ranks[0],
    rules=GradientRules(),
)
NOTHING = Overhead(workspace=0, pools=0, fragments=0.0, outside=0)
STEP = StepMemory(
    weights=20 * GIB,
    gradients=20 * GIB,
    gradients_in_backward=1 * GIB,
    states=40 * GIB,
    eight_bit_states=21 * GIB,
    held=HELD,
    overhead=NOTHING,
)
ONE_ROW = StepSettings(num_rows=1)


def test_parts_by_hand() -> None:
    """The backward of the last layer has all activations, the gradient of an output, and the layer's gradients."""
    memory = STEP.of(ONE_ROW)
    parts = {"weights": 20, "states": 40, "activations": 40, "working": 1, "gradients": 5}
    assert memory.peak == PeakBytes(constant=0, **{name: value * GIB for name, value in parts.items()})
    assert memory.certain == 80 * GIB
    assert memory.total == 106 * GIB
    unknown = STEP.of(StepSettings())
    assert not unknown.knows_activations
    assert unknown.total == unknown.certain == 80 * GIB
    # The first layer is whole again when three others have left gradients.
    assert STEP.of(StepSettings(recompute="full", num_rows=1)).total == (20 + 40 + 1 + 9 + 1 + 4 * 5) * GIB
    # Each layer's gradients are gone before the next: most is there with all inputs.
    small = StepSettings(recompute="full", num_rows=1, step_in_backward=True, eight_bits=True)
    assert STEP.of(small).total == (20 + 21 + 4 + 9 + 1 + 5) * GIB
    halves = STEP.of(StepSettings(num_ranks=2))
    assert (halves.peak.weights, halves.peak.gradients, halves.peak.states) == (10 * GIB, 10 * GIB, 20 * GIB)


def test_what_a_device_needs_besides() -> None:
    memory = dataclasses.replace(STEP, overhead=GPU_OVERHEAD).of(ONE_ROW)
    assert memory.total == 106 * GIB + 33 * 2**20
    assert memory.needed == int(1.06 * memory.total) + (256 + 700) * 2**20


def test_gradients_of_earlier_batches() -> None:
    rules = GradientRules(accumulates=True, accumulates_batches=True, wide=2)
    held = dataclasses.replace(HELD, rules=rules)
    accumulated = dataclasses.replace(STEP, held=held, accumulates=True)
    assert accumulated.of(ONE_ROW).total == 126 * GIB
    small = StepSettings(recompute="full", num_rows=1, step_in_backward=True, eight_bits=True)
    assert accumulated.of(small).peak.gradients >= 20 * GIB  # all are there before the last microbatch


def test_what_fits_is_not_noted() -> None:
    assert refuse_too_large(STEP, ONE_ROW, 106 * GIB) is None


def test_what_is_close_is_noted() -> None:
    note = refuse_too_large(STEP, ONE_ROW, 102 * GIB)  # less than 5 % too little
    assert note == (
        "a training step needs at least 106.0 GiB of 102.0 GiB on this device: weights 20.0 GiB, gradients 5.0 GiB, "
        "states 40.0 GiB, activations 41.0 GiB, buffers 0.0 MiB. With fragments and what torch does not know it is "
        '106.0 GiB. If memory runs out, by arithmetic it fits with ParallelConfig(recompute="full") (91.0 GiB)'
    )


REFUSED = {
    "weights, gradients and states alone": (
        StepSettings(),
        79,
        "needs 80.0 GiB on this device, which has 79.0 GiB: weights 20.0 GiB, gradients 20.0 GiB, states 40.0 GiB, "
        "activations unknown, buffers 0.0 MiB; by arithmetic it fits with D9DStrategy(step_in_backward=True) "
        "(61.0 GiB)",
    ),
    "one change": (ONE_ROW, 99, 'it fits with ParallelConfig(recompute="full") (91.0 GiB)'),
    "the rows, if the kind is full": (
        StepSettings(recompute="full", num_rows=4),
        105,
        "it fits with microbatches of 2 rows (102.0 GiB)",
    ),
    "two changes": (
        ONE_ROW,
        72,
        'it fits with ParallelConfig(recompute="full") and StochasticAdamW(state_dtype=torch.uint8) (72.0 GiB)',
    ),
    "three changes": (
        ONE_ROW,
        60,
        'it fits with ParallelConfig(recompute="full") and D9DStrategy(step_in_backward=True) and '
        "StochasticAdamW(state_dtype=torch.uint8) (60.0 GiB)",
    ),
    "ranks": (
        StepSettings(),
        30,
        "it fits with weights sharded over 4 times as many ranks (MeshConfig.data_parallel_shard) (20.0 GiB)",
    ),
    "ranks and another": (
        ONE_ROW,
        30,
        'it fits with ParallelConfig(recompute="full") and weights sharded over 8 times as many ranks '
        "(MeshConfig.data_parallel_shard) (21.0 GiB)",
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
    assert "step_in_backward" not in advice(accumulated, ONE_ROW, 70 * GIB, can_step_in_backward=True)


def test_layers_that_do_not_say_what_they_keep() -> None:
    assert not STEP.of(StepSettings(recompute="attention", num_rows=1)).knows_activations
    frozen = dataclasses.replace(SHARE, weight=dataclasses.replace(WEIGHT, is_trained=False))
    stage = StageHeld(layers=range(4), shares=StageShares([(frozen,), *[(SHARE,)] * 3], (), ()))
    assert (
        not dataclasses.replace(STEP, held=dataclasses.replace(HELD, stages={0: stage})).of(ONE_ROW).knows_activations
    )


def test_the_advice_fits() -> None:
    """What is named for one amount of memory is not refused there."""
    for available in range(60, 130):
        text = advice(STEP, ONE_ROW, available * GIB, can_step_in_backward=True)
        settings = StepSettings(
            num_rows=1,
            recompute=next((kind for kind in ("full", "offload") if kind in text), "none"),
            eight_bits="uint8" in text,
            step_in_backward="in_backward" in text,
        )
        assert refuse_too_large(STEP, settings, available * GIB) is None


def test_only_a_gpu_has_memory_of_its_own() -> None:
    assert device_bytes(torch.device("cpu")) is None
    assert most_in_use(torch.device("cpu")) == 0


@pytest.mark.gpu
def test_memory_of_a_gpu() -> None:
    found = device_bytes(torch.device("cuda", 0))
    assert found == torch.cuda.mem_get_info()[1]


@pytest.mark.gpu
def test_the_most_memory_in_use_has_what_is_free_again_and_what_torch_does_not_know() -> None:
    device = torch.device("cuda", 0)
    before = most_in_use(device)
    torch.empty(2**30, dtype=torch.uint8, device=device)
    assert most_in_use(device) >= max(before, 2**30)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    assert most_in_use(device) == torch.cuda.max_memory_allocated(device) + total - free - torch.cuda.memory_reserved()
    assert most_in_use(device) > 2**30
