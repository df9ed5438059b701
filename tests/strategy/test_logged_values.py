"""What hooks log and reduce: the values of one process, on every rank of any mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import SumMetric
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

from lightning_d9d import D9DStrategy, MeshConfig
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoePretraining
from tests.harness.compare import assert_close_named
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind
from tests.strategy.plain import trainer
from tests.strategy.sharded import ROWS, Sharded

CONFIG = Qwen3MoeConfig(
    vocab_size=32,
    hidden_size=16,
    moe_intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    initializer_range=0.3,
)
TRAINING_ROWS, VALIDATION_ROWS, BATCH = 8, 7, 4
MESHES = {
    "pp2": {"pipeline_parallel": 2},
    "rep2 ep2": {"data_parallel_replicate": 2, "expert_parallel": 2},
    "cp2": {"context_parallel_shard": 2},
    "tp2": {"tensor_parallel": 2},
    "pp2 rep2": {"pipeline_parallel": 2, "data_parallel_replicate": 2},
    "pp2 cp2": {"pipeline_parallel": 2, "context_parallel_shard": 2},
    "shard2 tp2 ep4": {"data_parallel_shard": 2, "tensor_parallel": 2, "expert_parallel": 4},
}
TWO = [name for name, degrees in MESHES.items() if MeshConfig(**degrees).world_size == 2]
FOUR = [name for name in MESHES if name not in TWO]
MARKS = {"pp2 cp2": pytest.mark.meshes}


def rows(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [{"input_ids": ids[:-1], "labels": ids[1:]} for ids in torch.randint(32, (count, 9), generator=generator)]


class Logging(Qwen3MoePretraining):
    """Logs means, sums and extremes from every kind of hook, and counts rows in a torchmetrics metric."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.count = SumMetric()
        self.scores = {"accuracy": BinaryAccuracy(), "auroc": BinaryAUROC()}
        self.kept = nn.ModuleDict(self.scores)  # AUROC keeps all scores, which ranks gather
        self.reduced: list[Tensor] = []

    def read(self, count: int) -> DataLoader:
        """Every n-th row: a data rank may have fewer than another."""
        ranks = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        each, first = ranks["num_replicas"], ranks["rank"]
        return DataLoader(rows(count)[first::each], batch_size=BATCH // each)  # type: ignore[arg-type]

    def train_dataloader(self) -> DataLoader:
        return self.read(TRAINING_ROWS)

    def val_dataloader(self) -> DataLoader:
        return self.read(VALIDATION_ROWS)

    def microbatch_metrics(self, output: Any, microbatch: Any) -> dict[str, Tensor]:
        return {"ids": microbatch["input_ids"].double().mean()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        ids, strategy = batch["input_ids"].double(), self.trainer.strategy
        self.log("loss_again", outputs["loss"], sync_dist=True, on_step=True, on_epoch=True, batch_size=len(ids))
        self.log("sum_of_ids", ids.sum(), sync_dist=True, reduce_fx="sum")
        self.log("least_id", ids.min(), sync_dist=True, reduce_fx="min")
        self.log("largest_id", ids.max(), sync_dist=True, reduce_fx="max")
        values: list[tuple[Tensor, Any]] = [
            (torch.tensor(len(ids)), "sum"),
            (torch.tensor(len(ids)), dist.ReduceOp.SUM),
            (ids.mean(), "mean"),
            (ids.mean(), None),
            (ids.max(), "max"),
            (ids.min(), dist.ReduceOp.MIN),
        ]
        self.reduced += [strategy.reduce(value.clone(), reduce_op=op).double() for value, op in values]

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        ids = batch["input_ids"].double()
        self.log("mean_id", ids.mean(), sync_dist=True, batch_size=len(ids))
        self.log("num_rows", float(len(ids)), sync_dist=True, reduce_fx="sum")
        self.count.update(len(ids))
        for metric in self.scores.values():
            metric.update(ids.mean(1) / 32, batch["labels"][:, -1] % 2)

    def on_validation_epoch_end(self) -> None:
        self.log("counted", self.count)
        self.log_dict(self.scores)  # type: ignore[arg-type]  # of metrics, as they are

    def on_train_epoch_end(self) -> None:
        self.log("mean_rank", float(self.global_rank), sync_dist=True)


def logged(mesh: MeshConfig | None, rank: RankContext) -> tuple[dict[str, Tensor], Tensor]:
    """Return the values of an epoch: those that callbacks see, and those that hooks reduced."""
    torch.manual_seed(7)
    module = Logging()
    strategy, devices = ("auto", 1) if mesh is None else (D9DStrategy(mesh=mesh), rank.world_size)
    options: dict[str, Any] = {"precision": "64-true", "max_epochs": 1, "use_distributed_sampler": False}
    run = trainer(strategy, devices, rank.device.type, **options)
    run.fit(module)
    return {name: value.double().cpu() for name, value in run.callback_metrics.items()}, torch.stack(module.reduced)


def check_mesh(rank: RankContext, name: str) -> None:
    ours, reduced = logged(MeshConfig(**MESHES[name]), rank)
    expected, expected_reduced = logged(None, rank)
    ours.pop("grad_norm")
    # The process beside other ranks cannot tell: torchmetrics sums over whatever ranks there are.
    expected["counted"] = torch.tensor(VALIDATION_ROWS, dtype=torch.float64)
    expected["mean_rank"] = torch.tensor((rank.world_size - 1) / 2, dtype=torch.float64)
    assert {"train_ids", "val_ids", "loss_again_epoch"} <= ours.keys() == expected.keys()
    for key, value in expected.items():
        assert_close_named(key, ours[key], value, kind=Kind.LOSS)
    assert expected["num_rows"] == VALIDATION_ROWS
    assert 0 < expected["auroc"] < 1
    assert expected["sum_of_ids"] == sum(float(row["input_ids"].sum()) for row in rows(TRAINING_ROWS)[BATCH:])
    assert_close_named("reduced", reduced, expected_reduced, kind=Kind.LOSS)
    on_ranks = rank.all_gather_object((ours, reduced))
    for other, also_reduced in on_ranks[1:]:
        assert other == on_ranks[0][0]
        assert torch.equal(also_reduced, on_ranks[0][1])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", TWO)
def test_two_ranks_log_what_one_process_logs(rank: RankContext, mesh: str) -> None:
    check_mesh(rank, mesh)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", [pytest.param(mesh, marks=MARKS.get(mesh, ())) for mesh in FOUR])
def test_four_ranks_log_what_one_process_logs(rank: RankContext, mesh: str) -> None:
    check_mesh(rank, mesh)


class Counting(Sharded):
    """A plain module whose ranks of tensor parallelism see the same rows."""

    def __init__(self) -> None:
        super().__init__()
        self.count = SumMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.count.update(len(batch[0]))
        self.log("counted", self.count, on_step=False, on_epoch=True)
        self.log("rows", float(len(batch[0])), sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("mean", batch[0].mean(), sync_dist=True, on_step=False, on_epoch=True)
        return loss


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "mesh",
    [MeshConfig(tensor_parallel=4), MeshConfig(tensor_parallel=2, data_parallel_shard=2)],
    ids=["tp4", "shard2 tp2"],
)
def test_a_plain_module_logs_what_one_process_logs(rank: RankContext, mesh: MeshConfig) -> None:
    seen = []
    for strategy, devices in ((D9DStrategy(mesh=mesh), 4), ("auto", 1)):
        run = trainer(strategy, devices, rank.device.type, max_epochs=1)
        run.fit(Counting())
        seen.append({name: value.double().cpu() for name, value in run.callback_metrics.items()})
    assert seen[0]["counted"] == seen[0]["rows"] == seen[1]["rows"] == ROWS
    assert_close_named("mean", seen[0]["mean"].float(), seen[1]["mean"].float(), kind=Kind.LOSS)


@pytest.mark.ranks(2)
def test_decisions_are_of_all_ranks_of_a_pipeline(rank: RankContext) -> None:
    """Lightning's checkpoints of the best models wait for every rank to want one."""
    decided: list[tuple[bool, bool]] = []

    class Deciding(Logging):
        def on_train_epoch_end(self) -> None:
            self.log("improving", -float(self.current_epoch), sync_dist=True)
            mine = self.global_rank == 0
            decide = self.trainer.strategy.reduce_boolean_decision
            decided.append((decide(mine, all=True), decide(mine, all=False)))

    best = ModelCheckpoint(rank.tmp_dir, "{epoch}", monitor="improving", save_top_k=1)
    strategy = D9DStrategy(mesh=MeshConfig(pipeline_parallel=2))
    options = {"enable_checkpointing": True, "max_epochs": 3, "use_distributed_sampler": False}
    trainer(strategy, 2, rank.device.type, callbacks=[best], **options).fit(Deciding())
    assert decided == [(False, True)] * 3
    assert best.best_model_path.endswith("epoch=2.ckpt")


@pytest.mark.ranks(2)
def test_samplers_are_the_trainers_own_again_afterwards(rank: RankContext) -> None:
    strategy = D9DStrategy(mesh=MeshConfig(pipeline_parallel=2))
    run = trainer(strategy, 2, rank.device.type, max_steps=1)
    for _ in range(2):
        run.fit(Logging())
        assert run._accelerator_connector.use_distributed_sampler is True
