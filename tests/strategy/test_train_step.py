"""One optimizer step of a D9DModule equals plain torch, however the batch is cut and spread."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_d9d import BlockSequence, ConfigError, D9DStrategy, GradSyncConfig, MeshConfig, StageInfo, WeightedLoss
from lightning_d9d.optim import StochasticAdamW
from tests.harness.compare import assert_close_named, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind
from tests.strategy.plain import trainer
from tests.strategy.staged import Recorded, Staged, reference_gradients, staged_rows


def batches_of(rows: list[Any], size: int) -> list[list[Any]]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def windows_of(batches: list[Any], size: int) -> list[list[Any]]:
    return [batches[i : i + size] for i in range(0, len(batches), size)]


def recorded(**kwargs: Any) -> tuple[Recorded, Recorded]:
    """A module with its stage built in float64, and a copy of it for the reference."""
    L.seed_everything(7, verbose=False)
    module = Recorded(**kwargs)
    module.configure_model()
    module.double()
    return module, copy.deepcopy(module)


CUTS = [{}, {"microbatch_size": 1}, {"microbatch_size": 2, "schedule": "gpipe"}, {"num_microbatches": 4}]


@pytest.mark.parametrize("kind", ["tokens", "known tokens", "mean"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_gradients_equal_plain_torch(cut: dict[str, Any], accumulate: int, kind: str) -> None:
    """15 rows in batches of 4: a last batch of 3 and, with accumulation, uneven token counts inside a window."""
    rows = staged_rows(23)
    module, reference = recorded(mean=kind == "mean", known_weight=kind == "known tokens")
    run = trainer(D9DStrategy(**cut), precision="64-true", max_epochs=1, accumulate_grad_batches=accumulate)
    run.fit(module, DataLoader(rows, batch_size=4))
    windows = windows_of(batches_of(rows, 4), accumulate)
    steps, losses = reference_gradients(reference, windows, accumulate)
    assert len(module.gradients) == len(steps) == run.global_step
    for ours, expected in zip(module.gradients, steps, strict=True):
        assert_tensors_close(ours, expected)
    for index, (loss, expected) in enumerate(zip(module.losses, losses, strict=True)):
        scale = accumulate  # Lightning reports the loss divided by accumulate_grad_batches
        assert_close_named(f"loss of batch {index}", loss * scale, expected, kind=Kind.LOSS)
    assert_tensors_close(module.state_dict(), reference.state_dict())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["tokens", "known tokens", "mean"])
@pytest.mark.parametrize(("accumulate", "microbatch_size"), [(1, 2), (2, 2), (1, None)])
def test_two_ranks_with_uneven_tokens_equal_one_process(
    rank: RankContext, accumulate: int, microbatch_size: int | None, kind: str
) -> None:
    rows = staged_rows(24)
    module, reference = recorded(mean=kind == "mean", known_weight=kind == "known tokens")
    run = trainer(
        D9DStrategy(microbatch_size=microbatch_size, grad_sync=GradSyncConfig(bucket_mb=0.0005)),
        2,
        rank.device.type,
        precision="64-true",
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=1e9,
    )
    run.fit(module, DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows, 2, rank.rank, shuffle=False)))
    windows = windows_of(batches_of(rows, 8), accumulate)
    steps, losses = reference_gradients(reference, windows, accumulate)
    assert len(module.gradients) == len(steps)
    for ours, expected in zip(module.gradients, steps, strict=True):
        assert_tensors_close(ours, expected)
    for index, (loss, expected) in enumerate(zip(module.losses, losses, strict=True)):
        assert_close_named(f"loss of batch {index}", loss * accumulate, expected.to(loss), kind=Kind.LOSS)
    norm = torch.stack([gradient.norm() for gradient in steps[-1].values()]).norm()
    assert_close_named("grad_norm", run.callback_metrics["grad_norm"].double(), norm)
    values = rank.all_gather_object({name: float(value) for name, value in run.callback_metrics.items()})
    assert values[0] == values[1]


def test_a_window_without_tokens_is_skipped() -> None:
    rows = staged_rows(8, ignored_every=1)
    for strategy in (D9DStrategy(), D9DStrategy(microbatch_size=2)):
        module, reference = recorded()
        run = trainer(strategy, precision="64-true", max_epochs=1)
        run.fit(module, DataLoader(rows, batch_size=4))
        assert_tensors_close(module.state_dict(), reference.state_dict())
        assert run.strategy.num_skipped_steps == 2
        assert all(loss == 0 for loss in module.losses)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_low_precision_accumulates_in_float32(precision: str) -> None:
    """Gradients of bf16 parameters add up in float32 over microbatches; the optimizer gets the parameter's dtype."""
    seen: list[torch.dtype] = []

    class Watch(Staged):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.extend(p.grad.dtype for p in self.parameters() if p.grad is not None)

    rows = [{"x": row["x"].float(), "y": row["y"]} for row in staged_rows(8)]
    module = Watch(optimizer="adamw")
    run = trainer(D9DStrategy(microbatch_size=1), precision=precision, max_epochs=1)
    run.fit(module, DataLoader(rows, batch_size=4))
    assert set(seen) == {torch.float32}
    expected = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {p.dtype for p in module.parameters()} == {expected}
    assert run.global_step == 2


