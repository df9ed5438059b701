"""Settings that need another setting: without it they are refused instead of ignored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import NamedTuple

import lightning as L

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh import MeshConfig
from lightning_d9d.parallel import ParallelConfig
from lightning_d9d.schedule import Auto, Overlapped, Schedule
from lightning_d9d.strategy.module import D9DModule


class Beside(NamedTuple):
    """The other settings of a run."""

    module: L.LightningModule
    mesh: MeshConfig
    """The mesh as configured: a degree may be -1."""
    degrees: MeshConfig
    """The mesh with degrees for the actual number of ranks."""
    parallel: ParallelConfig
    schedule: Schedule

    @property
    def shards_data(self) -> bool:
        """True if an axis shards weights. A degree of -1 means this for any number of ranks, including one."""
        degrees = self.degrees.data_parallel_shard * self.degrees.context_parallel_shard
        return degrees > 1 or self.mesh.data_parallel_shard == -1

    @property
    def is_d9d(self) -> bool:
        """True if the module is a `D9DModule`."""
        return isinstance(self.module, D9DModule)


def _replicas(beside: Beside) -> str | None:
    if beside.degrees.data_parallel_replicate > 1:
        return None
    return "there is one replica; set MeshConfig.data_parallel_replicate above 1"


def _sharded_weights(beside: Beside) -> str | None:
    if not beside.is_d9d and beside.parallel.shard_blocks is None:
        return (
            f"{type(beside.module).__name__} is a plain LightningModule, whose weights D9DStrategy shards only where "
            "ParallelConfig.shard_blocks names its blocks; set that, or give it to fully_shard in configure_model"
        )
    if beside.shards_data:
        return None
    return "there are no fully sharded weights; set MeshConfig.data_parallel_shard, such as to -1"


def _sharded_weights_of_stages(beside: Beside) -> str | None:
    return _d9d_module(beside) or _sharded_weights(beside)


def _d9d_module(beside: Beside) -> str | None:
    if beside.is_d9d:
        return None
    return f"{type(beside.module).__name__} is a plain LightningModule, without a schedule; make it a D9DModule"


def _use_of_blocks(beside: Beside) -> str | None:
    parallel = beside.parallel
    if parallel.recompute != "none" or parallel.compile or parallel.cuda_graphs or beside.shards_data:
        return None
    return (
        "there is nothing to shard over, and blocks are not recomputed, compiled or captured; set "
        "MeshConfig.data_parallel_shard, such as to -1, or ParallelConfig.recompute"
    )


def _sharded_sequences(beside: Beside) -> str | None:
    if not beside.is_d9d:
        return (
            f"{type(beside.module).__name__} is a plain LightningModule, whose sequences nobody shards; make it a "
            "D9DModule"
        )
    if beside.degrees.tensor_parallel > 1:
        return None
    return _context_ranks(beside)


def _context_ranks(beside: Beside) -> str | None:
    if beside.degrees.context_parallel_shard * beside.degrees.context_parallel_replicate > 1:
        return None
    return "each rank has whole sequences; set MeshConfig.context_parallel_shard above 1"


def _expert_ranks(beside: Beside) -> str | None:
    if not beside.is_d9d:
        return (
            f"{type(beside.module).__name__} is a plain LightningModule, whose experts nobody shards; make it a "
            "D9DModule"
        )
    if beside.degrees.expert_parallel > 1:
        return None
    return "each rank has all experts; set MeshConfig.expert_parallel above 1"


def _peer_dispatch(beside: Beside) -> str | None:
    if (missing := _expert_ranks(beside)) is not None:
        return missing
    if beside.parallel.expert_dispatch in ("auto", "peer"):
        return None
    return "tokens do not travel through memory of a limited size; set ParallelConfig.expert_dispatch='peer' or 'auto'"


def _pairs(beside: Beside) -> str | None:
    if (missing := _expert_ranks(beside)) is not None:
        return missing
    num_ranks, schedule = beside.degrees.pipeline_parallel, beside.schedule
    if isinstance(schedule, Auto):
        return "Auto may choose a schedule without overlapped pairs; set D9DStrategy.schedule='dual_pipe_v'"
    count = next((count for count in range(4 * num_ranks, 0, -1) if schedule.takes(num_ranks, count)), None)
    program = None if count is None else schedule.program(num_ranks, count)
    if program is None or any(isinstance(each, Overlapped) for actions in program.ranks for each in actions):
        return None
    return (
        f"{type(schedule).__name__} has no overlapped pairs; set D9DStrategy.schedule='dual_pipe_v', with at least "
        f"{2 * num_ranks} microbatches"
    )


NEEDS: dict[str, Callable[[Beside], str | None]] = {
    "ParallelConfig.reshard_after_forward": _sharded_weights,
    "ParallelConfig.expert_dispatch": _expert_ranks,
    "ParallelConfig.overlap_experts": _expert_ranks,
    "ParallelConfig.overlap_pairs": _pairs,
    "ParallelConfig.expert_capacity": _peer_dispatch,
    "ParallelConfig.context": _context_ranks,
    "ParallelConfig.pad_sequences": _sharded_sequences,
    "ParallelConfig.gather_dtype": _sharded_weights,
    "ParallelConfig.reduce_dtype": _sharded_weights,
    "ParallelConfig.offload": _sharded_weights,
    "ParallelConfig.shard_blocks": _use_of_blocks,
    "GradSyncConfig.reduce": _sharded_weights_of_stages,
    "D9DStrategy.schedule": _d9d_module,
    "D9DStrategy.step_in_backward": _d9d_module,
    "D9DStrategy.replicate_sync": _replicas,
}
"""A function for each such setting, which returns what is missing and the remedy; None if nothing is."""


def check_effects(settings: Mapping[str, object], defaults: Mapping[str, object], beside: Beside) -> None:
    """Raise `ConfigError` for a setting without effect.

    Args:
        settings: Values of `D9DStrategy`'s arguments, by name.
        defaults: The default values of the arguments. Values that equal a default are not refused.
        beside: The other settings of the run.
    """
    given, by_default = _by_field(settings, defaults), _by_field(defaults, defaults)
    for name, missing_beside in NEEDS.items():
        if given[name] != by_default[name] and (missing := missing_beside(beside)) is not None:
            field = name.split(".")[1]
            raise ConfigError(f"{name}={given[name]!r} has no effect here: {missing}, or leave {field} out")


def _by_field(settings: Mapping[str, object], defaults: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of configurations, and other arguments, by the names in `NEEDS`."""
    values: dict[str, object] = {}
    for argument, default in defaults.items():
        value = settings[argument]
        if is_dataclass(default):  # the value may be of a subclass
            values |= {f"{type(default).__name__}.{each.name}": getattr(value, each.name) for each in fields(default)}
        else:
            values[f"D9DStrategy.{argument}"] = value
    return values
