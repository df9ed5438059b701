"""What does not fit is said before it is tried; what ran out is said with what was there."""

from __future__ import annotations

import gc
import traceback
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig, ParallelConfig, memory
from lightning_d9d.datamodules import ByteTextDataModule
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from tests.harness.ranks import RankContext
from tests.strategy.plain import Plain, TwoOptimizers, loader, trainer
from tests.strategy.staged import Staged
from tests.strategy.test_end_of_fit import rows

PARAMETERS, WEIGHT_BYTES = 4, 4 * (8 * 16 + 16 + 16 * 4 + 4)
STEP_BYTES = 4 * WEIGHT_BYTES + PARAMETERS * 4
"""Bytes of `Staged` with AdamW in float32: weights, gradients, two states, and the number of steps of each
parameter."""
SEQUENCE = 64


def give(monkeypatch: pytest.MonkeyPatch, num_bytes: int | None) -> None:
    monkeypatch.setattr(memory, "device_bytes", lambda device: num_bytes)


def fit_staged(**options: Any) -> None:
    trainer(D9DStrategy(**options), max_epochs=1).fit(Staged(optimizer="adamw", known_weight=True), rows())


def test_a_step_that_cannot_fit_ends_before_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = []
    monkeypatch.setattr(Staged, "microbatch_inputs", lambda *_: batches.append(1))
    give(monkeypatch, STEP_BYTES - 1)
    with pytest.raises(ConfigError, match=r"the fit cannot begin: a training step needs 0\.0 MiB on this device"):
        fit_staged()
    assert not batches


def test_a_step_that_just_fits_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, STEP_BYTES)
    fit_staged()


def test_a_plain_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Plain()  # which has SGD, or what its test says
    tensors = [*module.parameters(), *module.buffers()]
    needed = memory.weight_bytes(tensors) + memory.gradient_bytes(module.parameters())
    states = memory.state_bytes(module.configure_optimizers())
    assert states is not None
    give(monkeypatch, needed + states - 1)
    with pytest.raises(ConfigError, match=r"the fit cannot begin: .*activations unknown"):
        trainer(D9DStrategy(), max_epochs=1).fit(module, loader(8))
    give(monkeypatch, needed + states)
    trainer(D9DStrategy(), max_epochs=1).fit(Plain(), loader(8))


def test_a_module_that_steps_its_optimizers_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of one optimizer may be gone when those of another come, so they are not counted."""
    module = TwoOptimizers()
    states = [memory.state_bytes(each) for each in module.configure_optimizers()]
    needed = memory.weight_bytes([*module.parameters(), *module.buffers()]) + sum(each or 0 for each in states)
    give(monkeypatch, needed)
    trainer(D9DStrategy(), max_epochs=1).fit(module, loader(8))
    give(monkeypatch, needed - 1)
    with pytest.raises(ConfigError, match=r"the fit cannot begin: .*gradients 0\.0 MiB"):
        trainer(D9DStrategy(), max_epochs=1).fit(TwoOptimizers(), loader(8))


def fit_qwen3(recompute: str = "none", microbatch_size: int = 4, **options: Any) -> None:
    strategy = D9DStrategy(parallel=ParallelConfig(recompute=recompute), microbatch_size=microbatch_size)
    data = ByteTextDataModule(sequence_length=SEQUENCE, batch_size=8)
    run = trainer(strategy, max_steps=1, limit_val_batches=0, **options)
    run.fit(Qwen3MoePretraining(preset="tiny"), data)


def test_activations_of_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The advice is followed until it fits; what fits trains."""
    weights = 4 * 1_837_000
    give(monkeypatch, 4 * weights + 7 * 2**20)
    with pytest.raises(ConfigError, match=r"activations \d+\.\d MiB.*; by arithmetic it fits with ") as caught:
        fit_qwen3()
    assert 'ParallelConfig(recompute="full")' in str(caught.value)
    fit_qwen3("full")
    with pytest.raises(ConfigError, match="the fit cannot begin"):
        fit_qwen3(microbatch_size=8)
    fit_qwen3(microbatch_size=1)