@pytest.mark.parametrize("takes_wide", [True, False])
def test_gradients_are_rounded_for_optimizers_that_ask_for_it(takes_wide: bool) -> None:
    seen: set[torch.dtype] = set()

    class Watched(StochasticAdamW):
        takes_wide_gradients = takes_wide

        def step(self, closure: Any = None) -> Any:
            seen.update(p.grad.dtype for group in self.param_groups for p in group["params"] if p.grad is not None)
            return super().step(closure)

    class Module(Staged):
        def configure_optimizers(self) -> Any:
            return Watched(self.parameters(), lr=0.01)

    rows = [{"x": row["x"].float(), "y": row["y"]} for row in staged_rows(8)]
    run = trainer(D9DStrategy(microbatch_size=1), precision="bf16-true", max_epochs=1)
    run.fit(Module(), DataLoader(rows, batch_size=4))
    assert seen == {torch.float32 if takes_wide else torch.bfloat16}


def test_fused_optimizers_are_clipped_under_bf16_mixed() -> None:
    """Stock Lightning refuses them whether or not a loss scaler unscales gradients inside the optimizer."""

    class Fused(Staged):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)

    rows = [{"x": row["x"].float(), "y": row["y"]} for row in staged_rows(8, ignored_every=None)]
    norms = []
    for clip in (1e9, 1e-3):
        L.seed_everything(7, verbose=False)
        run = trainer(D9DStrategy(), precision="bf16-mixed", max_epochs=1, gradient_clip_val=clip)
        module = Fused()
        run.fit(module, DataLoader(rows, batch_size=8))
        norms.append(torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm())
    assert norms[0] > 0.01
    assert_close_named("clipped norm", norms[1], torch.tensor(1e-3), kind=Kind.OUTPUT)


