"""What ranks agree on before they train, how they are called, and how long they wait."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_module
from lightning.pytorch.callbacks import Callback

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig, TimeoutConfig
from lightning_d9d.log import logger
from tests.harness.ranks import RankContext
from tests.strategy.plain import Plain, loader, trainer
from tests.strategy.staged import Staged


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["microbatch_size", "Trainer.accumulate_grad_batches"])
def test_ranks_with_different_configurations_are_refused(rank: RankContext, name: str) -> None:
    of_trainer = {"accumulate_grad_batches": 1 + rank.rank} if name.startswith("Trainer") else {}
    strategy = D9DStrategy(microbatch_size=None if of_trainer else 1 + rank.rank)
    with pytest.raises(ConfigError, match=f"rank 0 has {name}=1 where rank 1 has {name}=2; start all of them alike"):
        trainer(strategy, 2, str(rank.device), **of_trainer).fit(Staged(), loader(8))


@pytest.mark.ranks(2)
def test_degrees_that_do_not_fit_the_ranks_are_refused(rank: RankContext) -> None:
    with pytest.raises(ConfigError, match="data_parallel_replicate=3 does not divide 2 ranks: at most 2 fits, or -1"):
        trainer(D9DStrategy(mesh=MeshConfig(data_parallel_replicate=3)), 2, str(rank.device)).fit(Plain(), loader(8))


@pytest.mark.ranks(2)
def test_mesh_of_a_run(rank: RankContext) -> None:
    """Data are split by it, the rank is named by it, and it is told before the first step."""
    seen: list[Any] = []
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]

    class Watch(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            mesh = trainer.strategy.mesh
            seen.append((mesh.dp_rank, mesh.dp_size, trainer.train_dataloader.sampler.rank, mesh.group("dp")))
            logger.warning("hello")

    logger.addHandler(handler)
    info = rank_zero_module.log
    info.addHandler(handler)
    level = info.level
    info.setLevel(logging.INFO)
    try:
        for _ in range(2):
            strategy = D9DStrategy(mesh=MeshConfig(data_parallel_replicate=2))
            trainer(strategy, 2, str(rank.device), max_steps=1, callbacks=[Watch()]).fit(Plain(), loader(16))
    finally:
        logger.removeHandler(handler)
        info.removeHandler(handler)
        info.setLevel(level)
    assert seen == [(rank.rank, 2, rank.rank, dist.group.WORLD)] * 2
    assert told.count(f"[dp{rank.rank}] hello") == 2
    tables = [text for text in told if "tokens per step" in text]
    assert len(tables) == (2 if rank.rank == 0 else 0)
    for table in tables:
        assert table.startswith(f"2 ranks on {rank.device.type}, seen from rank 0")
        assert "dp 0/2" in table
        assert table.splitlines()[-2:][0].split() == ["tokens", "per", "step", "8"]


@pytest.mark.ranks(2)
def test_timeouts_before_and_after_the_first_step(rank: RankContext) -> None:
    seconds: list[float] = []

    def now() -> float:
        assert dist.group.WORLD is not None
        return dist.group.WORLD._get_backend(rank.device).options._timeout.total_seconds()

    class Watch(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            seconds.append(now())

    timeouts = TimeoutConfig(init_seconds=100, step_seconds=70)
    trainer(D9DStrategy(timeouts=timeouts), 2, str(rank.device), max_steps=3, callbacks=[Watch()]).fit(
        Plain(), loader(32)
    )
    assert seconds[1:] == [70, 70]
    assert now() == 100