def test_what_is_close_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    give(monkeypatch, int(STEP_BYTES / 0.95))
    with caplog.at_level("INFO", "lightning.pytorch"):  # a benchmark in this process may have raised it
        fit_staged()
    notes = [each.getMessage() for each in caplog.records if "a training step needs at least" in each.getMessage()]
    assert len(notes) == 1


@pytest.mark.ranks(2)
def test_one_rank_has_too_little(rank: RankContext) -> None:
    with pytest.MonkeyPatch.context() as patch:
        give(patch, STEP_BYTES - 1 if rank.rank == 1 else 10 * STEP_BYTES)
        with pytest.raises(ConfigError, match="the fit cannot begin: rank 1: a training step needs"):
            trainer(D9DStrategy(), 2, rank.device.type, max_epochs=1).fit(Staged(optimizer="adamw"), rows())


@pytest.mark.ranks(2)
def test_sharded_weights_count_as_this_rank_has_them(rank: RankContext) -> None:
    sharded = WEIGHT_BYTES // 2
    with pytest.MonkeyPatch.context() as patch:
        give(patch, 2 * STEP_BYTES)
        strategy = D9DStrategy(mesh=MeshConfig(data_parallel_shard=2))
        run = trainer(strategy, 2, rank.device.type, max_epochs=1, callbacks=[Watch()])
        run.fit(Staged(optimizer="adamw"), rows())
    assert Watch.seen == (sharded, sharded, 2 * sharded + PARAMETERS * 4, WEIGHT_BYTES)


class Watch(L.Callback):
    seen: tuple[int | None, ...]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        step = trainer.strategy._training.memory.step()  # type: ignore[attr-defined]
        Watch.seen = (step.weights, step.gradients, step.states, step.gathered)


class Exhausted(Staged):
    """Runs out of memory in its second batch."""

    num_batches = 0

    def microbatch_loss(self, output: Tensor, microbatch: Any) -> Any:
        self.num_batches += 1
        if self.num_batches == 2:
            run_out(output.device)
        return super().microbatch_loss(output, microbatch)


def run_out(device: torch.device) -> None:
    if device.type == "cpu":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    torch.empty(2**50, device=device)


def notes_of(device: str) -> str:
    with pytest.raises(torch.OutOfMemoryError, match="out of memory") as caught:
        trainer(D9DStrategy(), device=device, max_epochs=1).fit(Exhausted(optimizer="adamw"), rows())
    return "".join(traceback.format_exception(caught.value))


def test_memory_runs_out_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, 2 * STEP_BYTES)
    text = notes_of("cpu")
    assert "CUDA out of memory" in text
    assert "memory had weights 0.0 MiB, gradients 0.0 MiB, states 0.0 MiB\n" in text
    assert "by arithmetic a step needs 0.0 MiB or more: weights 0.0 MiB, gradients" in text
    assert "; by arithmetic it fits with StochasticAdamW(state_dtype=torch.uint8)" in text


@pytest.mark.gpu
def test_memory_of_a_gpu_runs_out_in_a_step() -> None:
    text = notes_of("cuda")
    assert "activations and buffers, at most" in text
    assert "by arithmetic a step needs" in text


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_arithmetic_is_below_what_a_gpu_takes(recompute: str) -> None:
    """So nothing that fits is refused; and it is most of it."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seen = []

    class Total(L.Callback):
        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            of_fit = trainer.strategy._training.memory  # type: ignore[attr-defined]
            seen.append(of_fit.step().of(of_fit._settings).total)

    strategy = D9DStrategy(parallel=ParallelConfig(recompute=recompute))
    data = ByteTextDataModule(sequence_length=2048, batch_size=32)
    run = trainer(strategy, device="cuda", max_steps=3, limit_val_batches=0, callbacks=[Total()])
    run.fit(Qwen3MoePretraining(preset="tiny"), data)
    peak = torch.cuda.max_memory_allocated() - before
    assert 0.5 * peak < seen[0] < 1.05 * peak
