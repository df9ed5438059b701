"""Modules whose stages, or sharded blocks, are older than the run: from `load_from_checkpoint` or an earlier run."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig, ParallelConfig
from lightning_d9d.mesh import MeshDomains
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig
from lightning_d9d.sync.buckets import GradSyncConfig
from tests.harness.compare import assert_bitwise_equal, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.meshes.equality import CONFIG, SMALL, Watched, on_one_process, whole
from tests.strategy.plain import trainer
from tests.strategy.staged import Staged, staged_rows
from tests.strategy.test_fully_sharded import EXPERTS, SHARDED, PlainBlocks, rows_of

OPTIONS: dict[str, Any] = {"use_distributed_sampler": False, "gradient_clip_val": 0.5, "max_epochs": 1}


def check_trains_as_one_process(rank: RankContext, strategy: D9DStrategy, config: Qwen3MoeConfig = SMALL) -> None:
    """The module is built whole on every rank, as `load_from_checkpoint` leaves it."""
    L.seed_everything(3, verbose=False)
    expected = on_one_process(config, steps=2)
    module = Watched(config, 2)
    module.configure_model()
    L.seed_everything(1, verbose=False)  # other weights, if any were drawn
    trainer(strategy, rank.world_size, rank.device.type, precision="64-true", **OPTIONS).fit(module)
    for weights, theirs in zip(module.seen.weights, expected.weights, strict=True):
        assert weights
        assert_tensors_close(weights, {name: theirs[name] for name in weights})


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "mesh",
    [SHARDED, EXPERTS, {"data_parallel_replicate": 2, "expert_parallel": 2}, {"pipeline_parallel": 2}],
    ids=["weights", "both", "experts", "stages"],
)
def test_a_module_that_is_there_is_spread(rank: RankContext, mesh: dict[str, int]) -> None:
    check_trains_as_one_process(rank, D9DStrategy(mesh=MeshConfig(**mesh)))


@pytest.mark.ranks(4)
def test_a_module_that_is_there_is_cut_and_spread(rank: RankContext) -> None:
    mesh = MeshConfig(pipeline_parallel=2, data_parallel_shard=2)
    check_trains_as_one_process(rank, D9DStrategy(mesh=mesh, schedule="zero_bubble_v"), CONFIG)


@pytest.mark.ranks(2)
def test_what_is_frozen_stays_so(rank: RankContext) -> None:
    module = Watched(SMALL, 1)
    module.configure_model()
    module.stages[0].get_submodule("lm_head").requires_grad_(False)
    run = trainer(D9DStrategy(mesh=MeshConfig(**SHARDED)), 2, rank.device.type, **OPTIONS)
    run.validate(module, rows_of(0, rank), verbose=False)
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    assert frozen
    assert all("lm_head" in name for name in frozen)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", [EXPERTS, {"data_parallel_replicate": 2}], ids=["sharded", "copies"])
def test_another_recomputation_keeps_the_weights(rank: RankContext, mesh: dict[str, int]) -> None:
    def trained(recompute: str) -> Watched:
        L.seed_everything(1, verbose=False)
        module = Watched(SMALL, 1)
        for kind in ("none", recompute):
            strategy = D9DStrategy(mesh=MeshConfig(**mesh), parallel=ParallelConfig(recompute=kind))
            trainer(strategy, 2, rank.device.type, precision="64-true", **OPTIONS).fit(module)
        return module

    actual, expected = trained("full"), trained("none")
    assert "forward" in vars(actual.stages[0].get_submodule("model.layers.0"))
    for weights, theirs in zip(actual.seen.weights, expected.seen.weights, strict=True):
        assert_tensors_close(weights, theirs)


@pytest.mark.ranks(2)
def test_other_dtypes_keep_the_weights(rank: RankContext) -> None:
    module = Watched(SMALL, 1)

    def run(precision: Any, grad_sync: GradSyncConfig = GradSyncConfig()) -> L.Trainer:
        strategy = D9DStrategy(mesh=MeshConfig(**SHARDED), grad_sync=grad_sync)
        return trainer(strategy, 2, rank.device.type, precision=precision, **OPTIONS)

    run("bf16-mixed").fit(module)
    parameters = dict(module.named_parameters())
    run("32-true").validate(module, rows_of(0, rank), verbose=False)
    for name, parameter in module.named_parameters():
        assert parameter is parameters[name]
        key = name.split(".", 2)[2]
        assert_bitwise_equal(key, whole(parameter.detach()), module.seen.weights[-1][key])
    run("32-true", GradSyncConfig(dtype="bfloat16")).fit(module)
    policy = module.stages[0]._get_fsdp_state()._mp_policy
    assert (policy.param_dtype, policy.reduce_dtype) == (None, torch.bfloat16)
    name = "model.norm.weight"
    assert not torch.equal(module.seen.weights[1][name], module.seen.weights[0][name])


@pytest.mark.ranks(2)
def test_weights_that_lie_otherwise_are_refused_by_what_differs(rank: RankContext) -> None:
    module = Watched(SMALL, 1)
    trainer(D9DStrategy(mesh=MeshConfig(**SHARDED)), 2, rank.device.type, **OPTIONS).fit(module)
    run = trainer(D9DStrategy(mesh=MeshConfig(**EXPERTS)), 2, rank.device.type, **OPTIONS)
    text = r"weights for MeshConfig.expert_parallel=1 of .*has MeshConfig.expert_parallel=2, and cannot build .*gate"
    with pytest.raises(ConfigError, match=text):
        run.fit(module)


class Wraps(Staged):
    """Recomputes by a wrapper, which is part of the names of parameters."""

    def parallelize_stage(self, stage: Any, mesh: MeshDomains | None, parallel: ParallelConfig) -> None:
        if parallel.recompute != "none":
            stage[2] = checkpoint_wrapper(stage[2])


def test_another_recomputation_in_one_process() -> None:
    module, rows = Wraps(), DataLoader(staged_rows(4), 4)  # type: ignore[arg-type]
    module.configure_model()
    stage, weight = module.stages[0], module.stages[0][2].weight  # type: ignore[index]
    trainer(D9DStrategy(), max_epochs=1).fit(module, rows)
    assert module.stages[0] is stage
    trainer(D9DStrategy(parallel=ParallelConfig(recompute="full")), max_epochs=1).fit(module, rows)
    assert module.stages[0].get_parameter("2._checkpoint_wrapped_module.weight") is weight
    stage = module.stages[0]
    L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False).validate(
        module, rows, verbose=False
    )
    assert module.stages[0] is stage


BLOCKS = ParallelConfig(shard_blocks=("Block",), recompute="full")


@pytest.mark.ranks(2)
def test_blocks_of_a_plain_module_stay_sharded(rank: RankContext) -> None:
    data = TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)))

    def trained(mesh: MeshConfig, parallel: ParallelConfig) -> tuple[nn.Module, dict[str, Tensor]]:
        torch.manual_seed(5)
        module = PlainBlocks()
        for _ in range(2):
            strategy = D9DStrategy(mesh=mesh, parallel=parallel)
            run = trainer(strategy, 2, rank.device.type, max_epochs=1)
            run.fit(module, DataLoader(data, 2, shuffle=False))
        return module, {name: whole(parameter.detach()) for name, parameter in module.named_parameters()}

    module, actual = trained(MeshConfig(**SHARDED), BLOCKS)
    _, expected = trained(MeshConfig(data_parallel_replicate=2), ParallelConfig())
    assert_tensors_close(actual, expected)
    other = ParallelConfig(shard_blocks=("Block",), recompute="full", reshard_after_forward=False)
    run = trainer(D9DStrategy(mesh=MeshConfig(**SHARDED), parallel=other), 2, rank.device.type, max_epochs=1)
    text = r"Block is sharded for ParallelConfig.reshard_after_forward='auto' of .*reshard_after_forward=False\. Give"
    with pytest.raises(ConfigError, match=text):
        run.fit(module, DataLoader(data, 2))  # type: ignore[arg-type]


@pytest.mark.ranks(2)
def test_blocks_are_not_sharded_twice(rank: RankContext) -> None:
    class ShardsItself(PlainBlocks):
        def configure_model(self) -> None:
            strategy = self.trainer.strategy
            assert isinstance(strategy, D9DStrategy)
            fully_shard(self.net.blocks[0], mesh=strategy.mesh.for_axes("dp_cp_shard"))

    run = trainer(D9DStrategy(mesh=MeshConfig(**SHARDED), parallel=BLOCKS), 2, rank.device.type, max_steps=1)
    with pytest.raises(ConfigError, match="names Block, but the module has applied fully_shard to a Block itself"):
        run.fit(ShardsItself(), DataLoader(TensorDataset(torch.randn(16, 4)), 2))
