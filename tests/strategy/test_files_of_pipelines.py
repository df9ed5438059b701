"""Optimizers of pipelines in Lightning's own files: what was saved goes on in one process, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_d9d import CheckpointConfig, D9DStrategy, MeshConfig, convert
from lightning_d9d.cli.commands import parse
from lightning_d9d.optim import parameter_groups
from tests.harness.compare import assert_bitwise_equal, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind
from tests.meshes.equality import whole
from tests.strategy.pipelined import Pipelined, token_rows
from tests.strategy.plain import trainer

ROWS, BATCH = 16, 8
"""Two steps an epoch."""


class Grouped(Pipelined):
    """Groups that no stage has all of, with a learning rate of their own, and frozen parameters in one of them."""

    def __init__(self) -> None:
        super().__init__(tied=True, frozen=("layers.2.",))

    def configure_optimizers(self) -> Any:
        slow = [p for name, p in self.named_parameters() if ".norm." in name]  # frozen ones, too
        slow_ids = {id(each) for each in slow}
        groups = [
            {**group, "params": [each for each in group["params"] if id(each) not in slow_ids]}
            for group in parameter_groups(self, 0.3)
        ]
        optimizer = torch.optim.AdamW([*groups, {"params": slow, "lr": 0.003, "weight_decay": 0.0}], lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7), "interval": "step"}]

    def train_dataloader(self) -> DataLoader:
        rows, ranks = token_rows(ROWS), self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        return DataLoader(
            rows,  # type: ignore[arg-type]
            BATCH // ranks["num_replicas"],
            sampler=DistributedSampler(rows, shuffle=False, **ranks),  # type: ignore[arg-type]
        )


class SaveBoth(L.Callback):
    """Saves a directory and a file after the first epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 0:
            for mode in ("sharded", "consolidated"):
                trainer.strategy.checkpoint_config = CheckpointConfig(mode=mode)  # type: ignore[attr-defined]
                trainer.save_checkpoint(self.folder / f"{mode}.ckpt")


def fit(
    strategy: Any, devices: int, device: str, path: Path | None = None, callbacks: Any = (), epochs: int = 2
) -> tuple[Grouped, L.Trainer]:
    L.seed_everything(7, verbose=False)
    module = Grouped()
    run = trainer(strategy, devices, device, callbacks=[*callbacks], precision="64-true", max_epochs=epochs)
    run.fit(module, ckpt_path=path)
    return module, run


def losses(module: Grouped) -> dict[str, Tensor]:
    """Return the losses of the last epoch."""
    return dict(zip("ab", module.losses[-2:], strict=True))


def states_by_name(module: Grouped, optimizer: Any) -> dict[str, Tensor]:
    """What the optimizer has of each parameter, beside its group's hyperparameters."""
    of_parameters = {p: name for name, p in module.state_dict(keep_vars=True).items()}
    found = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            about = {"lr": torch.tensor(group["lr"]), "decay": torch.tensor(group["weight_decay"])}
            found |= {f"{of_parameters[parameter]} {k}": v for k, v in (about | optimizer.state[parameter]).items()}
    return found


class Remember(L.Callback):
    """What the optimizer has when training begins."""

    states: dict[str, Tensor]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Grouped)
        states = states_by_name(pl_module, trainer.optimizers[0])
        self.states = {name: whole(value).cpu().clone() for name, value in states.items()}


def check(rank: RankContext, mesh: MeshConfig, schedule: str) -> None:
    """A pipeline goes on from its directory and its file; one process, with a stock strategy, from both as files."""
    size, device, folder = rank.world_size, rank.device.type, rank.tmp_dir

    def ours() -> D9DStrategy:
        return D9DStrategy(mesh=mesh, schedule=schedule, microbatch_size=1)

    uninterrupted, _ = fit(ours(), size, device, callbacks=[SaveBoth(folder)])
    loaded: dict[str, dict[str, Tensor]] = {"sharded": {}, "consolidated": {}}
    for mode in loaded:
        remember = Remember()
        resumed, _ = fit(ours(), size, device, folder / f"{mode}.ckpt", [remember])
        for name, value in losses(resumed).items():
            assert_bitwise_equal(name, value, losses(uninterrupted)[name])
        for theirs in rank.all_gather_object(remember.states):
            loaded[mode] |= theirs
    if rank.rank == 0:
        convert.main(parse("convert", [str(folder / "sharded.ckpt"), str(folder / "converted.ckpt")]))
        convert.main(parse("convert", [str(folder / "sharded.ckpt"), str(folder / "weights.ckpt"), "--weights-only"]))
        weights = torch.load(folder / "weights.ckpt", weights_only=True)
        assert "optimizer_states" not in weights
        assert weights["state_dict"].keys() == Grouped.load_from_checkpoint(folder / "sharded.ckpt").state_dict().keys()
        for name in ("converted", "consolidated"):
            remember = Remember()
            alone, _ = fit("auto", 1, "cpu", folder / f"{name}.ckpt", [remember])
            for states in loaded.values():
                assert states.keys() == remember.states.keys()
                for key, value in remember.states.items():
                    assert_bitwise_equal(key, value, states[key])
            assert_tensors_close(losses(alone), losses(uninterrupted), kind=Kind.LOSS)
    rank.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_v"])
def test_files_and_directories(rank: RankContext, schedule: str) -> None:
    check(rank, MeshConfig(pipeline_parallel=2), schedule)


@pytest.mark.ranks(4)
def test_files_and_directories_of_shards(rank: RankContext) -> None:
    check(rank, MeshConfig(pipeline_parallel=2, data_parallel_shard=2), "interleaved_1f1b")


class SaveOnce(L.Callback):
    """Saves after the first epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


@pytest.mark.ranks(2)
def test_a_file_that_is_written_in_the_background(rank: RankContext) -> None:
    path = rank.tmp_dir / "background.ckpt"

    def ours() -> D9DStrategy:
        config = CheckpointConfig(mode="consolidated", asynchronous=True)
        return D9DStrategy(mesh=MeshConfig(pipeline_parallel=2), microbatch_size=1, checkpoint=config)

    uninterrupted, _ = fit(ours(), 2, rank.device.type, callbacks=[SaveOnce(path)])
    resumed, _ = fit(ours(), 2, rank.device.type, path)
    assert path.is_file()
    for name, value in losses(resumed).items():
        assert_bitwise_equal(name, value, losses(uninterrupted)[name])


@pytest.mark.ranks(2)
def test_a_stock_file_goes_on_in_a_pipeline(rank: RankContext) -> None:
    path, expected = rank.tmp_dir / "stock.ckpt", None
    if rank.rank == 0:
        _, run = fit("auto", 1, "cpu", epochs=1)
        run.save_checkpoint(path)
        expected = losses(fit("auto", 1, "cpu", path)[0])
    expected = rank.all_gather_object(expected)[0]
    strategy = D9DStrategy(mesh=MeshConfig(pipeline_parallel=2), schedule="zero_bubble_v", microbatch_size=1)
    module, _ = fit(strategy, 2, rank.device.type, path)
    assert_tensors_close(losses(module), expected, kind=Kind.LOSS)
