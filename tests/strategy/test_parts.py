"""The parts of `D9DStrategy` work by themselves: without a strategy, and without a Trainer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from lightning_d9d import ConfigError, D9DStrategy, GradSyncConfig, MeshConfig, StateError, TimeoutConfig
from lightning_d9d.schedule import Auto, GPipe, OneForwardOneBackward
from lightning_d9d.strategy.checkpoint_files import AtomicFileIO
from lightning_d9d.strategy.checkpoints import Checkpoints
from lightning_d9d.strategy.gradient_sync import GradientSync
from lightning_d9d.strategy.optimizer_step import OptimizerStep
from lightning_d9d.strategy.rank_model import RankModel
from lightning_d9d.strategy.ranks import JobRanks
from lightning_d9d.strategy.run_state import RunState
from lightning_d9d.strategy.saving import CheckpointConfig
from lightning_d9d.strategy.staging import Staging
from lightning_d9d.strategy.tied import TiedParameters
from lightning_d9d.strategy.training import BatchSettings, PlainTraining
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.harness.ranks import RankContext
from tests.strategy.plain import Plain


def ranks_of(rank: RankContext | None = None, mesh: MeshConfig | None = None) -> JobRanks:
    ranks = JobRanks(mesh or MeshConfig(data_parallel_replicate=-1), TimeoutConfig(), None)
    if rank is not None:
        ranks.device = rank.device
        ranks.place(rank.rank, rank.world_size)
        ranks.spread()
    return ranks


def test_the_strategy_has_few_fields() -> None:
    """Each part keeps its own; what Lightning's base class has is left out."""
    own = vars(D9DStrategy()).keys() - vars(SingleDeviceStrategy()).keys() - {"parallel_devices", "cluster_environment"}
    assert len(own) <= 20, sorted(own)


def test_one_process_has_no_group_and_every_reduction_is_the_value() -> None:
    ranks = ranks_of()
    assert (ranks.dp_size, ranks.dp_rank, ranks.size("pp"), ranks.mesh_of_several) == (1, 0, 1, None)
    value = torch.tensor([1, 2])
    assert ranks.reduce(value) is value
    assert ranks.agree(True)
    assert not ranks.agree(False)
    assert ranks.broadcast("all") == "all"
    assert not ranks.set_step_timeout()


@pytest.mark.ranks(2)
def test_reductions_over_ranks(rank: RankContext) -> None:
    ranks = ranks_of(rank)
    values = torch.tensor([1.0 + rank.rank, 4.0], device=rank.device)
    assert ranks.reduce(values.clone()).tolist() == [1.5, 4.0]
    assert ranks.reduce(values.clone(), reduce_op="sum").tolist() == [3.0, 8.0]
    assert ranks.reduce(torch.tensor(rank.rank, device=rank.device)).item() == 0.5
    assert ranks.agree(rank.rank == 0, all=False)
    assert not ranks.agree(rank.rank == 0)
    assert ranks.broadcast(rank.rank, src=1) == 1
    copied = copy.deepcopy(ranks)
    assert copied is not ranks
    assert copied.data_group is ranks.data_group
    assert ranks.set_step_timeout()
    assert not ranks.set_step_timeout()
    ranks.close()


@pytest.mark.ranks(2)
def test_a_sum_counts_each_data_rank_once(rank: RankContext) -> None:
    ranks = ranks_of(rank, MeshConfig(pipeline_parallel=2))
    assert ranks.reduce(torch.tensor(3.0, device=rank.device), reduce_op="sum").item() == 3.0
    assert ranks.reduce(torch.tensor(3.0 + rank.rank, device=rank.device)).item() == 3.5
    ranks.close()


def test_ranks_that_have_not_joined_have_no_mesh() -> None:
    ranks = ranks_of()
    ranks.place(0, 2)
    with pytest.raises(ConfigError, match=r"before the ranks have joined; use it in setup\(\)"):
        _ = ranks.mesh


def refuse(auto: Auto, num_ranks: int) -> Any:
    raise AssertionError("nothing is to be chosen")


def test_staging_takes_the_schedule_that_was_given() -> None:
    staging = Staging(GPipe(), None, None, pipeline_parallel=1)
    pipeline = staging.begin(None, torch.device("cpu"), refuse, keeps=False)
    assert isinstance(pipeline.schedule, GPipe)
    assert (staging.pipeline, staging.saved, staging.microbatch_count.is_one) == (pipeline, {}, True)
    assert staging.resume({"anything": 1}) is None
    staging.close()
    assert staging.pipeline is None


def test_microbatches_of_a_pipeline_have_a_row_unless_something_is_given() -> None:
    assert Staging(OneForwardOneBackward(), None, None, pipeline_parallel=2).microbatch_count.microbatch_size == 1
    assert Staging(OneForwardOneBackward(), None, 4, pipeline_parallel=2).microbatch_count.microbatch_size is None
    with pytest.raises(ConfigError, match=r"microbatch_size=2, num_microbatches=None cannot be set with schedule=Auto"):
        Staging(Auto(batch_size=2, sequence_length=2), 2, None, pipeline_parallel=1)


def run_state(module: Plain, optimizer: torch.optim.Optimizer, mode: str) -> RunState:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return RunState.of(module, ranks_of(), mode, [optimizer], [scheduler])


