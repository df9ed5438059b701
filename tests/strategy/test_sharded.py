"""Plain modules that shard themselves: the numbers of one process, and checkpoints that any mesh loads."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data.distributed import DistributedSampler

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig, RankError
from lightning_d9d.checkpoint import open_directory
from tests.harness import warm
from tests.harness.compare import assert_bitwise_equal, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.strategy.plain import Plain, loader, rows, trainer
from tests.strategy.sharded import BATCH, ROWS, Sharded, fit, train_on_two

TWO = {
    "shard": MeshConfig(data_parallel_shard=2),
    "tensor": MeshConfig(tensor_parallel=2),
    "replicate": MeshConfig(data_parallel_replicate=2),
}
FOUR = {
    "shard": MeshConfig(data_parallel_shard=4),
    "hybrid": MeshConfig(data_parallel_replicate=2, data_parallel_shard=2),
    "shard, tensor": MeshConfig(data_parallel_shard=2, tensor_parallel=2),
    "tensor": MeshConfig(tensor_parallel=4),
}


def one_process() -> tuple[list[float], dict[str, Any]]:
    """Train without a Trainer, which would meet the ranks of the test."""
    module = Sharded()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    data = rows(ROWS, torch.float64)
    order = list(DistributedSampler(data, num_replicas=1, rank=0))
    for step in range(6):
        batch = order[BATCH * step : BATCH * (step + 1)]
        x, y = data[batch]
        loss = nn.functional.cross_entropy(module.net(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = 0.1 * 0.9**step
        optimizer.step()
        losses.append(float(loss))
    return losses, module.state_dict() | {"num_steps": torch.tensor(6.0, dtype=torch.float64)}


@pytest.mark.ranks(4)
def test_replicas_of_shards_begin_equal(rank: RankContext) -> None:
    """Though nobody seeded the ranks alike."""
    built: list[dict[str, Any]] = []

    class Random(Sharded):
        def configure_model(self) -> None:
            nn.init.normal_(self.net[0].weight)  # type: ignore[arg-type]
            super().configure_model()

        def on_train_start(self) -> None:
            built.append({name: p.to_local().cpu() for name, p in self.named_parameters() if isinstance(p, DTensor)})

    torch.manual_seed(rank.rank)
    fit(Random(), FOUR["hybrid"], 4, str(rank.device), max_steps=1)
    first, second, third, fourth = rank.all_gather_object(built[0])
    for ours, theirs in ((first, third), (second, fourth)):
        for name, weight in ours.items():
            assert_bitwise_equal(name, weight, theirs[name])


def check_equality(rank: RankContext, mesh: MeshConfig) -> None:
    module = Sharded()
    _, weights = fit(module, mesh, rank.world_size, str(rank.device), max_epochs=1)
    losses, expected = one_process()
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(losses), rtol=1e-10, atol=0)
    assert_tensors_close(weights, expected)
    assert any(isinstance(p, DTensor) for p in module.parameters()) == (mesh != TWO["replicate"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", TWO)
def test_two_ranks_equal_one(rank: RankContext, mesh: str) -> None:
    check_equality(rank, TWO[mesh])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", FOUR)
def test_four_ranks_equal_one(rank: RankContext, mesh: str) -> None:
    check_equality(rank, FOUR[mesh])


def midway(folder: Path) -> ModelCheckpoint:
    """Saves step=3.ckpt in the middle of the epoch."""
    return ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("saved", "mode", "loaded"),
    [
        ("shard", "auto", "shard, tensor"),
        pytest.param("shard, tensor", "auto", "hybrid", marks=pytest.mark.meshes),
        ("hybrid", "auto", "tensor"),
        pytest.param("tensor", "consolidated", "shard", marks=pytest.mark.meshes),
        ("shard, tensor", "consolidated", "shard, tensor"),
    ],
)
def test_another_mesh_goes_on_in_the_middle_of_an_epoch(rank: RankContext, saved: str, mode: str, loaded: str) -> None:
    """The last three steps of six, with moments, schedule and place in the data as without the interruption."""
    device, folder = str(rank.device), rank.tmp_dir
    keep: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [midway(folder)]}
    _, expected = fit(Sharded(optimizer="adamw"), FOUR[saved], 4, device, mode, max_epochs=1, **keep)
    path = folder / "step=3.ckpt"
    assert path.is_dir() == (mode == "auto")
    resumed = Sharded(optimizer="adamw")
    run, weights = fit(resumed, FOUR[loaded], 4, device, max_epochs=1, path=path)
    assert (run.global_step, len(resumed.losses)) == (6, 3)
    assert run.lr_scheduler_configs[0].scheduler.last_epoch == 6
    assert_tensors_close(weights, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", TWO)
def test_the_same_mesh_goes_on_bit_for_bit(rank: RankContext, mesh: str) -> None:
    """The module has dropout, and each rank continues its random numbers. ModelCheckpoint saves, and the last file is
    found."""
    options: dict[str, Any] = {"mesh": TWO[mesh], "devices": 2, "device": str(rank.device), "max_epochs": 2}
    torch.manual_seed(rank.rank)
    whole = Sharded(dropout=0.5)
    _, expected = fit(whole, **options)
    for steps in (3, 6, 9):
        torch.manual_seed(rank.rank)
        callbacks = [ModelCheckpoint(rank.tmp_dir / str(steps), save_last=True, every_n_train_steps=steps)]
        keep: dict[str, Any] = {"enable_checkpointing": True, "callbacks": callbacks}
        fit(Sharded(dropout=0.5), **options, **keep, max_steps=steps)
        torch.manual_seed(100)
        resumed = Sharded(dropout=0.5)
        keep["callbacks"] = [ModelCheckpoint(rank.tmp_dir / str(steps), save_last=True)]
        _, weights = fit(resumed, **options, **keep, path="last")
        assert resumed.rows == whole.rows[steps:]
        assert resumed.losses == whole.losses[steps:]
        for name, weight in weights.items():
            assert_bitwise_equal(name, weight, expected[name])


def train_two(folder: Path, path: Path | None) -> None:
    """Train in processes that are forked from one with all imports."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = [warm.context().Process(target=train_on_two, args=(number, port, folder, path)) for number in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        rank.kill()
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]


