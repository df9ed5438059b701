"""Validation, test, prediction, checkpoints and metrics in a pipeline: what one process gives, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from torch import Tensor, nn
from torch.utils.data import DataLoader, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import MeanMetric, SumMetric

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig, StageInfo
from lightning_d9d.schedule import WrittenProgram
from tests.harness.compare import assert_close_named, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind
from tests.strategy.pipelined import Pipelined, plain_steps, token_rows
from tests.strategy.plain import trainer
from tests.strategy.staged import Staged, staged_rows


class Evaluated(Pipelined):
    """Keeps what hooks see, and counts batches in a torchmetrics metric."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.count, self.mean = SumMetric(), MeanMetric()
        self.seen: list[dict[str, Tensor]] = []
        self.calls: list[str] = []

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(outputs)
        self.count.update(len(batch["ids"]))
        self.mean.update(outputs["loss"], outputs["weight"])

    def on_validation_epoch_end(self) -> None:
        self.log("rows", self.count.compute())
        self.log("loss_again", self.mean.compute())
        self.count.reset()
        self.mean.reset()
        self.calls.append(f"validation at step {self.global_step}")


def loader(rows: Any, data_ranks: int = 1, data_rank: int = 0) -> DataLoader:
    return DataLoader(rows, batch_size=3, sampler=DistributedSampler(rows, data_ranks, data_rank, shuffle=False))


def of_one_process(**options: Any) -> Evaluated:
    L.seed_everything(7, verbose=False)
    module = Evaluated(**options)
    module.configure_model()
    return module


def whole_losses(module: Evaluated, rows: Any) -> tuple[Tensor, Tensor]:
    """Mean loss of all tokens, and logits of all rows."""
    (stage,) = module.stages
    total, count, logits = torch.zeros((), dtype=torch.float64), 0, []
    with torch.no_grad():
        for row in rows:
            row = {key: value.unsqueeze(0) for key, value in row.items()}
            output = stage(row["ids"], row["scale"])
            loss = module.microbatch_loss(output, row)
            total, count = total + loss.value_sum, count + int(loss.weight)
            logits.append(output.logits)
    return total / count, torch.cat(logits)


