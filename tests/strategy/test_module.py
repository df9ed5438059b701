"""The contract of D9DModule: hooks, refusals, state, and the same module under Lightning's own strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_d9d import CheckpointConfig, ConfigError, D9DStrategy, StageInfo, StageInputs
from tests.harness.compare import assert_close_named, assert_tensors_close
from tests.strategy.plain import trainer
from tests.strategy.staged import IGNORED, Staged, staged_rows


def data(count: int = 8) -> DataLoader:
    return DataLoader(staged_rows(count), batch_size=4)


@pytest.mark.parametrize("strategy", ["d9d", "auto"])
def test_validation_loss_is_exact_over_batches_of_different_weight(strategy: str) -> None:
    """14 rows in batches of 4: batches have 1 to 3 labels that count, the last batch two rows."""
    rows = staged_rows(14)
    module = Staged()
    run = trainer(strategy, precision="64-true")
    (result,) = run.validate(module, DataLoader(rows, batch_size=4), verbose=False)
    x, y = torch.stack([row["x"] for row in rows]), torch.stack([row["y"] for row in rows])
    output = module.stages[0].double()(x)
    expected = nn.functional.cross_entropy(output, y, ignore_index=IGNORED)
    assert_close_named("val_loss", torch.tensor(result["val_loss"], dtype=torch.float64), expected.detach())
    right = (output.argmax(-1) == y).double()
    assert result["val_accuracy"] == pytest.approx(float(right.mean()), abs=1e-12)
    assert result["val_hits"] == pytest.approx(float(right.sum() / (y != IGNORED).sum()), abs=1e-12)


def test_microbatches_change_nothing_in_validation_test_and_prediction() -> None:
    results, predictions = [], []
    for options in ({}, {"microbatch_size": 1}, {"num_microbatches": 2}):
        L.seed_everything(3, verbose=False)
        module, run = Staged(), trainer(D9DStrategy(**options), precision="64-true")
        results.append(
            {
                **run.validate(module, data(6), verbose=False)[0],
                **run.test(module, data(6), verbose=False)[0],
            }
        )
        predictions.append(torch.cat(run.predict(module, data(6))))
    for other in results[1:]:
        assert other == pytest.approx(results[0], abs=1e-12)
    for other in predictions[1:]:
        assert_close_named("prediction", other, predictions[0])
    assert set(results[0]) == {f"{p}_{n}" for p in ("val", "test") for n in ("loss", "accuracy", "hits")}


@pytest.mark.parametrize("strategy", ["d9d", "auto"])
def test_a_batch_without_weight_logs_zeros(strategy: str) -> None:
    run = trainer(strategy, max_epochs=1)
    run.fit(Staged(), DataLoader(staged_rows(4, ignored_every=1), batch_size=4))
    assert run.callback_metrics["train_loss"] == 0
    assert run.callback_metrics["train_hits"] == 0


def test_several_validation_dataloaders_and_the_sanity_check() -> None:
    run = trainer(D9DStrategy(microbatch_size=2), num_sanity_val_steps=1, max_epochs=1)
    run.fit(Staged(), data(), [data(), data(4)])
    assert {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"} <= set(run.callback_metrics)


@pytest.mark.parametrize(
    ("method", "remedy"),
    [
        ("training_step", "microbatch_loss"),
        ("validation_step", "microbatch_loss"),
        ("test_step", "microbatch_loss"),
        ("predict_step", "predict_output"),
        ("backward", "on_after_backward"),
    ],
)
@pytest.mark.parametrize("strategy", ["d9d", "auto"])
def test_an_overridden_step_is_refused(method: str, remedy: str, strategy: str) -> None:
    module = type("Overriding", (Staged,), {method: lambda self, *args, **kwargs: None})()
    with pytest.raises(ConfigError, match=f"Overriding.{method} is overridden.*{remedy}"):
        trainer(strategy).fit(module, data())


def test_manual_optimization_is_refused() -> None:
    module = Staged()
    module.automatic_optimization = False
    with pytest.raises(ConfigError, match="automatic_optimization is False"):
        trainer(D9DStrategy()).fit(module, data())


@pytest.mark.parametrize("hook", ["microbatch_inputs", "microbatch_loss", "microbatch_metrics"])
def test_logging_inside_a_microbatch_hook_is_refused(hook: str) -> None:
    def log_and_go_on(self: Staged, *args: Any) -> Any:
        self.log("mine", 1.0)
        return getattr(Staged, hook)(self, *args)

    module = type("Logging", (Staged,), {hook: log_and_go_on})()
    with pytest.raises(ConfigError, match=r"self.log\('mine', ...\) inside a microbatch hook"):
        trainer(D9DStrategy()).fit(module, data())


def test_missing_hooks_and_wrong_inputs_say_what_to_do() -> None:
    class Nothing(L.LightningModule):
        pass

    class NoInputs(Staged):
        def microbatch_inputs(self, microbatch: Any) -> Any:
            return microbatch["x"]

    with pytest.raises(ConfigError, match=r"microbatch_inputs returned Tensor; return StageInputs"):
        trainer(D9DStrategy()).fit(NoInputs(), data())


def test_an_own_configure_model_does_not_hide_mistakes() -> None:
    class Own(Staged):
        def configure_model(self) -> None:
            pass

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    class Empty(Staged):
        def configure_model(self) -> None:
            pass

    with pytest.raises(ConfigError, match=r"Own.training_step is overridden"):
        trainer(D9DStrategy()).fit(Own(), data())
    with pytest.raises(ConfigError, match=r"Empty has no stages.*super\(\).configure_model"):
        trainer(D9DStrategy()).fit(Empty(), data())


class Packed(Staged):
    """Rows of several batches behind each other, with borders: tensors of different lengths."""

    def microbatch_inputs(self, microbatch: Any) -> StageInputs:
        assert microbatch["borders"].shape == (3,)
        return super().microbatch_inputs(microbatch)

    def microbatch_metrics(self, output: Any, microbatch: Any) -> dict[str, Any]:
        return {"hits": super().microbatch_metrics(output, microbatch)["hits"]}


def test_a_batch_without_rows_need_not_be_cut() -> None:
    def pack(rows: list[Any]) -> dict[str, Tensor]:
        return {**torch.utils.data.default_collate(rows), "borders": torch.tensor([0, 1, 4])}

    run = trainer(D9DStrategy(), precision="64-true", max_epochs=1)
    run.fit(Packed(), DataLoader(staged_rows(8), batch_size=4, collate_fn=pack))
    assert run.global_step == 2
    with pytest.raises(ConfigError, match="override split_batch"):
        trainer(D9DStrategy(microbatch_size=2)).fit(Packed(), DataLoader(staged_rows(8), batch_size=4, collate_fn=pack))


@pytest.mark.parametrize("strategy", ["d9d", "auto"])
@pytest.mark.parametrize("of", ["microbatch_loss", "microbatch_metrics"])
def test_a_mean_over_a_batch_without_rows_is_refused(of: str, strategy: str) -> None:
    def pack(rows: list[Any]) -> dict[str, Tensor]:
        return {**torch.utils.data.default_collate(rows), "borders": torch.tensor([0, 1, 4])}

    class Metric(Packed):
        def microbatch_metrics(self, output: Any, microbatch: Any) -> dict[str, Tensor]:
            return {"largest": output.max()}

    module = Packed(mean=True) if of == "microbatch_loss" else Metric()
    run = trainer(strategy, precision="64-true")
    with pytest.raises(ConfigError, match=rf"{of}.* returned a mean over a microbatch without rows.*WeightedLoss\("):
        run.fit(module, DataLoader(staged_rows(8), batch_size=4, collate_fn=pack))
    assert run.global_step == 0


def test_a_stage_with_values_nobody_makes_is_refused() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(4))

        def forward(self, input: Tensor) -> Tensor:
            return input[:, :4] * self.scale

    class Bare(Staged):
        def configure_stage(self, stage: StageInfo) -> nn.Module:
            return Scale()

    with pytest.raises(ConfigError, match=r"Scale.*reset_parameters"):
        trainer(D9DStrategy()).fit(Bare(), data())


@pytest.mark.parametrize("mode", ["auto", "consolidated"])
def test_names_are_global_and_checkpoints_travel_between_strategies(tmp_path: Path, mode: Any) -> None:
    checkpoint = ModelCheckpoint(tmp_path, save_last=True)
    first = Staged(optimizer="adamw")
    strategy = D9DStrategy(checkpoint=CheckpointConfig(mode=mode))
    run = trainer(strategy, max_epochs=1, callbacks=[checkpoint], enable_checkpointing=True)
    rows = DataLoader(staged_rows(8, ignored_every=None), batch_size=4)
    run.fit(first, rows)
    names = {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert set(first.state_dict()) == names
    path = tmp_path / "last.ckpt"
    assert path.is_dir() == (mode == "auto")
    loaded = Staged.load_from_checkpoint(path)
    assert_tensors_close(loaded.state_dict(), first.state_dict())
    strategies = [D9DStrategy(microbatch_size=2)]
    if mode == "consolidated":  # a file that any strategy reads
        assert set(torch.load(path, weights_only=True)["state_dict"]) == names
        strategies.append("auto")
    for again in strategies:
        resumed = Staged(optimizer="adamw")
        run = trainer(again, max_epochs=2)
        run.fit(resumed, rows, ckpt_path=path)
        assert run.global_step == 4
        assert run.optimizers[0].state_dict()["state"][0]["step"] == 4


def test_weights_depend_on_seed_and_name_alone() -> None:
    def weights(seed: int, draws: int) -> dict[str, Tensor]:
        L.seed_everything(seed, verbose=False)
        torch.randn(draws)
        module = Staged()
        module.configure_model()
        return module.state_dict()

    assert_tensors_close(weights(1, 5), weights(1, 0))
    assert not torch.equal(weights(1, 0)["0.weight"], weights(2, 0)["0.weight"])


def test_configure_model_is_idempotent_and_random_state_is_kept() -> None:
    L.seed_everything(1, verbose=False)
    expected = torch.randn(3)
    L.seed_everything(1, verbose=False)
    module = Staged()
    module.configure_model()
    stage = module.stages[0]
    module.configure_model()
    assert module.stages[0] is stage
    assert torch.equal(torch.randn(3), expected)


@pytest.mark.parametrize("rows", [0, 3])
def test_a_training_set_without_a_batch_is_refused(rows: int) -> None:
    loader = DataLoader(staged_rows(rows), batch_size=4, drop_last=True)
    with pytest.raises(ConfigError, match=r"training DataLoader of Staged has no batch on rank 0.*lower batch_size"):
        trainer(D9DStrategy()).fit(Staged(), loader)
    run = trainer(D9DStrategy(), max_epochs=1)
    run.fit(Staged(), data(), loader)
    assert run.global_step == 2


class Nested(Staged):
    """Batches of its own form: a list of rows, which only its own split_batch understands."""

    def split_batch(self, batch: list[Any], num_microbatches: int) -> list[Any]:
        size = -(-len(batch) // num_microbatches)
        return [batch[i : i + size] for i in range(0, len(batch), size)]

    def microbatch_inputs(self, microbatch: list[Any]) -> StageInputs:
        return super().microbatch_inputs(torch.utils.data.default_collate(microbatch))

    def microbatch_loss(self, output: Any, microbatch: list[Any]) -> Any:
        return super().microbatch_loss(output, torch.utils.data.default_collate(microbatch))

    def microbatch_metrics(self, output: Any, microbatch: list[Any]) -> dict[str, Any]:
        return {}


def test_batches_of_another_form_with_an_own_split() -> None:
    states = []
    for module, collate in ((Nested(), list), (Staged(), None)):
        L.seed_everything(3, verbose=False)
        run = trainer(D9DStrategy(num_microbatches=2), precision="64-true", max_epochs=1)
        run.fit(module, DataLoader(staged_rows(8), batch_size=4, collate_fn=collate))
        states.append(module.state_dict())
    assert_tensors_close(*states)


def test_parallelize_stage_sees_the_stage_before_it_has_storage() -> None:
    seen: list[bool] = []

    class Parallel(Staged):
        def parallelize_stage(self, stage: nn.Module, mesh: Any, parallel: Any) -> None:
            seen.append(all(p.is_meta for p in stage.parameters()))

    trainer(D9DStrategy(), max_epochs=1).fit(Parallel(), data())
    assert seen == [True]
