"""Averages of weights on meshes equal those of one process; they are saved, and go on on another mesh."""

from __future__ import annotations

from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_d9d import D9DStrategy
from lightning_d9d.callbacks import WeightAverages
from lightning_d9d.parallel import ParallelConfig
from lightning_d9d.strategy.saving import CheckpointConfig
from tests.harness.compare import assert_bitwise_equal, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Tolerance
from tests.meshes.cases import LAYERS, Case, parameters
from tests.meshes.equality import CLIP, Watched, on_one_process, whole
from tests.meshes.test_step_in_backward import Inside
from tests.strategy.plain import trainer

STEPS, SAVED_AFTER, SEED = 4, 3, 1
EXACT = Tolerance(relative=1e-9)


class Settings(NamedTuple):
    """The settings of the callback."""

    decay: float | None = 0.7
    start_step: int = 2
    every_n_steps: int = 1

    def averages(self) -> WeightAverages:
        return WeightAverages(self.decay, self.every_n_steps, self.start_step)


SETTINGS = Settings()

CASES = [
    Case("shard4", fast=True),
    Case("rep2 shard2"),
    Case("rep4 ep4"),
    Case("tp2", tied=True),
    Case("pp2", schedule="zero_bubble_v", tied=True, fast=True),
    Case("pp2 shard2", tied=True, accumulated=2),
    Case("shard2", peft=LAYERS, fast=True),
]


class Saving(L.Callback):
    """Saves after a step, and stops there."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == SAVED_AFTER:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def expected_of(case: Case, settings: Settings) -> dict[str, Tensor]:
    """Compute the averages by hand, in one process."""
    L.seed_everything(SEED, verbose=False)
    steps = on_one_process(case.model, STEPS, case.accumulated, data=case.data, peft=case.peft)
    chosen = steps.weights[settings.start_step - 1 :: settings.every_n_steps]
    averages = dict(chosen[0])
    for number, weights in enumerate(chosen[1:], 2):
        share = 1 / number if settings.decay is None else 1 - settings.decay
        averages = {name: (1 - share) * average + share * weights[name] for name, average in averages.items()}
    return {name: averages[name] for name in steps.gradients[0]}


def fitted(
    rank: RankContext,
    case: Case,
    averages: WeightAverages,
    *callbacks: L.Callback,
    load_from: str | None = None,
    mode: Any = "auto",
    in_backward: bool = False,
    **settings: Any,
) -> dict[str, Tensor]:
    """The averages that this rank holds at the end, whole."""
    L.seed_everything(SEED, verbose=False)
    module = (Inside if in_backward else Watched)(case.model, STEPS * case.accumulated, data=case.data, peft=case.peft)
    strategy = D9DStrategy(
        **case.strategy_options, step_in_backward=in_backward, checkpoint=CheckpointConfig(mode=mode)
    )
    settings = {
        "precision": "64-true",
        "max_epochs": 1,
        "use_distributed_sampler": False,
        "gradient_clip_val": CLIP,
        **settings,
    }
    run = trainer(
        strategy,
        rank.world_size,
        rank.device.type,
        accumulate_grad_batches=case.accumulated,
        callbacks=[averages, *callbacks],
        **settings,
    )
    run.fit(module, ckpt_path=load_from)
    return {name: whole(average) for name, average in averages.averages.items()}


def check(rank: RankContext, actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert_tensors_close(actual, {name: expected[name] for name in actual}, tolerance=EXACT)
    assert set().union(*rank.all_gather_object(set(actual))) == expected.keys()


def marks_of(fast: bool) -> list:
    return [] if fast else [pytest.mark.meshes]


def routes() -> list:
    pairs = [("shard2", "pp2"), ("pp2", "shard2"), ("rep2 ep2", "shard2")]
    fast = {("shard2", "pp2", "sharded"), ("pp2", "shard2", "consolidated")}
    found = [(*pair, mode) for pair in pairs for mode in ("sharded", "consolidated")]
    return [pytest.param(*route, id="-".join(route), marks=marks_of(route in fast)) for route in found]


@pytest.mark.parametrize("case", parameters(CASES))
def test_a_mesh_averages_as_one_process_does(rank: RankContext, case: Case) -> None:
    """Tied parameters once; beside adapters, these alone."""
    expected = rank.from_first_rank(expected_of, case, SETTINGS)
    check(rank, fitted(rank, case, SETTINGS.averages()), expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("settings", [Settings(None, 1), Settings(None, 1, 2), Settings(0.5, 2, 3)])
def test_plain_means_and_updates_every_few_steps(rank: RankContext, settings: Settings) -> None:
    case = Case("shard2")
    expected = rank.from_first_rank(expected_of, case, settings)
    check(rank, fitted(rank, case, settings.averages()), expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("first", "second", "mode"), routes())
def test_averages_go_on_on_another_mesh(rank: RankContext, first: str, second: str, mode: str) -> None:
    """A resumed run on the same mesh has the bits of a run that was not stopped."""
    before, after = Case(first, tied=True), Case(second, tied=True)
    saved = str(rank.tmp_dir / "saved")
    through = fitted(rank, before, SETTINGS.averages())
    fitted(rank, before, SETTINGS.averages(), Saving(saved), mode=mode)
    again = SETTINGS.averages()
    for name, average in fitted(rank, before, again, load_from=saved, mode=mode).items():
        assert_bitwise_equal(name, average, through[name])
    assert again.num_updates == STEPS - 1
    expected = rank.from_first_rank(expected_of, before, SETTINGS)
    check(rank, fitted(rank, after, SETTINGS.averages(), load_from=saved, mode=mode), expected)


@pytest.mark.ranks(2)
def test_updates_inside_the_backward(rank: RankContext) -> None:
    case = Case("shard2", tied=True)
    apart, inside = (
        fitted(rank, case, SETTINGS.averages(), in_backward=each, gradient_clip_val=None) for each in (False, True)
    )
    assert_tensors_close(inside, apart, tolerance=EXACT)


class Validated(Watched):
    """Validates with its training batches."""

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=[pytest.mark.ranks(2), *marks_of(case.fast)])
        for case in (
            Case("shard2", parallel=ParallelConfig(reshard_after_forward=False), fast=True),
            Case("pp2", tied=True),  # each stage exchanges its own weights, as each shard does
        )
    ],
)
def test_validation_on_a_mesh_has_the_averages_and_leaves_the_weights(rank: RankContext, case: Case) -> None:
    """The loss is that of a model with the averages; decay 0 makes them the weights."""

    def trained(*callbacks: L.Callback) -> tuple[list[dict[str, Tensor]], Tensor]:
        L.seed_everything(SEED, verbose=False)
        module = Validated(case.model, STEPS)
        options = {"precision": "64-true", "max_epochs": 1, "use_distributed_sampler": False}
        options |= {"val_check_interval": 1, "limit_val_batches": 1}
        run = trainer(D9DStrategy(**case.strategy_options), 2, rank.device.type, callbacks=[*callbacks], **options)
        run.fit(module)
        return module.seen.weights, run.callback_metrics["val_loss"]

    weights, loss = trained()
    for decay in (0.0, 0.9):
        again, of_averages = trained(WeightAverages(decay))
        for step, (ours, theirs) in enumerate(zip(again, weights, strict=True)):
            for name in ours:
                assert_bitwise_equal(f"{name}, step {step}", ours[name], theirs[name])
        assert torch.equal(of_averages, loss) == (decay == 0)
