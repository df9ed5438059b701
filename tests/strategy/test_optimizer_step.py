"""`skip_nonfinite`: steps whose gradients are not finite are left out, on all ranks together, and counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_d9d import ConfigError, D9DStrategy, WeightedLoss
from lightning_d9d.optim import StochasticAdamW
from lightning_d9d.strategy.optimizer_step import takes_scalars
from tests.harness.compare import assert_close_named
from tests.harness.ranks import RankContext
from tests.strategy.plain import Plain, TwoOptimizers, loader, trainer
from tests.strategy.staged import Staged, staged_rows

BAD_BATCH = 1


class ExplodingPlain(Plain):
    """A module with one batch on the last rank whose gradient is not finite."""

    def __init__(self, fused: bool, factor: float) -> None:
        super().__init__(batch_norm=False)
        self.fused, self.factor = fused, factor

    def is_bad(self) -> bool:
        return (
            self.trainer.fit_loop.epoch_loop.batch_idx == BAD_BATCH and self.global_rank == self.trainer.world_size - 1
        )

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) * (self.factor if self.is_bad() else 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=self.fused)


class ExplodingStaged(Staged):
    def __init__(self, fused: bool, factor: float) -> None:
        super().__init__()
        self.fused, self.factor = fused, factor

    is_bad = ExplodingPlain.is_bad
    configure_optimizers = ExplodingPlain.configure_optimizers

    def microbatch_loss(self, output: Tensor, microbatch: Any) -> WeightedLoss:
        loss = super().microbatch_loss(output, microbatch)
        assert isinstance(loss, WeightedLoss)
        return WeightedLoss(loss.value_sum * (self.factor if self.is_bad() else 1), loss.weight)


class ExplodingStochastic(ExplodingStaged):
    """The same module with the optimizer of this package."""

    def configure_optimizers(self) -> Any:
        optimizer = StochasticAdamW(self.parameters(), lr=0.01)
        assert takes_scalars(optimizer)
        return optimizer


class Watch(Callback):
    """Records all weights in one tensor after each batch, and the logged number of skipped steps."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.skipped: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.weights.append(torch.cat([p.detach().reshape(-1).clone() for p in module.parameters()]).cpu())
        self.skipped.append(float(trainer.callback_metrics["skipped_steps"]))


CLIPS = [{}, {"gradient_clip_val": 0.1}, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}]


def check(make: Any, fused: bool, factor: float, clip: dict[str, Any], devices: int, device: str = "cpu") -> Tensor:
    watch, strategy = Watch(), D9DStrategy(skip_nonfinite=True)
    run = trainer(strategy, devices, device, max_epochs=1, callbacks=[watch], **clip)
    data = (
        loader(16 * devices)
        if make is ExplodingPlain
        else torch.utils.data.DataLoader(
            staged_rows(16 * devices, ignored_every=None),
            batch_size=4,  # type: ignore[arg-type]
        )
    )
    run.fit(make(fused, factor), data)
    assert watch.skipped == [0, 1, 1, 1]
    assert strategy.num_skipped_steps == 1
    torch.testing.assert_close(watch.weights[1], watch.weights[0], rtol=0, atol=0)
    for before, after in ((1, 2), (2, 3)):
        assert not torch.equal(watch.weights[before], watch.weights[after])
    assert watch.weights[-1].isfinite().all()
    return watch.weights[-1]


@pytest.mark.parametrize("clip", CLIPS, ids=str)
@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("make", [ExplodingPlain, ExplodingStaged])
def test_a_bad_step_is_left_out(make: Any, fused: bool, factor: float, clip: dict[str, Any]) -> None:
    check(make, fused, factor, clip, devices=1)


@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_stochastic_adamw_leaves_it_out(clip: dict[str, Any]) -> None:
    """Float32 weights, which it updates as torch does."""
    ours = check(ExplodingStochastic, True, float("inf"), clip, devices=1)
    theirs = check(ExplodingStaged, True, float("inf"), clip, devices=1)
    assert_close_named("weights", ours, theirs)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("clip", CLIPS, ids=str)
@pytest.mark.parametrize("make", [ExplodingPlain, ExplodingStaged])
def test_all_ranks_leave_it_out(rank: RankContext, make: Any, clip: dict[str, Any]) -> None:
    weights = check(make, False, float("inf"), clip, devices=2, device=str(rank.device))
    first, second = rank.all_gather_object(weights)
    torch.testing.assert_close(second, first, rtol=0, atol=0)


def test_without_it_the_weights_are_lost() -> None:
    module = ExplodingPlain(False, float("inf"))
    trainer(D9DStrategy(), max_epochs=1).fit(module, loader(16))
    assert not module.net[0].weight.isfinite().any()


def test_manual_optimization_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"skip_nonfinite=True: TwoOptimizers steps its optimizers itself"):
        trainer(D9DStrategy(skip_nonfinite=True)).fit(TwoOptimizers(), loader(8))
