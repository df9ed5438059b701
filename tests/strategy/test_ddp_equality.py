"""Plain LightningModules: D9DStrategy gives what Lightning's DDPStrategy gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_d9d import D9DStrategy, GradSyncConfig, RankError
from tests.harness.compare import assert_bitwise_equal, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.strategy.plain import (
    AssignedBuffer,
    Frozen,
    FrozenInsideWindow,
    Plain,
    TwoOptimizers,
    Unused,
    loader,
    rows,
    trainer,
)


def fit(rank: RankContext, strategy: Any, make: Callable[[], L.LightningModule], **kwargs: Any) -> Any:
    L.seed_everything(7, verbose=False)
    module = make()
    run = trainer(strategy, rank.world_size, rank.device.type, **kwargs)
    run.fit(module, loader(28), loader(10) if scheduler_monitors(module) else [loader(10), loader(6)])
    return module, run


def scheduler_monitors(module: L.LightningModule) -> bool:
    """Whether a scheduler needs the value named "val", which several dataloaders would rename."""
    return getattr(module, "scheduler", None) == "plateau"


SCENARIOS: dict[str, tuple[Callable[[], L.LightningModule], dict[str, Any]]] = {
    "sgd, batch norm": (Plain, {}),
    "assigned buffer": (AssignedBuffer, {}),
    "adamw": (lambda: Plain("adamw"), {}),
    "accumulation with a short window": (Plain, {"accumulate_grad_batches": 3}),
    "accumulation from the second epoch on": (Plain, {"callbacks": [GradientAccumulationScheduler({1: 2})]}),
    "clip by value": (Plain, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "bf16-true": (lambda: Plain("adamw"), {"precision": "bf16-true"}),
    "bf16-mixed": (lambda: Plain("adamw"), {"precision": "bf16-mixed"}),
    "step scheduler": (lambda: Plain(scheduler="step"), {}),
    "manual optimization, two optimizers": (TwoOptimizers, {}),
    "limit batches": (Plain, {"limit_train_batches": 2, "limit_val_batches": 1}),
    "overfit batches": (Plain, {"overfit_batches": 2}),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", list(SCENARIOS))
def test_two_ranks_equal_ddp_bitwise(rank: RankContext, name: str) -> None:
    make, options = SCENARIOS[name]
    ours, our_run = fit(rank, D9DStrategy(grad_sync=GradSyncConfig(bucket_mb=0.0005)), make, **options)
    ddp = DDPStrategy(find_unused_parameters="optimizers" in name)
    theirs, their_run = fit(rank, ddp, make, **options)
    initial = make().state_dict()
    moved = [not torch.equal(value, initial[key]) for key, value in ours.state_dict().items() if "weight" in key]
    assert any(moved), "training changed nothing"
    for key, expected in theirs.state_dict().items():
        assert_bitwise_equal(key, ours.state_dict()[key], expected)
    assert our_run.global_step == their_run.global_step
    assert our_run.callback_metrics.keys() == their_run.callback_metrics.keys()
    assert_tensors_close(our_run.callback_metrics, their_run.callback_metrics)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("scheduler", [None, "plateau"])
def test_two_ranks_equal_ddp_with_clipping(rank: RankContext, scheduler: str | None) -> None:
    def make() -> L.LightningModule:
        return Plain(scheduler=scheduler, batch_norm=False)

    options = {"gradient_clip_val": 0.1, "max_epochs": 3}
    ours, our_run = fit(rank, D9DStrategy(), make, **options)
    theirs, their_run = fit(rank, DDPStrategy(), make, **options)
    assert_tensors_close(ours.state_dict(), theirs.state_dict())
    rates = [run.optimizers[0].param_groups[0]["lr"] for run in (our_run, their_run)]
    assert rates[0] == rates[1]


@pytest.mark.ranks(2)
def test_a_plain_modules_gradients_are_summed_in_the_chosen_dtype(rank: RankContext) -> None:
    """bf16 weights with float32 buckets: hooks see float32, and the optimizer steps."""
    weights = {}
    for dtype, expected in (("auto", torch.bfloat16), ("float32", torch.float32)):
        seen: set[torch.dtype] = set()

        class Watch(Plain):
            def on_before_optimizer_step(self, optimizer: Any, seen: set[torch.dtype] = seen) -> None:
                seen.update(p.grad.dtype for p in self.parameters() if p.grad is not None)

        module, _ = fit(
            rank,
            D9DStrategy(grad_sync=GradSyncConfig(dtype=dtype)),  # type: ignore[arg-type]
            lambda make=Watch: make("adamw"),
            precision="bf16-true",
            accumulate_grad_batches=3,
        )
        assert seen == {expected}
        weights[dtype] = module.net[0].weight.detach()
        assert weights[dtype].dtype == torch.bfloat16
    assert not torch.equal(weights["float32"], weights["auto"])


@pytest.mark.gpu
@pytest.mark.ranks(2)
def test_synchronized_batch_norm_equals_ddp(rank: RankContext) -> None:
    """`sync_batchnorm=True`: statistics over all ranks. torch has it on accelerators only."""
    ours, _ = fit(rank, D9DStrategy(), Plain, sync_batchnorm=True)
    theirs, _ = fit(rank, DDPStrategy(), Plain, sync_batchnorm=True)
    local, _ = fit(rank, D9DStrategy(), Plain)
    assert not isinstance(ours.net[1], torch.nn.SyncBatchNorm)  # after fit the module is as it was
    assert not torch.equal(ours.net[0].weight, local.net[0].weight)
    for key, expected in theirs.state_dict().items():
        assert_bitwise_equal(key, ours.state_dict()[key], expected)


@pytest.mark.ranks(2)
def test_synchronized_batch_norm_is_put_back(rank: RankContext) -> None:
    seen = []

    class Watch(Plain):
        def on_fit_start(self) -> None:
            seen.append(isinstance(self.net[1], torch.nn.SyncBatchNorm))

    module, _ = fit(rank, D9DStrategy(), Watch, sync_batchnorm=True, max_steps=0)
    assert seen == [True]
    assert not isinstance(module.net[1], torch.nn.SyncBatchNorm)


@pytest.mark.ranks(2)
def test_extra_state_of_modules_is_left_alone(rank: RankContext) -> None:
    class Extra(Plain):
        def get_extra_state(self) -> dict[str, int]:
            return {"anything": self.global_rank}

        def set_extra_state(self, state: dict[str, int]) -> None:
            pass

    _, run = fit(rank, D9DStrategy(), Extra)
    assert run.global_step > 0


@pytest.mark.ranks(2)
def test_replicas_begin_as_rank_0(rank: RankContext) -> None:
    """Parameters and buffers that ranks made differently are rank 0's from the start of fit, and of validate."""
    for loop in ("fit", "validate"):
        torch.manual_seed(rank.rank)
        module = Plain()
        module.net[1].running_mean.normal_()
        own = {name: value.clone() for name, value in module.state_dict().items()}
        run = trainer(D9DStrategy(), 2, rank.device.type, limit_train_batches=0)
        getattr(run, loop)(module, loader(8))
        expected = rank.all_gather_object(own)[0]
        for name, value in module.state_dict().items():
            assert_bitwise_equal(name, value.cpu(), expected[name])