class HookTrace(Callback):
    """The order in which Lightning's hooks fire."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        traced = name.startswith("on_") and ("batch" in name or "backward" in name or "grad" in name or "step" in name)
        if traced:
            object.__getattribute__(self, "calls").append(name)
        return object.__getattribute__(self, name)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_hooks_fire_in_lightnings_order(accumulate: int) -> None:
    traces = []
    for strategy in ("auto", D9DStrategy(microbatch_size=2)):
        trace = HookTrace()
        run = trainer(
            strategy,
            precision="64-true",
            max_epochs=1,
            accumulate_grad_batches=accumulate,
            gradient_clip_val=0.1,
            callbacks=[trace],
        )
        rows = staged_rows(16)
        run.fit(Staged(), DataLoader(rows, batch_size=4), DataLoader(rows, batch_size=4))
        traces.append([call for call in trace.calls if "dataloader" not in call])
    assert "on_after_backward" in traces[0]
    assert "on_before_zero_grad" in traces[0]
    assert traces[0] == traces[1]


def test_a_first_batch_that_does_not_divide_is_refused() -> None:
    for options, legal in (({"microbatch_size": 3}, "[1, 2, 4]"), ({"num_microbatches": 8}, "[1, 2, 4]")):
        with pytest.raises(ConfigError, match=r"first batch has 4 rows") as error:
            trainer(D9DStrategy(**options), max_epochs=1).fit(Staged(), DataLoader(staged_rows(8), batch_size=4))
        assert legal in str(error.value)


def test_a_run_resumed_before_its_short_last_batch_goes_on(tmp_path: Path) -> None:
    """10 rows in batches of 4; the resumed run begins with the last two rows."""
    seen: list[int] = []

    class Watch(Staged):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append(len(batch["y"]))

    for max_steps, checkpoint in ((2, None), (4, tmp_path / "step.ckpt")):
        run = trainer(D9DStrategy(microbatch_size=4), max_epochs=-1, max_steps=max_steps)
        run.fit(Watch(), DataLoader(staged_rows(10), batch_size=4), ckpt_path=checkpoint)  # type: ignore[arg-type]
        run.save_checkpoint(tmp_path / "step.ckpt")
    assert seen == [4, 4, 2, 4]


class BatchNormed(Staged):
    """Has a batch norm, which is in the second stage if there are two."""

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        return BlockSequence([nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 4)], stage)


def warnings_of_norms(
    num_microbatches: int | None = None,
    devices: int = 1,
    device: str = "cpu",
    batch_size: int = 4,
    microbatch_size: int | None = None,
    **axes: int,
) -> list[str]:
    counts = {"num_microbatches": num_microbatches, "microbatch_size": microbatch_size}
    run = trainer(D9DStrategy(mesh=MeshConfig(**axes), **counts), devices, device, max_epochs=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(BatchNormed(), DataLoader(staged_rows(8), batch_size=batch_size))
    return [text for each in caught if "statistics" in (text := str(each.message))]


def test_a_batch_norm_with_several_microbatches_warns_once() -> None:
    [warning] = warnings_of_norms(2)
    assert "each of the 2 microbatches of a batch is normalized by its own statistics" in warning
    assert "in 2 (BatchNorm1d). So the number of microbatches changes the result;" in warning
    assert warnings_of_norms(1) == []


@pytest.mark.ranks(2)
def test_the_first_rank_warns_of_a_batch_norm_on_another(rank: RankContext) -> None:
    found = warnings_of_norms(2, 2, str(rank.device), pipeline_parallel=2)
    assert ["in 2 (BatchNorm1d)" in each for each in found] == ([True] if rank.rank == 0 else [])


@pytest.mark.ranks(2)
def test_the_first_rank_warns_if_only_another_has_several_microbatches(rank: RankContext) -> None:
    own = {"batch_size": (2, 4)[rank.rank], "microbatch_size": 2, "data_parallel_replicate": 2}
    found = warnings_of_norms(None, 2, str(rank.device), **own)
    assert ["each of the 2 microbatches" in each for each in found] == ([True] if rank.rank == 0 else [])


def test_losses_of_two_kinds_are_refused() -> None:
    class Mixed(Staged):
        def microbatch_loss(self, output: Any, microbatch: Any) -> Any:
            self.mean = not self.mean
            return super().microbatch_loss(output, microbatch)

    with pytest.raises(ConfigError, match="Tensor for some microbatches and a WeightedLoss for others"):
        trainer(D9DStrategy(microbatch_size=2)).fit(Mixed(), DataLoader(staged_rows(8), batch_size=4))


@pytest.mark.parametrize("bad", [torch.zeros(3), WeightedLoss(torch.zeros(2), torch.ones(())), 1.0, None])
def test_losses_that_are_no_scalars_are_refused(bad: Any) -> None:
    class Wrong(Staged):
        def microbatch_loss(self, output: Any, microbatch: Any) -> Any:
            return bad

    with pytest.raises(ConfigError, match="microbatch_loss returned"):
        trainer(D9DStrategy()).fit(Wrong(), DataLoader(staged_rows(4), batch_size=4))


def test_a_weight_may_be_a_number() -> None:
    class Numbered(Staged):
        def microbatch_loss(self, output: Any, microbatch: Any) -> Any:
            loss = super().microbatch_loss(output, microbatch)
            return WeightedLoss(loss.value_sum, len(microbatch["y"]))  # type: ignore[arg-type]

    weights = []
    for kind in (Numbered, Staged):
        torch.manual_seed(1)
        module = kind()
        trainer(D9DStrategy(microbatch_size=1), max_steps=2).fit(
            module, DataLoader(staged_rows(8, ignored_every=None), batch_size=4)
        )
        weights.append(module.state_dict())
    assert_tensors_close(*weights)


class Unstepped(Staged):
    """Windows that do not end by exactly one step."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        if self.case == "accumulates less":
            self.trainer.accumulate_grad_batches = 2 if batch_idx == 0 else 1
        return -1 if self.case == "epoch ends early" and batch_idx == 3 else None

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.case == "closure runs twice":
            optimizer_closure()
        if self.case == "step is left out" and batch_idx % 2 == 0:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize(
    ("case", "accumulate"),
    [("closure runs twice", 1), ("step is left out", 1), ("accumulates less", 1), ("epoch ends early", 2)],
)
def test_gradients_that_met_no_step_are_dropped_as_in_stock_lightning(case: str, accumulate: int) -> None:
    states = []
    for strategy in (D9DStrategy(), "auto"):
        L.seed_everything(7, verbose=False)
        module = Unstepped(case)
        run = trainer(strategy, precision="64-true", accumulate_grad_batches=accumulate)
        run.fit(module, DataLoader(staged_rows(16, ignored_every=None), batch_size=4))
        states.append(module.state_dict())
    assert_tensors_close(*states)


