"""Forwards whose tokens have no room in the memory of experts' ranks run again by all-to-all."""

import logging
import math
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig, ParallelConfig, memory
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from lightning_d9d.modules import BalanceConfig, peer_dispatch
from lightning_d9d.modules.peer_dispatch import PeerExchange
from lightning_d9d.ops.peer_buffers import PeerPlace
from lightning_d9d.ops.peer_memory import OVERFLOW
from lightning_d9d.strategy.fit_memory import _FRAGMENTS, FitMemory
from lightning_d9d.strategy.peer_forwards import PeerForwards
from tests.harness.compare import assert_tensors_close
from tests.harness.ranks import RankContext
from tests.meshes.equality import CONFIG, Watched, whole
from tests.strategy.plain import trainer

STEPS = 3
MESH = MeshConfig(data_parallel_replicate=2, expert_parallel=2)
BALANCE = BalanceConfig(bias_rate=0.5)
"""Biases move so fast that experts' loads differ."""


class InBackward(Watched):
    """Keeps weights and norms without hooks that `step_in_backward` refuses."""

    on_before_optimizer_step = Qwen3MoePretraining.on_before_optimizer_step
    optimizer_step = Qwen3MoePretraining.optimizer_step

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            self.seen.norms.append(self.trainer.callback_metrics["grad_norm"].cpu())
            self.seen.weights.append({name: whole(value.detach()) for name, value in self.named_parameters()})


