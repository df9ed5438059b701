"""What ranks agree on before they train, how they are called, and how long they wait."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_module
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig, TimeoutConfig
from lightning_d9d.log import logger
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoePretraining
from lightning_d9d.schedule import GPipe, LoopedBFS, WrittenProgram
from tests.harness.ranks import RankContext
from tests.strategy.pipelined import Pipelined, token_rows
from tests.strategy.plain import Plain, loader, trainer
from tests.strategy.staged import Staged


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["microbatch_size", "Trainer.accumulate_grad_batches"])
def test_ranks_with_different_configurations_are_refused(rank: RankContext, name: str) -> None:
    of_trainer = {"accumulate_grad_batches": 1 + rank.rank} if name.startswith("Trainer") else {}
    strategy = D9DStrategy(microbatch_size=None if of_trainer else 1 + rank.rank)
    with pytest.raises(
        ConfigError, match=f"rank 0 has {name}=1 where rank 1 has {name}=2; start all of them with the same one"
    ):
        trainer(strategy, 2, str(rank.device), **of_trainer).fit(Staged(), loader(8))


@pytest.mark.ranks(2)
def test_degrees_that_do_not_fit_the_ranks_are_refused(rank: RankContext) -> None:
    with pytest.raises(ConfigError, match="data_parallel_replicate=3 does not divide 2 ranks: at most 2 fits, or -1"):
        trainer(D9DStrategy(mesh=MeshConfig(data_parallel_replicate=3)), 2, str(rank.device)).fit(Plain(), loader(8))


@pytest.mark.parametrize("module", [Plain, Staged])
def test_steps_without_batches_are_refused(module: type[Plain | Staged]) -> None:
    with pytest.raises(ConfigError, match="accumulate_grad_batches=0 must be at least 1, the batches of a step"):
        trainer(D9DStrategy(), 1, accumulate_grad_batches=0).fit(module(), loader(8))


class PlacedOn(GPipe):
    """Stages on ranks that were chosen without looking at their number."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        return self.ranks


TWO_STAGES = {"mesh": MeshConfig(pipeline_parallel=2)}
REFUSED_PIPELINES: dict[str, tuple[dict[str, Any], str]] = {
    "more ranks than there are": (
        {"mesh": MeshConfig(pipeline_parallel=4)},
        "pipeline_parallel=4 does not divide 2 ranks: at most 2 fits",
    ),
    "product too large": (
        {"mesh": MeshConfig(pipeline_parallel=2, data_parallel_replicate=2)},
        "data_parallel_replicate=2 does not divide 2 ranks, of which pipeline_parallel=2 leave 1: at most 1 fits",
    ),
    "product too small": ({"mesh": MeshConfig()}, "MeshConfig asks for 1 of 2 ranks"),
    "program of other ranks": (
        {**TWO_STAGES, "schedule": WrittenProgram("0F0 0B0\n1F0 1B0\n2F0 2B0")},
        "the written program has 3 lines, but there are 2 pipeline ranks",
    ),
    "stage on no rank": ({**TWO_STAGES, "schedule": PlacedOn(0, 1, 2)}, r"PlacedOn places its 3 stages .* \[0, 1, 2\]"),
    "rank without stage": ({**TWO_STAGES, "schedule": PlacedOn(0, 0)}, r"PlacedOn places its 2 stages .* \[0, 0\]"),
    "no stages": ({**TWO_STAGES, "schedule": LoopedBFS(0)}, "LoopedBFS places its 0 stages"),
    "microbatch_size": ({**TWO_STAGES, "microbatch_size": 3}, "4 rows, which microbatch_size=3 does not divide"),
    "too few microbatches": (
        {**TWO_STAGES, "schedule": "dual_pipe_v", "num_microbatches": 2},
        "DualPipeV on 2 pipeline ranks does not support 2 microbatches; nearest supported: 4",
    ),
}
REFUSING_SECONDS = 30.0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mistake", REFUSED_PIPELINES)
def test_refused_pipelines(rank: RankContext, mistake: str) -> None:
    """Pipelines are refused on every rank, soon, and the same ranks can fit afterwards."""
    options, message = REFUSED_PIPELINES[mistake]
    start = time.monotonic()
    with pytest.raises(ConfigError, match=message):
        fit_pipelined(rank, Pipelined(), token_rows(8), **options)
    assert time.monotonic() - start < REFUSING_SECONDS
    fit_pipelined(rank, Pipelined(), token_rows(8), **TWO_STAGES)


@pytest.mark.ranks(2)
def test_more_stages_than_layers_are_refused(rank: RankContext) -> None:
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"2 layers cannot be split into 8 stages.*use 1 to 2 stages"):
        fit_pipelined(rank, Qwen3MoePretraining(config), token_rows(8), schedule=LoopedBFS(4), **TWO_STAGES)
    assert time.monotonic() - start < REFUSING_SECONDS


def fit_pipelined(rank: RankContext, module: Any, rows: Any, **options: Any) -> None:
    strategy = D9DStrategy(**options)
    run = trainer(strategy, 2, str(rank.device), precision="64-true", max_steps=1)
    run.fit(module, DataLoader(rows, batch_size=4))
    assert run.global_step == 1


@pytest.mark.ranks(2)
def test_mesh_of_a_run(rank: RankContext) -> None:
    """Data are split by it, the rank is named by it, and it is said before the first step."""
    seen: list[Any] = []
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]

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
    assert said.count(f"[dp{rank.rank}] hello") == 2
    tables = [text for text in said if "tokens per step" in text]
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
