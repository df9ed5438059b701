"""Settings that would do nothing: each field says when it has an effect, and is refused where it has none."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_d9d import (
    CheckpointConfig,
    ConfigError,
    D9DStrategy,
    GradSyncConfig,
    MeshConfig,
    ParallelConfig,
    TimeoutConfig,
)
from lightning_d9d.schedule import Auto, OneForwardOneBackward, Schedule
from lightning_d9d.strategy.effects import NEEDS, Beside, check_effects
from tests.harness.ranks import RankContext
from tests.meshes.cases import CASES
from tests.strategy.plain import Plain, loader, trainer
from tests.strategy.sharded import Sharded
from tests.strategy.staged import Staged, staged_rows

ALWAYS = {
    "ParallelConfig.recompute": "of any blocks; stages without some, and plain modules without named ones, are refused",
    "ParallelConfig.compile": "of any blocks; stages without some, and plain modules without named ones, are refused",
    "ParallelConfig.cuda_graphs": "a permission: without CUDA there are no graphs to capture; of blocks, as `compile`",
    "ParallelConfig.grouped_gemm": "for all of the process",
    "ParallelConfig.kernels": "for all of the process",
    "GradSyncConfig.dtype": "wherever gradients are added up; one gradient is what it is in any dtype",
    "GradSyncConfig.bucket_mb": "a limit",
    "CheckpointConfig.mode": "whenever a checkpoint is saved",
    "CheckpointConfig.asynchronous": "whenever a checkpoint is saved",
    "CheckpointConfig.trainable_only": "when a checkpoint is saved; parameters may be frozen at any time in a run",
    "TimeoutConfig.init_seconds": "a limit",
    "TimeoutConfig.step_seconds": "a limit",
    "TimeoutConfig.shutdown_seconds": "a limit",
    "TimeoutConfig.groups_seconds": "a limit",
    "TimeoutConfig.report_signal": "between ranks; one rank has nobody to wait for",
    "TimeoutConfig.report_directory": "of reports that are written when ranks wait in vain",
    "D9DStrategy.microbatch_size": "of a D9DModule; a plain module is refused",
    "D9DStrategy.num_microbatches": "of a D9DModule; a plain module is refused",
    "D9DStrategy.skip_nonfinite": "with automatic optimization; manual optimization is refused",
    "D9DStrategy.process_group_backend": "a choice among ways between ranks; one rank needs none",
}
"""Settings that are never refused for want of something else, and why."""
CONFIGS = {
    "parallel": ParallelConfig,
    "grad_sync": GradSyncConfig,
    "checkpoint": CheckpointConfig,
    "timeouts": TimeoutConfig,
}


def test_every_setting_says_when_it_has_an_effect() -> None:
    names = {f"{config.__name__}.{field.name}" for config in CONFIGS.values() for field in fields(config)}
    arguments = {*inspect.signature(D9DStrategy).parameters} - {"mesh", *CONFIGS}
    names |= {f"D9DStrategy.{name}" for name in arguments}
    assert not NEEDS.keys() & ALWAYS.keys()
    assert NEEDS.keys() | ALWAYS.keys() == names


SHARDED = r"no fully sharded weights; set MeshConfig.data_parallel_shard, such as to -1, or leave {} out"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ParallelConfig.reshard_after_forward": ({"reshard_after_forward": False}, SHARDED),
    "ParallelConfig.expert_dispatch": (
        {"expert_dispatch": "all_to_all"},
        "set MeshConfig.expert_parallel above 1, or leave {} out",
    ),
    "ParallelConfig.overlap_experts": (
        {"overlap_experts": True},
        "set MeshConfig.expert_parallel above 1, or leave {} out",
    ),
    "ParallelConfig.overlap_pairs": (
        {"overlap_pairs": True},
        "set MeshConfig.expert_parallel above 1, or leave {} out",
    ),
    "ParallelConfig.expert_capacity": (
        {"expert_capacity": 2.0},
        "set MeshConfig.expert_parallel above 1, or leave {} out",
    ),
    "ParallelConfig.context": ({"context": "ring"}, "set MeshConfig.context_parallel_shard above 1, or leave {} out"),
    "ParallelConfig.pad_sequences": (
        {"pad_sequences": True},
        "each rank has whole sequences; set MeshConfig.context_parallel_shard above 1, or leave {} out",
    ),
    "ParallelConfig.gather_dtype": ({"gather_dtype": "float32"}, SHARDED),
    "ParallelConfig.reduce_dtype": ({"reduce_dtype": "float32"}, SHARDED),
    "ParallelConfig.offload": ({"offload": True}, SHARDED),
    "ParallelConfig.shard_blocks": (
        {"shard_blocks": ["Linear"]},
        "nothing to shard over, .*set MeshConfig.data_parallel_shard, such as to -1, .*or leave {} out",
    ),
    "GradSyncConfig.reduce": ({"reduce": "every_microbatch"}, SHARDED),
}


def strategy_with(name: str, values: dict[str, Any], mesh: MeshConfig | None = None) -> D9DStrategy:
    argument = next(argument for argument, config in CONFIGS.items() if config.__name__ == name.split(".")[0])
    given: dict[str, Any] = {argument: CONFIGS[argument](**values)}
    return D9DStrategy(mesh=mesh, **given)


def check_refused(name: str, devices: int, device: str) -> None:
    values, message = REFUSED[name]
    run = trainer(strategy_with(name, values), devices, device)
    with pytest.raises(ConfigError, match=f"{name}=.* has no effect here: .*{message.format(name.split('.')[1])}"):
        run.fit(Staged(), DataLoader(staged_rows(8), batch_size=4))
    assert run.global_step == 0


OF_PLAIN: dict[str, tuple[dict[str, Any], str]] = {
    "ParallelConfig.pad_sequences": ({"pad_sequences": True}, "plain LightningModule, whose sequences nobody shards"),
    "ParallelConfig.expert_dispatch": (
        REFUSED["ParallelConfig.expert_dispatch"][0],
        "plain LightningModule, whose experts nobody shards; make it a D9DModule",
    ),
    "ParallelConfig.overlap_experts": (
        REFUSED["ParallelConfig.overlap_experts"][0],
        "plain LightningModule, whose experts nobody shards; make it a D9DModule",
    ),
    "ParallelConfig.expert_capacity": (
        REFUSED["ParallelConfig.expert_capacity"][0],
        "plain LightningModule, whose experts nobody shards; make it a D9DModule",
    ),
    **{
        name: (REFUSED[name][0], "plain LightningModule, whose weights .* only where ParallelConfig.shard_blocks names")
        for name, (_, message) in REFUSED.items()
        if message is SHARDED and name.startswith("ParallelConfig")
    },
}
"""Settings of a plain module that shards its weights itself, and the errors."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", OF_PLAIN)
def test_a_setting_without_an_effect_on_what_shards_itself_is_refused(rank: RankContext, name: str) -> None:
    values, message = OF_PLAIN[name]
    strategy = strategy_with(name, values, MeshConfig(data_parallel_shard=2))
    run = trainer(strategy, 2, rank.device.type, precision="64-true", use_distributed_sampler=False)
    with pytest.raises(ConfigError, match=f"Sharded is a {message}"):
        run.fit(Sharded())
    assert run.global_step == 0