@pytest.mark.ranks(2, record=False)
def test_different_models_on_ranks_are_refused(rank: RankContext) -> None:
    module = Plain()
    if rank.rank == 1:
        module.net[0] = torch.nn.Linear(8, 16, bias=False)
    with pytest.raises(RankError, match=r"rank 0 has net.0.bias \[16\] torch.float32 where rank 1 has net.1.weight"):
        trainer(D9DStrategy(), 2, rank.device.type).fit(module, loader(8))


@pytest.mark.ranks(2)
def test_callbacks_and_other_loops_agree_on_ranks(rank: RankContext) -> None:
    """Early stopping, the best and the last checkpoint, validate, test and predict: equal on ranks, equal to DDP."""
    seen = []
    for name, strategy in (("ours", D9DStrategy()), ("ddp", DDPStrategy())):
        L.seed_everything(7, verbose=False)
        module = Plain(batch_norm=False)
        checkpoint = ModelCheckpoint(rank.tmp_dir / name, monitor="val", save_top_k=2, save_last=True)
        run = trainer(
            strategy,
            2,
            rank.device.type,
            max_epochs=8,
            num_sanity_val_steps=2,
            enable_checkpointing=True,
            callbacks=[checkpoint, EarlyStopping("val", patience=2, min_delta=0.05)],
        )
        run.fit(module, loader(28), loader(10))
        results = [
            *run.validate(module, loader(10), ckpt_path="best", verbose=False, weights_only=True),
            *run.test(module, loader(10), verbose=False),
        ]
        predictions = torch.cat(run.predict(module, loader(10)))  # type: ignore[arg-type]
        files = sorted(path.name for path in (rank.tmp_dir / name).iterdir())
        seen.append((run.current_epoch, results, files, Path(checkpoint.best_model_path).name, predictions.tolist()))
    assert seen[0] == seen[1]
    assert seen[0][0] < 8, "early stopping did nothing"
    on_ranks = rank.all_gather_object(seen[0][:4])
    assert on_ranks[0] == on_ranks[1]