@pytest.mark.jobs
def test_two_ranks_and_one_process_go_on_from_each_other(tmp_path: Path) -> None:
    keep: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [midway(tmp_path / "one")]}
    _, expected = fit(Sharded(optimizer="adamw"), max_epochs=1, **keep)
    train_two(tmp_path / "two", tmp_path / "one" / "step=3.ckpt")
    saved = open_directory(tmp_path / "two" / "step=6.ckpt").read("model.")
    assert_tensors_close({name.removeprefix("model."): value for name, value in saved.items()}, expected)
    train_two(tmp_path / "two", None)
    _, weights = fit(Sharded(optimizer="adamw"), max_epochs=1, path=tmp_path / "two" / "step=3.ckpt")
    assert_tensors_close(weights, expected)


@pytest.mark.ranks(2)
def test_what_does_not_hold_to_the_rules_is_refused(rank: RankContext) -> None:
    def start(module: Plain, mesh: MeshConfig) -> None:
        trainer(D9DStrategy(mesh=mesh), 2, str(rank.device)).fit(module, loader(16))

    with pytest.raises(ConfigError, match=r"data_parallel_shard=2, but no parameter of Plain .* fully_shard"):
        start(Plain(), TWO["shard"])
    torch.manual_seed(0)
    with pytest.raises(ConfigError, match=r"tensor_parallel=2, but no parameter of Plain .* parallelize_module"):
        start(Plain(), TWO["tensor"])
    with pytest.raises(ConfigError, match=r"expert_parallel=2, but .* in configure_model by .*shard_experts.* at 1$"):
        start(Plain(), MeshConfig(data_parallel_replicate=2, expert_parallel=2))
    torch.manual_seed(rank.rank)  # each rank its own part, as plain tensors
    with pytest.raises(ConfigError, match=r"net.0.weight with hash .*Tensors that are sharded must be DTensors"):
        start(Plain(), TWO["tensor"])

    class Slice(Plain):
        def configure_model(self) -> None:
            self.net[3] = nn.Linear(16, 4 + rank.rank)

    with pytest.raises(RankError, match=r"rank 0 has net.3.weight \[4, 16\].* where rank 1 has net.3.weight \[5, 16\]"):
        start(Slice(), TWO["replicate"])
