"""The names of `lightning_d9d` itself; this module is imported when one of them is first used."""

from __future__ import annotations

from lightning_d9d.errors import ConfigError, RankError, ScheduleError, StateError, StateNotFoundError
from lightning_d9d.mesh import MeshConfig, MeshDomains
from lightning_d9d.parallel import ParallelConfig
from lightning_d9d.pipeline import BlockSequence, StageInfo, StageInputs, WeightedLoss
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.ranks import TimeoutConfig
from lightning_d9d.strategy.saving import CheckpointConfig
from lightning_d9d.strategy.strategy import D9DStrategy
from lightning_d9d.sync.buckets import GradSyncConfig

__all__ = [
    "BlockSequence",
    "CheckpointConfig",
    "ConfigError",
    "D9DModule",
    "D9DStrategy",
    "GradSyncConfig",
    "MeshConfig",
    "MeshDomains",
    "ParallelConfig",
    "RankError",
    "ScheduleError",
    "StageInfo",
    "StageInputs",
    "StateError",
    "StateNotFoundError",
    "TimeoutConfig",
    "WeightedLoss",
]
