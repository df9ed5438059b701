"""Division and clipping as one factor of a fused optimizer: the numbers of the passes over gradients that it saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_d9d import D9DStrategy
from lightning_d9d.strategy import train_step
from tests.harness.compare import assert_tensors_close
from tests.harness.ranks import RankContext
from tests.strategy.plain import trainer
from tests.strategy.staged import Staged, staged_rows


class Fused(Staged):
    def __init__(self) -> None:
        super().__init__(known_weight=True)  # but of accumulated batches
        self.norms: list[float] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)

    def on_train_batch_end(self, *_: Any) -> None:
        if "grad_norm" in self.trainer.callback_metrics:
            self.norms.append(float(self.trainer.callback_metrics["grad_norm"]))


class Looks(Callback):
    """A callback that looks at gradients, which are then divided and clipped for it."""

    def on_before_optimizer_step(self, *_: Any) -> None:
        pass


def fit(devices: int, device: str, options: dict[str, Any], *callbacks: Callback) -> tuple[Fused, int]:
    passes = 0
    scale = train_step.scale_gradients

    def counted(*arguments: Any) -> None:
        nonlocal passes
        passes += 1
        scale(*arguments)

    module, strategy = Fused(), D9DStrategy(microbatch_size=2)
    torch.manual_seed(0)
    train_step.scale_gradients = counted
    try:
        run = trainer(strategy, devices, device, max_epochs=2, callbacks=list(callbacks), **options)
        run.fit(module, DataLoader(staged_rows(24 * devices), batch_size=4))  # type: ignore[arg-type]
    finally:
        train_step.scale_gradients = scale
    return module, passes


OPTIONS: dict[str, dict[str, Any]] = {
    "clip": {"gradient_clip_val": 0.05},
    "divide": {"accumulate_grad_batches": 2},
    "divide and clip": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    "by value": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
}


def check(name: str, devices: int, device: str) -> dict[str, Tensor]:
    ours, passes = fit(devices, device, OPTIONS[name])
    theirs, passes_looked_at = fit(devices, device, OPTIONS[name], Looks())
    assert passes == (passes_looked_at if name == "by value" else 0)
    assert (passes_looked_at > 0) == ("accumulate_grad_batches" in OPTIONS[name])
    torch.testing.assert_close(torch.tensor(ours.norms), torch.tensor(theirs.norms), rtol=1e-5, atol=0)
    weights = {name: weight.cpu() for name, weight in ours.state_dict().items()}
    assert_tensors_close(weights, {name: weight.cpu() for name, weight in theirs.state_dict().items()})
    return weights


@pytest.mark.parametrize("name", OPTIONS)
def test_one_process(name: str) -> None:
    check(name, 1, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_one_gpu(name: str) -> None:
    check(name, 1, "cuda")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", OPTIONS)
def test_two_ranks(rank: RankContext, name: str) -> None:
    check(name, 2, str(rank.device))


def test_a_window_without_weight_is_skipped() -> None:
    """The factor of its gradients would be infinite."""

    class Empty(Fused):
        def microbatch_loss(self, output: Tensor, microbatch: Any) -> Any:
            loss: Any = super().microbatch_loss(output, microbatch)
            return type(loss)(loss.value_sum * 0, loss.weight * 0)

    strategy = D9DStrategy(microbatch_size=2)
    module = Empty()
    run = trainer(strategy, max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=0.1)
    run.fit(module, DataLoader(staged_rows(16), batch_size=4))  # type: ignore[arg-type]
    assert strategy.num_skipped_steps == 2
    fresh = Empty()
    fresh.configure_model()
    assert all(weight.isfinite().all() for weight in module.state_dict().values())


class LoadsUnfused(Fused):
    """A checkpoint's groups say whether they are fused, and win."""

    def on_train_start(self) -> None:
        self.trainer.optimizers[0].param_groups[0]["fused"] = False


@pytest.mark.parametrize("skip_nonfinite", [False, True])
def test_an_optimizer_whose_groups_are_not_fused(skip_nonfinite: bool) -> None:
    strategy = D9DStrategy(microbatch_size=2, skip_nonfinite=skip_nonfinite)
    run = trainer(strategy, max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=0.1)
    run.fit(LoadsUnfused(), DataLoader(staged_rows(32), batch_size=4))  # type: ignore[arg-type]
    assert run.global_step == 4