@pytest.mark.ranks(4)
def test_evaluation_and_prediction_equal_one_process(rank: RankContext) -> None:
    rows = token_rows(8)
    mesh = MeshConfig(pipeline_parallel=2, data_parallel_replicate=2)
    reference = of_one_process()
    loss, logits = whole_losses(reference, rows)
    for schedule in ("1f1b", "zero_bubble_v"):
        L.seed_everything(7, verbose=False)
        module = Evaluated()
        run = trainer(D9DStrategy(mesh=mesh, schedule=schedule), 4, rank.device.type, precision="64-true")
        data_rank = rank.rank % 2
        (result,) = run.validate(module, loader(rows, 2, data_rank), verbose=False)
        assert_close_named("val_loss", torch.tensor(result["val_loss"]), loss, kind=Kind.LOSS)
        assert result["rows"] == len(rows)
        assert_close_named("by torchmetrics", torch.tensor(result["loss_again"]), loss.float(), kind=Kind.LOSS)
        (tested,) = run.test(module, loader(rows, 2, data_rank), verbose=False)
        assert tested["test_loss"] == result["val_loss"]
        assert tested["test_accuracy"] == result["val_accuracy"]
        assert len({str(each) for each in rank.all_gather_object([result, tested])}) == 1
        predicted = run.predict(module, loader(rows, 2, data_rank))
        assert predicted is not None
        assert_close_named("logits", torch.cat(predicted), logits[data_rank::2], kind=Kind.OUTPUT)
        module.share_predictions = False
        predicted = run.predict(module, loader(rows, 2, data_rank))
        has_last_stage = (rank.rank // 2 == 1) is (schedule == "1f1b")
        assert all((each is not None) is has_last_stage for each in predicted)


@pytest.mark.ranks(2)
def test_validation_in_the_middle_of_an_epoch(rank: RankContext) -> None:
    """Evaluation between training batches, of other shapes, leaves training as it is without."""
    rows, states = token_rows(12), []
    for interval in (1.0, 0.5):
        L.seed_everything(7, verbose=False)
        module = Evaluated()
        run = trainer(
            D9DStrategy(mesh=MeshConfig(pipeline_parallel=2), schedule="interleaved_1f1b"),
            2,
            rank.device.type,
            precision="64-true",
            max_epochs=2,
            val_check_interval=interval,
            num_sanity_val_steps=2,
        )
        run.fit(module, loader(rows), DataLoader(token_rows(4, lengths=(3,)), batch_size=4))
        assert module.calls == [f"validation at step {s}" for s in ([0, 4, 8] if interval == 1 else [0, 2, 4, 6, 8])]
        assert run.global_step == 8
        states.append(module.state_dict())
    assert_tensors_close(*states)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tied", [False, True])
def test_checkpoints_go_from_and_to_pipelines(rank: RankContext, tied: bool) -> None:
    """Four steps in one go on two stages; two steps there, then two in other stages; one process goes on likewise."""
    rows = token_rows(12)

    def fit(
        schedule: str, max_steps: int, path: Path | None = None, alone: bool = False
    ) -> tuple[Evaluated, L.Trainer]:
        L.seed_everything(7, verbose=False)
        module = Evaluated(tied=tied)
        mesh = None if alone else MeshConfig(pipeline_parallel=2)
        run = trainer(
            D9DStrategy(mesh=mesh, schedule=schedule, microbatch_size=1),
            1 if alone else 2,
            rank.device.type,
            precision="64-true",
            max_steps=max_steps,
        )
        run.fit(module, loader(rows), ckpt_path=path)
        return module, run

    whole, _ = fit("1f1b", 4)
    _, run = fit("zero_bubble_v", 2)
    path = rank.tmp_dir / "two_steps"
    run.save_checkpoint(path)
    resumed, run = fit("1f1b", 4, path)
    assert run.global_step == 4
    assert_tensors_close(resumed.state_dict(), whole.state_dict())
    expected = {}
    for theirs in rank.all_gather_object(whole.state_dict()):
        expected |= theirs
    loaded = Evaluated.load_from_checkpoint(path, tied=tied)
    assert set(loaded.state_dict()) == set(expected)
    run.save_checkpoint(rank.tmp_dir / "four_steps")
    loaded = Evaluated.load_from_checkpoint(rank.tmp_dir / "four_steps", tied=tied)
    assert_tensors_close(loaded.state_dict(), expected)


@pytest.mark.ranks(2)
def test_files_of_one_process_give_pipelines_their_weights(rank: RankContext) -> None:
    rows = token_rows(6)
    L.seed_everything(7, verbose=False)
    module, path = Evaluated(), rank.tmp_dir / "file.ckpt"
    if rank.rank == 0:
        alone = L.Trainer(
            accelerator="cpu", devices=1, precision="64-true", max_steps=2, logger=False, enable_progress_bar=False
        )
        alone.fit(module, loader(rows))
        alone.save_checkpoint(path)
    rank.barrier()
    (expected,) = rank.all_gather_object(module.state_dict())[:1]
    resumed = Evaluated()
    strategy = D9DStrategy(mesh=MeshConfig(pipeline_parallel=2))
    run = trainer(strategy, 2, rank.device.type, precision="64-true", max_steps=3)
    run.validate(resumed, loader(rows), ckpt_path=path, verbose=False)
    ours = resumed.state_dict()
    assert_tensors_close(ours, {name: expected[name] for name in ours})


class Shifted(Staged):
    """Autograd makes the gradient of `table` of the memory of the product's."""

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        return Shift(super().configure_stage(stage))


class Shift(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.linear = layers, nn.Linear(4, 4)
        self.table = nn.Parameter(torch.empty(4))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.table)

    def forward(self, input: Tensor) -> Tensor:
        return self.linear(self.layers(input)) + self.table.unsqueeze(0)


def test_split_backwards_where_a_gradient_shares_memory() -> None:
    """With one row a microbatch, `table` gets the memory that the weight backward of `linear` reads."""
    weights = []
    for schedule in ("1f1b", WrittenProgram("0F0 0F1 0I0 0I1 0W0 0W1")):
        L.seed_everything(7, verbose=False)
        module = Shifted()
        run = trainer(D9DStrategy(schedule=schedule, microbatch_size=1), max_steps=2)
        run.fit(module, DataLoader(staged_rows(4, ignored_every=None), batch_size=2))
        weights.append(module.state_dict())
    assert_tensors_close(*weights)


@pytest.mark.ranks(2)
def test_ranks_of_a_pipeline_read_the_loaders_own_order(rank: RankContext) -> None:
    """Lightning's sampler for several ranks always shuffles. Unequal shuffled orders would raise."""
    rows: Any = token_rows(8)
    L.seed_everything(7, verbose=False)
    module = Evaluated()
    strategy = D9DStrategy(mesh=MeshConfig(pipeline_parallel=2))
    trainer(strategy, 2, rank.device.type, precision="64-true", max_epochs=1).fit(
        module, DataLoader(rows, batch_size=2)
    )
    L.seed_everything(7, verbose=False)
    expected = plain_steps(module, [[rows[i : i + 2]] for i in range(0, 8, 2)], clip=1e9)
    assert_close_named("losses", torch.stack(module.losses).cpu(), torch.stack(expected.losses), kind=Kind.LOSS)
    weighted = WeightedRandomSampler([1.0] * 8, 8)
    for shuffled in (DataLoader(rows, batch_size=2, shuffle=True), DataLoader(rows, batch_size=2, sampler=weighted)):
        module, strategy = Evaluated(), D9DStrategy(mesh=MeshConfig(pipeline_parallel=2))
        trainer(strategy, 2, rank.device.type, precision="64-true", max_epochs=2).fit(module, shuffled)
        assert not torch.equal(torch.stack(module.losses[:4]), torch.stack(module.losses[4:]))
        assert getattr(shuffled.sampler, "generator", 0) is None


@pytest.mark.ranks(2)
def test_tuning_the_batch_size_is_refused(rank: RankContext) -> None:
    strategy = D9DStrategy(mesh=MeshConfig(pipeline_parallel=2))
    run = trainer(strategy, 2, rank.device.type, callbacks=[BatchSizeFinder()])
    with pytest.raises(ConfigError, match="the batch size cannot be tuned on 2 ranks"):
        run.fit(Evaluated(), loader(token_rows(4)))


def test_a_module_goes_on_with_other_stages_in_one_process() -> None:
    """The module is used as in a notebook: its weights are split again, and frozen ones stay frozen."""
    rows = token_rows(8)
    module, losses = Evaluated(tied=True, frozen=("layers.0",)), []
    strategies: list[Any] = [D9DStrategy(schedule=s, microbatch_size=1) for s in ("1f1b", "zero_bubble_v", "gpipe")]
    L.seed_everything(7, verbose=False)
    trainer(strategies[0], precision="64-true", max_steps=1).fit(module, loader(rows))
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    for strategy in [*strategies[1:], "auto"]:
        run = trainer(strategy, precision="64-true")
        losses += [result["val_loss"] for result in run.validate(module, loader(rows), verbose=False)]
        assert_tensors_close(module.state_dict(), weights)
    for loss in losses[1:]:
        assert_close_named("val_loss", torch.tensor(loss), torch.tensor(losses[0]), kind=Kind.LOSS)
    trainer(D9DStrategy(schedule="zero_bubble_v", microbatch_size=1), precision="64-true", max_steps=1).fit(
        module, loader(rows)
    )
    changed = {name for name, value in module.state_dict().items() if not torch.equal(value, weights[name])}
    assert changed == {name for name in weights if not name.startswith("layers.0")}


@pytest.mark.ranks(2)
def test_a_whole_module_is_cut_for_a_pipeline(rank: RankContext) -> None:
    whole = of_one_process()
    loss, _ = whole_losses(whole, token_rows(8))
    run = trainer(D9DStrategy(mesh=MeshConfig(pipeline_parallel=2)), 2, rank.device.type, precision="64-true")
    (result,) = run.validate(whole, loader(token_rows(8)), verbose=False)
    assert_close_named("val_loss", torch.tensor(result["val_loss"]), loss, kind=Kind.LOSS)
    assert len(whole.state_dict()) < len(of_one_process().state_dict())


class Touch(L.Callback):
    """Updates a metric as a microbatch hook would, but on all ranks: a rank alone with an error ends the others."""

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        with pl_module.schedule_running():
            pl_module.count.update(1)


@pytest.mark.ranks(2)
def test_metrics_updated_in_microbatch_hooks_are_refused(rank: RankContext) -> None:
    strategy = D9DStrategy(mesh=MeshConfig(pipeline_parallel=2))
    run = trainer(strategy, 2, rank.device.type, precision="64-true", callbacks=[Touch()])
    with pytest.raises(ConfigError, match="a SumMetric was updated in a microbatch hook"):
        run.validate(Evaluated(), loader(token_rows(3)), verbose=False)
