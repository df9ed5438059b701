"""Which ranks of a run draw the same random numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from lightning_d9d import D9DStrategy, MeshConfig
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoePretraining
from tests.harness.ranks import RankContext
from tests.strategy.plain import trainer
from tests.strategy.sharded import Sharded
from tests.strategy.staged import Staged, staged_rows


class Noise(Dataset):
    """Draws from all three generators."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> list[Tensor]:
        drawn = torch.tensor([torch.rand(()).item(), float(np.random.rand()), random.random()], dtype=torch.float64)
        return [torch.cat([drawn, torch.full((5,), float(index), dtype=torch.float64)]), torch.tensor(0)]


class Noisy(Sharded):
    def train_dataloader(self) -> DataLoader:
        sampler = DistributedSampler(Noise(), **self.trainer.distributed_sampler_kwargs)  # type: ignore[arg-type]
        return DataLoader(Noise(), batch_size=2, sampler=sampler, num_workers=1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.rows += batch[0].tolist()
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


@pytest.mark.ranks(4)
def test_workers_of_ranks_that_read_the_same_samples_draw_the_same(rank: RankContext) -> None:
    module = Noisy()
    mesh = MeshConfig(data_parallel_shard=2, tensor_parallel=2)
    torch.manual_seed(rank.rank)
    trainer(D9DStrategy(mesh=mesh), 4, str(rank.device), max_epochs=2).fit(module)
    first, second, third, fourth = rank.all_gather_object(module.rows)
    assert first == second
    assert third == fourth
    drawn = np.array([*first, *third])[:, :3]
    assert len(np.unique(drawn)) == drawn.size == 48


class Draws(Callback):
    def __init__(self) -> None:
        self.drawn: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.drawn.append(torch.rand(()).item())


@pytest.mark.ranks(2)
def test_a_staged_modules_ranks_agree_on_weights_and_differ_in_dropout(rank: RankContext) -> None:
    """Though nobody seeded them alike."""
    built: list[dict[str, Tensor]] = []

    class Watched(Staged):
        def on_stages_built(self) -> None:
            built.append({name: weight.cpu().clone() for name, weight in self.state_dict().items()})

    seen = []
    for seed in (rank.rank, rank.rank, 7 + rank.rank):
        torch.manual_seed(seed)
        draws = Draws()
        run = trainer(D9DStrategy(), 2, str(rank.device), max_epochs=1, callbacks=[draws])
        run.fit(Watched(), DataLoader(staged_rows(16), batch_size=4))  # type: ignore[arg-type]
        seen.append(draws.drawn)
    of_ranks = rank.all_gather_object((built, seen))
    (weights, drawn), (other_weights, other_drawn) = of_ranks
    for ours, theirs in zip(weights, other_weights, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert drawn[0] == drawn[1]
    assert not set(drawn[0]) & {*drawn[2], *other_drawn[0]}


TINY = Qwen3MoeConfig(
    vocab_size=16,
    hidden_size=8,
    intermediate_size=8,
    moe_intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=4,
    num_experts=2,
    num_experts_per_tok=1,
)


@pytest.mark.ranks(2)
def test_tensor_parallel_ranks_agree_though_stages_saved(rank: RankContext) -> None:
    """Stages draw numbers of their own; ranks that hold copies of one activation must not go on with those."""
    path, drawn = rank.tmp_dir / "step.ckpt", {}
    ids = torch.arange(72).view(8, 9) % 16
    data = DataLoader([{"input_ids": row[:-1], "labels": row[1:]} for row in ids], batch_size=2)  # type: ignore[arg-type]
    for axis in ("pipeline_parallel", "tensor_parallel"):
        draws = Draws()
        strategy = D9DStrategy(mesh=MeshConfig(**{axis: 2}))
        is_first = axis == "pipeline_parallel"
        run = trainer(strategy, 2, str(rank.device), max_steps=2 if is_first else 3, callbacks=[draws])
        run.fit(Qwen3MoePretraining(TINY), data, ckpt_path=None if is_first else path)
        if is_first:
            run.save_checkpoint(path)
        drawn[axis] = draws.drawn
    ours, theirs = rank.all_gather_object(drawn)
    assert not set(ours["pipeline_parallel"]) & set(theirs["pipeline_parallel"])
    assert len(ours["tensor_parallel"]) == 1
    assert ours["tensor_parallel"] == theirs["tensor_parallel"]