@pytest.mark.ranks(2)
def test_ranks_may_make_different_numbers_of_microbatches(rank: RankContext) -> None:
    """Batches of 4 or 2 rows make two microbatches or one."""
    rows = staged_rows(16)
    batches = [[rows[:4], rows[4:8]], [rows[8:12], rows[12:14]], [rows[14:15], rows[15:]]]
    mine = [batch[rank.rank] for batch in batches]
    module, reference = recorded()
    run = trainer(
        D9DStrategy(microbatch_size=2),
        2,
        rank.device.type,
        precision="64-true",
        max_epochs=1,
        use_distributed_sampler=False,
    )
    run.fit(module, DataLoader(mine, batch_size=None, collate_fn=torch.utils.data.default_collate))
    steps, _ = reference_gradients(reference, [[first + second] for first, second in batches], 1)
    for ours, expected in zip(module.gradients, steps, strict=True):
        assert_tensors_close(ours, expected)


@pytest.mark.parametrize("fused", [False, True])
def test_steps_skipped_at_the_start_and_later_leave_the_optimizer_as_it_was(fused: bool) -> None:
    class Momentum(Staged):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, fused=fused)

    empty, full = staged_rows(4, ignored_every=1), staged_rows(4, ignored_every=None)
    states, skipped = [], []
    for rows in (empty + full + empty + full, full + full):
        L.seed_everything(7, verbose=False)
        module, run = Momentum(), trainer(D9DStrategy(), precision="64-true", max_epochs=1)
        run.fit(module, DataLoader(rows, batch_size=4))
        states.append(module.state_dict())
        skipped.append(run.strategy.num_skipped_steps)
    assert_tensors_close(*states)
    assert skipped == [2, 0]
