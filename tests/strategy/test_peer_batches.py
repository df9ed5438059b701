"""Batches whose tokens have no room in the memory of experts' ranks are computed again."""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig, ParallelConfig, memory
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from lightning_d9d.modules import BalanceConfig, peer_dispatch
from lightning_d9d.ops.peer_buffers import PeerPlace
from lightning_d9d.strategy.fit_memory import FitMemory
from lightning_d9d.strategy.peer_batches import PeerBatches
from tests.harness.compare import assert_tensors_close
from tests.harness.ranks import RankContext
from tests.meshes.equality import CONFIG, ROWS, SMALL, Watched, batch_of
from tests.strategy.plain import trainer

STEPS = 3
MESH = MeshConfig(data_parallel_replicate=2, expert_parallel=2)
BALANCE = BalanceConfig(bias_rate=0.5)
"""Biases move so fast that experts' loads differ."""


def fit(rank: RankContext, parallel: ParallelConfig, **options: Any) -> tuple[dict[str, Tensor], list[bool]]:
    """Weights, biases, losses and norms after a fit, and which batches had tokens without room."""
    L.seed_everything(1, verbose=False)
    accumulated = options.get("accumulate_grad_batches", 1)
    module, overflows = Watched(CONFIG, STEPS * accumulated), []
    module.balance = BALANCE
    overflowed = PeerBatches.overflowed

    def noted(peers: PeerBatches) -> bool:
        overflows.append(overflowed(peers))
        return overflows[-1]

    strategy_options = {"mesh": MESH, "parallel": parallel} | {
        name: options.pop(name) for name in ("step_in_backward",) if name in options
    }
    run = trainer(
        D9DStrategy(**strategy_options),
        2,
        rank.device.type,
        precision="64-true",
        use_distributed_sampler=False,
        **{"gradient_clip_val": 1.0, "max_epochs": 1, **options},
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(PeerBatches, "overflowed", noted)
        run.fit(module)
    results = {name: buffer.clone() for name, buffer in module.named_buffers() if name.endswith("bias")}
    for step in range(STEPS):
        results |= {f"{name} after step {step}": value for name, value in module.seen.weights[step].items()}
        results |= {f"loss {step}": module.seen.losses[step], f"norm {step}": module.seen.norms[step]}
    return results, overflows


@contextmanager
def heard() -> Generator[list[str]]:
    """Return the lines that this rank logs inside the block."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("lightning_d9d", "lightning.pytorch.utilities.rank_zero")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield lines
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


@contextmanager
def on_devices_that_reach_each_other(rank: RankContext) -> Generator[None]:
    """Ranks seem to have GPUs of one host when "auto" chooses; they write to each other's files in memory."""
    own = PeerPlace("here", "", "cuda", rank.rank)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("lightning_d9d.strategy.staging.place_of", lambda device: own)
        yield


@pytest.mark.ranks(2)
def test_no_token_is_lost(rank: RankContext) -> None:
    """Weights, losses, norms and biases are those of all-to-all; tokens of experts count once. "auto" does the same."""
    expected, none = fit(rank, ParallelConfig(expert_dispatch="all_to_all"))
    assert none == []
    assert any(name.endswith("bias") for name in expected)
    actual, overflows = fit(rank, ParallelConfig(expert_dispatch="peer", expert_capacity=1.0))
    assert len(overflows) == STEPS
    assert True in overflows
    assert_tensors_close(actual, expected)
    with on_devices_that_reach_each_other(rank):
        spacious, overflows = fit(rank, ParallelConfig(expert_capacity=4.0))
    assert overflows == [False] * STEPS
    assert_tensors_close(spacious, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate_grad_batches": 2}, "expert_dispatch='peer' with accumulate_grad_batches=2: .*microbatch_size"),
        ({"step_in_backward": True, "gradient_clip_val": None}, "expert_dispatch='peer' with step_in_backward=True"),
    ],
)
def test_what_cannot_be_computed_again_is_refused(rank: RankContext, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(rank, ParallelConfig(expert_dispatch="peer"), **options)


@pytest.mark.ranks(2)
def test_auto_takes_all_to_all_on_the_cpu(rank: RankContext) -> None:
    with heard() as lines:
        _, overflows = fit(rank, ParallelConfig(expert_capacity=2.0))
    assert overflows == []
    said = "expert_dispatch='auto' takes all_to_all: experts are not on CUDA devices"
    assert sum(said in line for line in lines) == (rank.rank == 0)


@pytest.mark.ranks(2)
def test_auto_takes_all_to_all_for_good_where_the_load_is_too_uneven(rank: RankContext) -> None:
    expected, _ = fit(rank, ParallelConfig(expert_dispatch="all_to_all"))
    with heard() as lines, on_devices_that_reach_each_other(rank), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(peer_dispatch, "_MOST_GROWTH", 0.5)
        actual, overflows = fit(rank, ParallelConfig(expert_capacity=1.0))
    assert overflows == [True] + [False] * (STEPS - 1)
    said = "expert_dispatch='auto' takes all_to_all from now on: experts of a rank had"
    assert sum(said in line for line in lines) == (rank.rank == 0)
    assert_tensors_close(actual, expected)


@pytest.mark.ranks(2)
def test_auto_takes_all_to_all_beside_updates_in_the_backward(rank: RankContext) -> None:
    batch = batch_of(0)
    rows: Any = [{name: value[row] for name, value in batch.items()} for row in range(ROWS)]
    run = trainer(D9DStrategy(mesh=MESH, step_in_backward=True), 2, rank.device.type, max_steps=1)
    with heard() as lines, on_devices_that_reach_each_other(rank):
        run.fit(Qwen3MoePretraining(SMALL), DataLoader(rows, ROWS // 2))
    said = "expert_dispatch='auto' takes all_to_all: step_in_backward=True"
    assert sum(said in line for line in lines) == (rank.rank == 0)


@pytest.mark.ranks(2)
def test_batches_that_begin_to_be_accumulated_travel_by_all_to_all(rank: RankContext) -> None:
    """A callback accumulates from the second epoch on, which no rank knows when it chooses."""
    scheduler = {"callbacks": GradientAccumulationScheduler({0: 1, 1: 2}), "max_epochs": 2}
    expected, _ = fit(rank, ParallelConfig(expert_dispatch="all_to_all"), **scheduler)
    with on_devices_that_reach_each_other(rank):
        actual, overflows = fit(rank, ParallelConfig(expert_capacity=1.0), **scheduler)
    assert True in overflows[:STEPS]
    assert overflows[STEPS:] == [False] * STEPS
    assert_tensors_close(actual, expected)


@pytest.mark.ranks(2)
def test_a_step_that_fits_only_by_all_to_all(rank: RankContext) -> None:
    """By arithmetic, before the first batch, and by the least memory of any rank."""
    found: list[int] = []
    needs = FitMemory._needed

    def noted(memory: FitMemory) -> int:
        found.append(needs(memory))
        return found[-1]

    expected, _ = fit(rank, ParallelConfig(expert_dispatch="all_to_all"))
    for spare, replaces in ((0, False), (-1, True)):
        there = found[0] + spare * (1 - rank.rank) if found else 2**40
        with heard() as lines, on_devices_that_reach_each_other(rank), pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(FitMemory, "_needed", noted)
            monkeypatch.setattr(memory, "device_bytes", lambda device, there=there: there)
            actual, _ = fit(rank, ParallelConfig())
        said = [line for line in lines if "with peer dispatch a step needs" in line]
        assert len(said) == (replaces and rank.rank == 0)
        assert_tensors_close(actual, expected)


@pytest.mark.parametrize("capacity", [0.5, float("nan"), float("inf")])
def test_a_capacity_without_room_for_equal_loads_is_refused(capacity: float) -> None:
    with pytest.raises(ConfigError, match=f"ParallelConfig.expert_capacity={capacity} must be a number of at least 1"):
        ParallelConfig(expert_dispatch="peer", expert_capacity=capacity)
    assert torch.isfinite(torch.tensor(ParallelConfig().expert_capacity))
