"""`module(batch)`: a D9DModule is called like any other module, where this process has all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig, WeightedLoss
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from tests.harness.ranks import RankContext
from tests.strategy.plain import trainer
from tests.strategy.staged import Staged, staged_rows
from tests.strategy.test_token_mixing import Alone, Model, data

ROWS = staged_rows(4)
BATCH = {name: torch.stack([row[name] for row in ROWS]) for name in ("x", "y")}


def test_it_gives_what_the_loss_takes_with_gradients() -> None:
    module = Staged()
    with pytest.raises(
        ConfigError, match=r"the stages of Staged are built when a Trainer starts; call configure_model"
    ):
        module(BATCH)
    module.configure_model()
    output = module(BATCH)
    assert torch.equal(output, module.stages[0](BATCH["x"].float()))
    loss = module.microbatch_loss(output, BATCH)
    assert isinstance(loss, WeightedLoss)
    loss.value_sum.backward()
    assert all(p.grad is not None for p in module.parameters())


def test_a_trained_and_a_loaded_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Qwen3MoePretraining(preset="tiny", warmup_steps=1)
    ids = torch.randint(256, (4, 9))
    rows = [{"input_ids": row[:-1], "labels": row[1:]} for row in ids]
    run = trainer(D9DStrategy(), 1, max_epochs=1)
    run.fit(module, torch.utils.data.DataLoader(rows, 2))  # type: ignore[arg-type]
    run.save_checkpoint(tmp_path / "trained.ckpt")
    batch = {"input_ids": ids[:, :-1]}
    output = module.eval()(batch).logits
    assert output.shape == (4, 8, 256)
    loaded = Qwen3MoePretraining.load_from_checkpoint(tmp_path / "trained.ckpt").eval()
    assert torch.equal(loaded(batch).logits, output)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "mesh", [{"data_parallel_replicate": 2}, {"data_parallel_shard": 2}], ids=["replicas", "sharded"]
)
def test_after_data_parallel_training_all_ranks_call_it(rank: RankContext, mesh: dict[str, int]) -> None:
    module = Staged()
    run = trainer(D9DStrategy(mesh=MeshConfig(**mesh)), 2, rank.device.type, max_epochs=1)
    run.fit(module, torch.utils.data.DataLoader(ROWS, 2))  # type: ignore[arg-type]
    run.save_checkpoint(rank.tmp_dir / "trained.ckpt")
    loaded = Staged.load_from_checkpoint(rank.tmp_dir / "trained.ckpt").to(rank.device)
    batch = {name: tensor.to(rank.device) for name, tensor in BATCH.items()}
    torch.testing.assert_close(module.to(rank.device)(batch), loaded(batch), atol=1e-6, rtol=1e-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", [{"pipeline_parallel": 2}, {"context_parallel_shard": 2}], ids=["pp2", "cp2"])
def test_a_part_says_how_to_have_all(rank: RankContext, mesh: dict[str, int]) -> None:
    module = Model(Alone)
    run = trainer(D9DStrategy(mesh=MeshConfig(**mesh)), 2, rank.device.type, max_epochs=1)
    run.fit(module, data())
    with pytest.raises(ConfigError, match=r"this rank has a part of Model.*Trainer.predict on all ranks"):
        module(next(iter(data())))