def test_every_need_is_tested() -> None:
    assert (
        REFUSED.keys() | {f"D9DStrategy.{name}" for name in ("schedule", "step_in_backward", "replicate_sync")}
        == NEEDS.keys()
    )


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_without_an_effect_is_refused_in_one_process(name: str) -> None:
    check_refused(name, 1, "cpu")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_without_an_effect_is_refused_on_every_rank(rank: RankContext, name: str) -> None:
    check_refused(name, 2, rank.device.type)


OF_BLOCKS: list[tuple[dict[str, Any], str]] = [
    ({"recompute": "full"}, "recompute='full'"),
    ({"recompute": "every_2"}, "recompute='every_2'"),
    ({"compile": True}, "compile=True"),
    ({"cuda_graphs": True}, "cuda_graphs=True"),
]


def check_needs_blocks(values: dict[str, Any], name: str, devices: int, device: str) -> None:
    run = trainer(D9DStrategy(parallel=ParallelConfig(**values)), devices, device)
    setting = name.split("=")[0]
    message = rf"{name} has no effect here: Sequential has no blocks, .*shard_blocks=.*or leave {setting} out"
    with pytest.raises(ConfigError, match=message):
        run.fit(Staged(), DataLoader(staged_rows(8), batch_size=4))
    assert run.global_step == 0


@pytest.mark.parametrize(("values", "name"), OF_BLOCKS)
def test_settings_of_blocks_are_refused_where_there_are_none(values: dict[str, Any], name: str) -> None:
    check_needs_blocks(values, name, 1, "cpu")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("values", "name"), OF_BLOCKS)
def test_they_are_refused_on_every_rank(rank: RankContext, values: dict[str, Any], name: str) -> None:
    check_needs_blocks(values, name, 2, rank.device.type)


