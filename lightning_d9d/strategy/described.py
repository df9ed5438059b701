"""A run as arithmetic sees it, from its module and settings: what plans and `Auto` compute with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_d9d.errors import ConfigError
from lightning_d9d.memory.parameters import states_of
from lightning_d9d.memory.rank import RankModel, two_states
from lightning_d9d.memory.spread import Share, in_dtype, weights_of
from lightning_d9d.mesh import MeshConfig
from lightning_d9d.parallel import ParallelConfig
from lightning_d9d.pipeline.partition import distribute_layers
from lightning_d9d.schedule import ModelCosts, OneForwardOneBackward, Schedule
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.sync.buckets import GradSyncConfig


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run on which memory, messages and time depend, beside its module."""

    mesh: MeshConfig
    """Resolved degrees."""
    parallel: ParallelConfig
    """The configuration with the dtypes that are in effect."""
    grad_sync: GradSyncConfig
    step_in_backward: bool = False
    accumulates_batches: bool = False
    autocasts: bool = False

    def rank_model(
        self,
        module: D9DModule,
        costs: ModelCosts,
        dtype: torch.dtype,
        *,
        tokens: int,
        rows: int = 1,
        num_microbatches: int = 1,
        schedule: Schedule | None = None,
    ) -> RankModel | None:
        """Return all that memory, messages and time of a rank follow from. Local.

        Args:
            module: Not yet built.
            costs: The costs of a row.
            dtype: The dtype of weights.
            tokens: Tokens of a row.
            rows: Rows of a microbatch.
            num_microbatches: Microbatches of a batch.
            schedule: The schedule; None: 1F1B.

        Returns:
            The model; None if the module has not as many blocks as `costs` has layers.
        """
        whole = module.whole_on_meta()
        weights = in_dtype(weights_of(whole.stages[0], self.parallel.shard_blocks), dtype)
        if len(weights.layers) != len(costs.layers):
            return None
        schedule, optimizer = schedule or OneForwardOneBackward(), _optimizer_of(whole)
        num_stages = len(schedule.placement(self.mesh.pipeline_parallel))
        return RankModel(
            weights=weights,
            costs=costs,
            tokens=tokens,
            mesh=self.mesh,
            schedule=schedule,
            layers_of_stages=layers_of(module, len(costs.layers), num_stages),
            rows=rows,
            num_microbatches=num_microbatches,
            parallel=self.parallel,
            accumulates_batches=self.accumulates_batches,
            sum_bytes=self.grad_sync.sum_bytes,
            reduces_each=self.grad_sync.reduce == "every_microbatch",
            step_in_backward=self.step_in_backward,
            bucket_bytes=self.grad_sync.bucket_bytes,
            state_bytes=_state_bytes(optimizer) or two_states,
            eight_bit_state_bytes=_state_bytes(optimizer, eight_bits=True),
            autocasts=self.autocasts,
            counts_experts=getattr(module, "balance", None) is not None,
            casts_gradients=not getattr(optimizer, "takes_wide_gradients", False),
        )


def layers_of(module: D9DModule, num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Return the layers of each stage, as the module cuts them, or evenly. Local."""
    own = getattr(module, "layers_of_stages", None)
    return tuple(distribute_layers(num_layers, num_stages, 0, 0) if own is None else own(num_stages))


def _optimizer_of(whole: D9DModule) -> torch.optim.Optimizer | None:
    """Return the module's own optimizer; None if it makes none."""
    try:
        return whole.make_optimizer()
    except ConfigError:
        return None


def _state_bytes(optimizer: torch.optim.Optimizer | None, *, eight_bits: bool = False) -> Callable[[Share], int] | None:
    """Return the function that counts the bytes of the states of a share; None if that is not known."""
    count = None if optimizer is None else states_of(optimizer, eight_bits=eight_bits)
    if count is None:
        return None
    counted = count

    @functools.cache
    def of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return counted(torch.empty(shape, dtype=dtype, device="meta"))

    return lambda share: of(share.shape, share.weight.dtype)