def fit(
    rank: RankContext, parallel: ParallelConfig, *, forced: Collection[int] = (), **options: Any
) -> tuple[dict[str, Tensor], list[bool]]:
    """Weights, biases, losses and norms after a fit, and which forwards had tokens without room.

    Those in `forced` are said to have had some, counted from the first forward.
    """
    L.seed_everything(1, verbose=False)
    accumulated = options.get("accumulate_grad_batches", 1)
    watched = InBackward if options.get("step_in_backward") else Watched
    module, overflows = watched(CONFIG, STEPS * accumulated), []
    module.balance = BALANCE
    forward, overflowed, is_forward = PeerForwards.forward, PeerForwards._overflowed, False

    def noted(peers: PeerForwards, *arguments: Any) -> Any:
        nonlocal is_forward, overflows
        asks, before = not (peers._by_all_to_all or peers._is_over), peers.num_repeated
        is_forward = True
        result = forward(peers, *arguments)
        is_forward = False
        overflows += [peers.num_repeated > before] if asks else []
        return result

    def forced_or_real(peers: PeerForwards) -> bool:
        return overflowed(peers) or (is_forward and len(overflows) in forced)

    strategy_options = {"mesh": MESH, "parallel": parallel} | {
        name: options.pop(name) for name in ("step_in_backward", "schedule", "num_microbatches") if name in options
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
        monkeypatch.setattr(PeerForwards, "forward", noted)
        monkeypatch.setattr(PeerForwards, "_overflowed", forced_or_real)
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
    ("options", "forced", "expected_overflows"),
    [
        ({"accumulate_grad_batches": 2}, {1}, [True, True, *[False] * 4]),
        ({"step_in_backward": True, "gradient_clip_val": None}, {2}, [True, False, True]),
        (
            {"step_in_backward": True, "gradient_clip_val": None, "accumulate_grad_batches": 2},
            {3, 5},
            [True, False, False, True, False, True],
        ),
    ],
    ids=["accumulated", "in the backward", "both"],
)
def test_gradients_and_weights_that_are_there_already(
    rank: RankContext, options: dict[str, Any], forced: set[int], expected_overflows: list[bool]
) -> None:
    """Gradients of the first batch of a window stay when the forward of the second one runs again.

    With updates in the backward no weight of the step has changed then. The first forward has no room by itself.
    """
    expected, _ = fit(rank, ParallelConfig(expert_dispatch="all_to_all"), **options)
    with on_devices_that_reach_each_other(rank), heard() as lines:
        actual, overflows = fit(rank, ParallelConfig(expert_capacity=1.0), forced=forced, **options)
    assert overflows == expected_overflows
    assert any("expert_dispatch='auto' takes peer" in line for line in lines) == (rank.rank == 0)
    assert_tensors_close(actual, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_backwards_go_the_way_of_their_forwards(rank: RankContext, recompute: Any) -> None:
    """Several microbatches are between forward and backward when the second one has no room."""
    options = {"schedule": "gpipe", "num_microbatches": 4}
    expected, _ = fit(rank, ParallelConfig(recompute=recompute, expert_dispatch="all_to_all"), **options)
    parallel = ParallelConfig(recompute=recompute, expert_dispatch="peer", expert_capacity=4.0)
    actual, overflows = fit(rank, parallel, forced={1, 6}, **options)
    # Later forwards of the batch do not ask, and the next batch has room again.
    assert overflows == [False, True, *[False] * 4, True]
    assert_tensors_close(actual, expected)


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.ranks(2)
def test_the_host_does_not_wait_for_the_rest_of_a_forward(rank: RankContext) -> None:
    """The device is busy for a second after the layers with experts, and the host has its answer before that ends.

    So it has when tokens had no room, and the forward runs again.
    """
    forward, have_ended = PeerForwards.forward, []

    def with_more_work(peers: PeerForwards, stage: int, microbatch: int, run: Callable[[], Any]) -> Any:
        ends = torch.cuda.Event()

        def longer() -> Any:
            result = run()
            torch.cuda._sleep(2_000_000_000)
            ends.record()
            return result

        result = forward(peers, stage, microbatch, longer)
        have_ended.append(ends.query())
        return result

    expected, _ = fit(rank, ParallelConfig(expert_dispatch="all_to_all"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(PeerForwards, "forward", with_more_work)
        actual, overflows = fit(rank, ParallelConfig(expert_dispatch="peer", expert_capacity=1.0))
    assert True in overflows
    assert have_ended == [False] * STEPS
    assert_tensors_close(actual, expected)


@pytest.mark.ranks(2)
def test_tokens_of_a_loss_without_room_end_the_fit(rank: RankContext) -> None:
    """Nothing can run again after the forward, so no rank takes the step."""

    class InLoss(Watched):
        def microbatch_loss(self, output: Any, microbatch: Any) -> Any:
            for exchange in peer_dispatch.peer_exchanges(self.indexed_stages.values()):
                assert exchange.memory is not None
                exchange.memory.state[1] |= OVERFLOW * (self.global_rank == 1)
            return super().microbatch_loss(output, microbatch)

    strategy = D9DStrategy(mesh=MESH, parallel=ParallelConfig(expert_dispatch="peer", expert_capacity=4.0))
    module = InLoss(CONFIG, 1)
    options = {"precision": "64-true", "use_distributed_sampler": False, "max_epochs": 1}
    with pytest.raises(RuntimeError, match="tokens had no room outside of a stage's forward"):
        trainer(strategy, 2, rank.device.type, **options).fit(module)
    assert module.seen.norms == []


@pytest.mark.ranks(2)
def test_auto_takes_all_to_all_where_no_gpu_is(rank: RankContext) -> None:
    with heard() as lines:
        _, overflows = fit(rank, ParallelConfig(expert_capacity=2.0))
    is_cpu = rank.device.type == "cpu"
    assert (overflows == []) == is_cpu
    way = "all_to_all: experts are not on CUDA devices" if is_cpu else "peer: the GPUs"
    assert sum(f"expert_dispatch='auto' takes {way}" in line for line in lines) == (rank.rank == 0)


@pytest.mark.ranks(2)
def test_auto_takes_all_to_all_for_good_where_the_load_is_too_uneven(rank: RankContext) -> None:
    expected, _ = fit(rank, ParallelConfig(expert_dispatch="all_to_all"))
    with heard() as lines, on_devices_that_reach_each_other(rank), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(peer_dispatch, "_MOST_GROWTH", 0.5)
        actual, overflows = fit(rank, ParallelConfig(expert_capacity=1.0))
    assert overflows == [True, False]  # with the second batch no rank has peers, and nobody asks any more
    said = "expert_dispatch='auto' takes all_to_all from now on: experts of a rank had"
    assert sum(said in line for line in lines) == (rank.rank == 0)
    assert_tensors_close(actual, expected)


@pytest.mark.ranks(2)
def test_batches_that_begin_to_be_accumulated(rank: RankContext) -> None:
    """A callback accumulates from the second epoch on; the second batch of that window runs again, too."""
    scheduler = {"callbacks": GradientAccumulationScheduler({0: 1, 1: 2}), "max_epochs": 2}
    expected, _ = fit(rank, ParallelConfig(expert_dispatch="all_to_all"), **scheduler)
    with on_devices_that_reach_each_other(rank):
        actual, overflows = fit(rank, ParallelConfig(expert_capacity=2.0), forced={1, 4}, **scheduler)
    assert overflows == [False, True, False, False, True, False]
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


@pytest.mark.ranks(2)
def test_more_room_that_a_rank_does_not_have(rank: RankContext) -> None:
    """Rank 1 has memory for the growth exactly, or one byte less; then there is less spare room, and then all-to-all.

    The memory is what is not in use, and then what a step needs by arithmetic.
    """
    lacks, needs, rooms = [], [], []
    lacking, needed_with, grow, there = FitMemory.lacking, FitMemory._needed_with, PeerExchange.grow, 2**40

    def noted(of_fit: FitMemory, before: float, after: float, others: int) -> int:
        assert 1 == before < after
        lacks.append(lacking(of_fit, before, after, others))
        needs.append((needed_with(of_fit, after) or 0) + others)
        return lacks[-1]

    def grown(exchange: PeerExchange, *arguments: Any) -> None:
        """Note the room, as a multiple of what was needed."""
        assert exchange.memory is not None
        needed = max(rank.all_gather_object(int(exchange.memory.state[3])))
        grow(exchange, *arguments)
        if exchange.num_rows:
            rooms.append({math.ceil(spare * needed): spare for spare in (1.25, 1.05)}[exchange.num_rows])

    def train(in_use: int, there: int) -> tuple[list[int], list[float]]:
        """Return what the rank lacked, and the spare room; no room if all-to-all went on."""
        lacks.clear()
        rooms.clear()
        with heard() as lines, on_devices_that_reach_each_other(rank), pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(FitMemory, "lacking", noted)
            monkeypatch.setattr(PeerExchange, "grow", grown)
            monkeypatch.setattr(memory, "device_bytes", lambda device: there)
            monkeypatch.setattr(memory, "most_in_use", lambda device: in_use * rank.rank)
            actual, overflows = fit(rank, ParallelConfig(expert_capacity=1.0))
        assert_tensors_close(actual, expected)
        assert (len(overflows) == STEPS) == bool(rooms)
        said = [line for line in lines if "GiB more than a rank has" in line]
        assert len(said) == (not rooms and rank.rank == 0)
        return [*lacks], [*rooms]

    expected, _ = fit(rank, ParallelConfig(expert_dispatch="all_to_all"))
    limit = int((1 - _FRAGMENTS) * there)
    most, room = train(limit, there)
    assert not room
    assert len(most) == 2
    assert (most[0] > most[1] > 0) == (rank.rank == 1)
    more, less, of_less = *rank.all_gather_object(most)[1], needs[1]
    for in_use, found, room in (
        (limit - more, [0], [1.25]),
        (limit - more + 1, [1, 0], [1.05]),
        (limit - less, [more - less, 0], [1.05]),
        (limit - less + 1, [more - less + 1, 1], []),
    ):
        assert train(in_use, there) == (found if rank.rank == 1 else [0] * len(found), room)
    for missing, room in ((0, [1.05]), (rank.rank, [])):
        (more, less), found = train(0, of_less - missing)
        assert (less, found) == (missing, room)
        assert more > 0


@pytest.mark.parametrize("capacity", [0.5, float("nan"), float("inf")])
def test_a_capacity_without_room_for_equal_loads_is_refused(capacity: float) -> None:
    with pytest.raises(ConfigError, match=f"ParallelConfig.expert_capacity={capacity} must be a number of at least 1"):
        ParallelConfig(expert_dispatch="peer", expert_capacity=capacity)
    assert torch.isfinite(torch.tensor(ParallelConfig().expert_capacity))