def test_blocks_that_are_named_are_taken() -> None:
    strategy = D9DStrategy(parallel=ParallelConfig(recompute="full", shard_blocks=("Linear",)))
    trainer(strategy, max_steps=1).fit(Staged(), DataLoader(staged_rows(8), batch_size=4))


def test_a_schedule_of_a_plain_module_is_refused() -> None:
    run = trainer(D9DStrategy(schedule="gpipe"))
    with pytest.raises(ConfigError, match=r"D9DStrategy.schedule=.*GPipe.* Plain is a plain LightningModule"):
        run.fit(Plain(), loader(8))
    trainer(D9DStrategy(schedule="1f1b"), max_steps=1).fit(Plain(), loader(8))


def test_replicas_that_mix_are_refused_where_there_is_one() -> None:
    run = trainer(D9DStrategy(replicate_sync="ring"))
    with pytest.raises(ConfigError, match=r"replicate_sync=.* there is one replica; set MeshConfig.data_parallel_rep"):
        run.fit(Plain(), loader(8))


def test_steps_in_the_backward_of_a_plain_module_are_refused() -> None:
    run = trainer(D9DStrategy(step_in_backward=True))
    with pytest.raises(ConfigError, match=r"D9DStrategy.step_in_backward=True has no effect here: Plain is a plain"):
        run.fit(Plain(), loader(8))


@pytest.mark.parametrize(
    "name",
    sorted(
        REFUSED.keys()
        - {
            f"ParallelConfig.{name}"
            for name in (
                "context",
                "expert_dispatch",
                "overlap_experts",
                "overlap_pairs",
                "expert_capacity",
                "pad_sequences",
            )
        }
    ),
)
def test_one_process_takes_what_is_written_for_any_number_of_ranks(name: str) -> None:
    """A degree of -1 shards over the ranks that there are, be it one."""
    strategy = strategy_with(name, REFUSED[name][0], MeshConfig(data_parallel_shard=-1))
    trainer(strategy, max_steps=1).fit(Staged(), DataLoader(staged_rows(8), batch_size=4))


def test_defaults_that_are_written_out_are_taken() -> None:
    strategy = D9DStrategy(
        schedule="1f1b", parallel=ParallelConfig(reshard_after_forward="auto", offload=False, context="gather")
    )
    trainer(strategy, max_steps=1).fit(Plain(), loader(8))


def test_meshes_that_train_as_one_process_are_taken() -> None:
    for case in CASES:
        strategy = D9DStrategy(**case.strategy_options)
        degrees = case.config.resolve(case.num_ranks)
        beside = Beside(Staged(), case.config, degrees, case.parallel, strategy.schedule)
        check_effects(strategy.settings(), D9DStrategy().settings(), beside)


@pytest.mark.parametrize(
    ("schedule", "refused"),
    [
        ("1f1b", "OneForwardOneBackward has no overlapped pairs; set .*'dual_pipe_v', with at least 4 microbatches"),
        ("zero_bubble_v", "ZeroBubbleV has no overlapped pairs"),
        (Auto(batch_size=4, sequence_length=8), "Auto may choose a schedule without overlapped pairs"),
        ("dual_pipe_v", None),
    ],
)
def test_pairs_need_a_schedule_that_has_some(schedule: str | Schedule, refused: str | None) -> None:
    mesh = MeshConfig(pipeline_parallel=2, data_parallel_replicate=2, expert_parallel=2)
    strategy = D9DStrategy(mesh=mesh, schedule=schedule, parallel=ParallelConfig(overlap_pairs=True))
    beside = Beside(Staged(), mesh, mesh, strategy.parallel, strategy.schedule)
    with nullcontext() if refused is None else pytest.raises(ConfigError, match=refused):
        check_effects(strategy.settings(), D9DStrategy().settings(), beside)


def test_a_capacity_needs_memory_of_peers() -> None:
    """It has an effect where "auto" may take peer dispatch."""
    mesh = MeshConfig(data_parallel_replicate=2, expert_parallel=2)
    for dispatch in ("auto", "peer", "all_to_all"):
        parallel = ParallelConfig(expert_dispatch=dispatch, expert_capacity=2.0)  # type: ignore[arg-type]
        given = D9DStrategy(mesh=mesh, parallel=parallel).settings(), D9DStrategy().settings()
        refused = pytest.raises(ConfigError, match="'peer' or 'auto', or leave")
        with refused if dispatch == "all_to_all" else nullcontext():
            check_effects(*given, Beside(Staged(), mesh, mesh, parallel, OneForwardOneBackward()))
