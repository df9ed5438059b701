"""`WeightAverages` in one process: validation, exports, dtypes, and what is refused; `tests/meshes` has the meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lightning_d9d import CheckpointConfig, ConfigError, D9DStrategy, StateError
from lightning_d9d.callbacks import HuggingFaceExport, WeightAverages
from lightning_d9d.datamodules import ByteTextDataModule
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from tests.benchmarks.optimizer_loss import SMALL
from tests.harness.compare import assert_bitwise_equal, assert_tensors_close
from tests.harness.tolerances import Tolerance
from tests.strategy.plain import trainer

NAME = "model.layers.0.self_attn.q_proj.weight"
FLOAT32 = Tolerance(relative=1e-6)


class Watching(L.Callback):
    """Keeps one weight: after each step, and as validation has it."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.trained: list[Tensor] = []
        self.validated: list[Tensor] = []
        self.fails_at = fails_at

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self.trained.append(pl_module.state_dict()[NAME].clone())

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self.validated.append(pl_module.state_dict()[NAME].clone())
        if len(self.validated) == self.fails_at:
            raise RuntimeError("validation fails")


def fitted(
    *callbacks: L.Callback,
    steps: int = 4,
    ckpt_path: str | None = None,
    checkpoint: CheckpointConfig = CheckpointConfig(),  # noqa: B008
    **settings: Any,
) -> L.LightningModule:
    L.seed_everything(0, verbose=False)
    module = Qwen3MoePretraining(SMALL, learning_rate=0.05, warmup_steps=0)
    options = {"val_check_interval": 1, "check_val_every_n_epoch": None, "limit_val_batches": 1, "max_steps": steps}
    run = trainer(D9DStrategy(checkpoint=checkpoint), callbacks=[*callbacks], **{**options, **settings})
    run.fit(module, ByteTextDataModule(sequence_length=16, batch_size=2), ckpt_path=ckpt_path)
    return module


def test_validation_has_averages_and_training_goes_on_with_weights() -> None:
    averages, watching, without = WeightAverages(0.5, start_step=2), Watching(), Watching()
    fitted(averages, watching)
    fitted(without)
    expected = [watching.trained[0], watching.trained[1]]
    for weight in watching.trained[2:]:
        expected.append((expected[-1] + weight) / 2)
    for step, (actual, wanted) in enumerate(zip(watching.validated, expected, strict=True)):
        assert_tensors_close({f"step {step}": actual}, {f"step {step}": wanted}, tolerance=FLOAT32)
    for actual, wanted in zip(watching.trained, without.trained, strict=True):
        assert_bitwise_equal(NAME, actual, wanted)


def test_weights_are_put_back_when_validation_raises() -> None:
    watching = Watching(fails_at=3)
    module: list[L.LightningModule] = []

    class Held(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            module.append(pl_module)

    with pytest.raises(RuntimeError, match="validation fails"):
        fitted(WeightAverages(0.5), watching, Held())
    assert_bitwise_equal(NAME, module[0].state_dict()[NAME], watching.trained[-1])
    assert not torch.equal(watching.validated[-1], watching.trained[-1])


def test_validation_with_the_weights_on_request() -> None:
    watching = Watching()
    fitted(WeightAverages(0.5, validate=False), watching)
    for actual, wanted in zip(watching.validated, watching.trained, strict=True):
        assert_bitwise_equal(NAME, actual, wanted)


def test_an_export_has_the_averages(tmp_path: Path) -> None:
    averages = WeightAverages(None, keep=True)
    fitted(averages, HuggingFaceExport(tmp_path / "out"), num_sanity_val_steps=0)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert_bitwise_equal(NAME, saved[NAME], averages.averages[NAME])


def test_an_export_in_front_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"HuggingFaceExport before WeightAverages\(keep=True\) would write"):
        fitted(HuggingFaceExport(tmp_path / "out"), WeightAverages(keep=True))


def test_averages_in_bfloat16_move_by_small_steps() -> None:
    """Each change is far below the distance of two neighbours."""
    averages = WeightAverages(0.999, dtype="weights")
    fitted(averages, steps=60, precision="bf16-true", val_check_interval=60)
    wide = WeightAverages(0.999)
    fitted(wide, steps=60, precision="bf16-true", val_check_interval=60)
    average, exact = averages.averages[NAME], wide.averages[NAME]
    assert (average.dtype, exact.dtype) == (torch.bfloat16, torch.float32)
    first = Watching()
    fitted(first, steps=1, precision="bf16-true")
    moved, expected = average.float() - first.trained[0].float(), exact - first.trained[0].float()
    slope = (moved * expected).sum() / expected.square().sum()
    assert slope.item() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(("mode", "asynchronous"), [("sharded", True), ("consolidated", False)])
def test_a_checkpoint_has_averages_beside_the_weights(tmp_path: Path, mode: Any, asynchronous: bool) -> None:
    checkpoint = CheckpointConfig(mode=mode, asynchronous=asynchronous)

    class Saving(L.Callback):
        def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            trainer.save_checkpoint(tmp_path / "saved")

    with pytest.raises(StateError, match="a checkpoint is saved while WeightAverages"):
        fitted(WeightAverages(), Saving(), checkpoint=checkpoint)
    saved = WeightAverages(validate=False)
    fitted(saved, Saving(), checkpoint=checkpoint)
    for dtype in ("weights", "float32"):
        again = WeightAverages(dtype=dtype, validate=False)  # type: ignore[arg-type]
        fitted(again, ckpt_path=str(tmp_path / "saved"), steps=6)
        assert again.num_updates == 6
    at_once = WeightAverages()
    fitted(at_once, ckpt_path=str(tmp_path / "saved"))  # at its last step already
    for name, average in saved.averages.items():
        assert_bitwise_equal(name, at_once.averages[name], average)
    with pytest.raises(StateError, match=r"was saved as torch.float32, and would lose digits as torch.bfloat16; set W"):
        fitted(WeightAverages(dtype="weights"), ckpt_path=str(tmp_path / "saved"), precision="bf16-true", steps=6)


def test_averages_begin_again_beside_a_checkpoint_without(tmp_path: Path) -> None:
    class Saving(L.Callback):
        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            trainer.save_checkpoint(tmp_path / "saved")

    fitted(Saving())
    averages = WeightAverages()
    with pytest.warns(
        UserWarning, match="there are no averages of the steps before: those of WeightAverages begin again"
    ):
        fitted(averages, ckpt_path=str(tmp_path / "saved"), steps=6)
    assert averages.num_updates == 2


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"decay": 1.0}, r"WeightAverages\(decay=1.0\) must be from 0 to below 1, or None"),
        ({"decay": -0.1}, r"decay=-0.1\) must be"),
        ({"decay": float("nan")}, r"decay=nan\) must be"),
        ({"every_n_steps": 0}, r"every_n_steps=0\) must be at least 1"),
        ({"start_step": 0}, r"start_step=0\) must be at least 1"),
        ({"dtype": "bfloat16"}, r"dtype='bfloat16'\) must be 'float32' or 'weights'"),
    ],
    ids=str,
)
def test_bad_values(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        WeightAverages(**settings)


def test_nothing_to_average() -> None:
    class Freezing(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            pl_module.requires_grad_(False)

    with pytest.raises(ConfigError, match="nothing to average: no parameter of Qwen3MoePretraining is trained"):
        fitted(Freezing(), WeightAverages())