@pytest.mark.ranks(2)
def test_unused_parameters_keep_no_gradient(rank: RankContext) -> None:
    ours, _ = fit(rank, D9DStrategy(), Unused)
    theirs, _ = fit(rank, DDPStrategy(find_unused_parameters=True), Unused)
    assert ours.gradient_is_none == theirs.gradient_is_none
    assert {name.split(".")[0] for name, is_none in ours.gradient_is_none.items() if is_none} == {"never"}
    for key, expected in theirs.state_dict().items():
        assert_bitwise_equal(key, ours.state_dict()[key], expected)


@pytest.mark.ranks(2)
def test_layers_unfrozen_while_training_are_synchronized(rank: RankContext) -> None:
    module, _ = fit(rank, D9DStrategy(), Frozen)
    weights = rank.all_gather_object(module.net[0].weight.detach().cpu())
    assert_bitwise_equal("unfrozen layer of rank 1", weights[1], weights[0])
    assert not torch.equal(weights[0], Frozen().net[0].weight)


@pytest.mark.ranks(2)
def test_gradients_of_layers_frozen_inside_a_window_are_synchronized(rank: RankContext) -> None:
    module, _ = fit(rank, D9DStrategy(), FrozenInsideWindow, accumulate_grad_batches=2, max_epochs=1)
    states = rank.all_gather_object({name: value.cpu() for name, value in module.state_dict().items()})
    L.seed_everything(7, verbose=False)
    initial = FrozenInsideWindow().state_dict()
    for name, value in states[0].items():
        assert_bitwise_equal(f"{name} of rank 1", states[1][name], value)
        assert not torch.equal(value, initial[name])


@pytest.mark.ranks(4)
def test_four_ranks_equal_one_process(rank: RankContext) -> None:
    """Four ranks with batches of 2 are one process with the same rows in batches of 8, in float64."""
    dataset = rows(32, torch.float64)
    sampler = DistributedSampler(dataset, 4, rank.rank, shuffle=False)
    L.seed_everything(7, verbose=False)
    module = Plain("adamw", batch_norm=False)
    run = trainer(D9DStrategy(), 4, rank.device.type, precision="64-true", max_epochs=1)
    run.fit(module, DataLoader(dataset, batch_size=2, sampler=sampler))
    L.seed_everything(7, verbose=False)
    reference = Plain("adamw", batch_norm=False).double().to(rank.device)
    optimizer = reference.configure_optimizers()
    x, y = (tensor.to(rank.device) for tensor in dataset.tensors)
    for step in range(4):
        batch = slice(8 * step, 8 * step + 8)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(reference.net(x[batch]), y[batch]).backward()
        optimizer.step()
    assert_tensors_close(module.state_dict(), reference.state_dict())
