"""After a fit weights and optimizer states are where the pages say. They are freed with module and Trainer."""

from __future__ import annotations

import gc
import io
import weakref
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_d9d import D9DStrategy
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.strategy.plain import Plain, loader, trainer
from tests.strategy.staged import Staged, staged_rows


def rows() -> Any:
    return DataLoader(staged_rows(8, None), batch_size=4)  # type: ignore[arg-type]


def fit(device: str = "cpu", **options: Any) -> tuple[L.Trainer, Staged]:
    module, run = Staged(optimizer="adamw"), trainer(D9DStrategy(), device=device, max_epochs=1, **options)
    run.fit(module, rows())
    return run, module


def states(run: L.Trainer) -> list[Tensor]:
    return [value for state in run.optimizers[0].state.values() for value in state.values()]


class Elsewhere(L.Callback):
    """Puts a buffer and an optimizer state on the meta device, from which nothing can be copied to another one."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.register_buffer("elsewhere", torch.empty(3, device="meta"))
        first = next(iter(trainer.optimizers[0].state.values()))
        first["exp_avg"] = first["exp_avg"].to("meta")


def test_nothing_of_a_d9d_module_moves() -> None:
    run, module = fit(callbacks=[Elsewhere()])
    assert module.elsewhere.is_meta  # type: ignore[union-attr]
    assert sum(each.is_meta for each in states(run)) == 1


def test_a_plain_module_moves_as_under_lightnings_strategies() -> None:
    """So code that calls it with tensors of the CPU after a fit stays right."""
    for strategy in (D9DStrategy(), "auto"):
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
            trainer(strategy, max_epochs=1, callbacks=[Elsewhere()]).fit(AdamPlain(), loader(8))


class AdamPlain(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def use_after_fit(run: L.Trainer, module: Staged, path: Path) -> None:
    """Evaluate, predict, call, save, pickle and fit again; each has the weights where the fit left them."""
    device = module.stages[0][0].weight.device  # type: ignore[index, union-attr]
    run.test(module, rows(), verbose=False)
    predicted = torch.cat(run.predict(module, rows()))  # type: ignore[arg-type]
    run.validate(module, rows(), verbose=False)
    batch = next(iter(rows()))
    with torch.no_grad():
        called = module({name: value.to(device) for name, value in batch.items()})
    assert_close_named("called", called.cpu(), predicted[:4].cpu())
    assert module.device == device
    run.save_checkpoint(path)
    buffer = io.BytesIO()
    torch.save(module.stages, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False, map_location="cpu")
    for name, value in again.state_dict().items():
        assert_bitwise_equal(name, value, module.stages.state_dict()[name].cpu())
    assert {each.device for each in (*module.parameters(), *states(run)) if each.dim() > 0} == {device}
    run.fit_loop.max_epochs = 2
    run.fit(module, rows(), ckpt_path=str(path))
    assert run.global_step == 4


def freed(run: L.Trainer, module: Staged) -> list[weakref.ref[Any]]:
    return [weakref.ref(each) for each in (run, module, *module.parameters(), *states(run))]


def test_what_is_used_after_a_fit(tmp_path: Path) -> None:
    use_after_fit(*fit(), tmp_path / "after.ckpt")


def test_module_and_trainer_are_all_that_holds_memory() -> None:
    run, module = fit()
    references = freed(run, module)
    del run, module
    gc.collect()
    assert [each() for each in references] == [None] * len(references)


def test_states_are_free_when_cleared() -> None:
    run, _ = fit()
    references = [weakref.ref(each) for each in states(run)]
    run.optimizers[0].state.clear()
    assert [each() for each in references] == [None] * len(references)


@pytest.mark.gpu
def test_weights_and_states_stay_on_the_gpu(tmp_path: Path) -> None:
    run, module = fit("cuda")
    assert {each.device.type for each in (*module.parameters(), *states(run)) if each.dim() > 0} == {"cuda"}
    use_after_fit(run, module, tmp_path / "after.ckpt")


class Large(Staged):
    def configure_stage(self, stage: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 4096), nn.Tanh(), nn.Linear(4096, 4096), nn.Tanh(), nn.Linear(4096, 4))


@pytest.mark.gpu
def test_memory_of_a_gpu_is_free_when_module_and_trainer_are() -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    module, run = Large(optimizer="adamw"), trainer(D9DStrategy(), device="cuda", max_epochs=1)
    run.fit(module, rows())
    weights = sum(parameter.nbytes for parameter in module.parameters())
    assert torch.cuda.memory_allocated() - before >= 3 * weights  # weights and two states
    del run, module
    gc.collect()
    assert torch.cuda.memory_allocated() - before < weights / 10