@pytest.mark.parametrize("mode", ["auto", "sharded"])
def test_a_checkpoint_is_saved_and_loaded(tmp_path: Path, mode: Any) -> None:
    module, io, path = Plain(), AtomicFileIO(), tmp_path / "a.ckpt"
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = run_state(module, optimizer, mode)
    assert (state.is_directory, state.is_spread, state.scheduled) == (mode == "sharded", False, [0])
    content = {"state_dict": module.state_dict(), "global_step": 1, "loops": {}}
    content["optimizer_states"] = [{} if state.is_directory else optimizer.state_dict()]
    Checkpoints(CheckpointConfig(mode=mode), ranks_of()).save(content, path, None, state, io, None)
    assert path.is_dir() == state.is_directory

    other = Plain()
    fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    loaded, seen = Checkpoints(CheckpointConfig(), ranks_of()), list[set[str]]()
    checkpoint = loaded.load(path, None, io, other, lambda _, names: seen.append({*names}), fits=False)
    again = run_state(other, fresh, mode)
    loaded.loads.give_weights(other, checkpoint["state_dict"], again, strict=True)
    loaded.loads.give_optimizers(checkpoint, again, [], refuses_other_number=True)
    assert seen == [{*module.state_dict()}]
    for name, value in module.state_dict().items():
        assert_bitwise_equal(name, other.state_dict()[name], value)
    assert fresh.param_groups[0]["lr"] == 0.1
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        assert_bitwise_equal("moment", fresh.state[theirs]["exp_avg"], optimizer.state[mine]["exp_avg"])
    assert loaded.saves.last == (str(path), None)


def test_another_number_of_optimizers_is_refused(tmp_path: Path) -> None:
    module, io, path = Plain(), AtomicFileIO(), tmp_path / "a.ckpt"
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state, checkpoints = run_state(module, optimizer, "auto"), Checkpoints(CheckpointConfig(), ranks_of())
    content = {"state_dict": module.state_dict(), "global_step": 1, "optimizer_states": [{}, {}]}
    checkpoints.save(content, path, None, state, io, None)
    checkpoint = checkpoints.load(path, None, io, module, lambda *_: None, fits=False)
    with pytest.raises(StateError, match="has 2 optimizers and the module 1; make configure_optimizers return as many"):
        checkpoints.loads.give_optimizers(checkpoint, state, [], refuses_other_number=True)


def gradients_of(module: nn.Module, ranks: JobRanks, config: GradSyncConfig | None = None) -> GradientSync:
    parameters = list(module.parameters())
    return GradientSync(parameters, {}, TiedParameters(), ranks.mesh_of_several, config or GradSyncConfig())


def layer(rank: RankContext) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2, device=rank.device)


def batch_of(number: int, device: torch.device) -> Tensor:
    return torch.arange(6, dtype=torch.float32, device=device).view(2, 3) + number


@pytest.mark.ranks(2)
def test_a_plain_training_sums_gradients_at_the_end_of_a_window(rank: RankContext) -> None:
    """Two batches a window on two ranks, and one process with all four."""
    ranks, model, alone = ranks_of(rank), layer(rank), layer(rank)
    training = PlainTraining(gradients_of(model, ranks), OptimizerStep(rank.device), 2, skips_nonfinite=False)
    training.gradients.update(accumulates=True, window_is_open=False)
    with training.inside_of_window():
        loss = model(batch_of(rank.rank, rank.device)).square().sum()
        assert training.run(lambda: loss, (), BatchSettings(accumulated_batches=2)) is loss
        training.backward(loss.backward)
    assert training.window_is_open
    training.backward(model(batch_of(2 + rank.rank, rank.device)).square().sum().backward)
    assert not training.window_is_open
    (torch.stack([alone(batch_of(number, rank.device)).square().sum() for number in range(4)]).sum() / 2).backward()
    for (name, one), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert_close_named(name, one.grad, other.grad)
    training.close()
    ranks.close()


@pytest.mark.parametrize("value", [1.0, float("inf")])
def test_a_plain_training_leaves_out_steps_that_are_not_finite(value: float) -> None:
    model = nn.Linear(1, 1)
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), copy.deepcopy(model.state_dict())
    training = PlainTraining(
        gradients_of(model, ranks_of()), OptimizerStep(torch.device("cpu")), 1, skips_nonfinite=True
    )

    def closure() -> str:
        training.backward((model(torch.ones(1, 1)) * value).sum().backward)
        return "result"

    assert training.step(optimizer, closure, refuse) == "result"  # type: ignore[arg-type]
    is_left_out = value == float("inf")
    assert int(training.optimizer_step.skipped) == is_left_out
    assert all(torch.equal(before[name], now) == is_left_out for name, now in model.state_dict().items())


@pytest.mark.ranks(2)
def test_copies_of_a_model_start_equal_and_share_buffers(rank: RankContext) -> None:
    ranks = ranks_of(rank)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(rank.device)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(1 + rank.rank)
    placed = RankModel(model, dict, ranks.mesh_of_several, None, None)
    assert {tensor.max().item() for tensor in model.state_dict().values()} == {1.0}
    model[1].running_mean.fill_(rank.rank + 5)  # type: ignore[union-attr, operator]
    placed.sync_buffers()
    assert model[1].running_mean.max().item() == rank.rank + 5  # type: ignore[union-attr, operator]
    placed.mark_buffers_stale()
    placed.sync_buffers()
    assert model[1].running_mean.max().item() == 5  # type: ignore[union-attr, operator]
    placed.close()
    ranks.close()
