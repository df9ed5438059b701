"""Sizes of batches: rows of a rank's batch from those of a whole optimizer step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_d9d.errors import ConfigError
from lightning_d9d.strategy.strategy import D9DStrategy


def rows_of_rank(global_batch_size: int, trainer: L.Trainer | None) -> int:
    """Return how many rows each data rank reads at once, so that an optimizer step has `global_batch_size` rows. Local.

    Args:
        global_batch_size: Rows of a step on all ranks, in all accumulated batches.
        trainer: Trainer with data ranks, accumulation and, under a `D9DStrategy`, microbatches. None: one rank and
            batch.

    Raises:
        ConfigError: The size cannot be divided, or accumulation changes with the epoch.
    """
    if trainer is None:
        return global_batch_size
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks):
        raise ConfigError(
            f"global_batch_size={global_batch_size} cannot be kept, because a GradientAccumulationScheduler changes "
            "accumulation with the epoch. Leave the scheduler out, or set batch_size"
        )
    ranks = (trainer.distributed_sampler_kwargs or {"num_replicas": 1})["num_replicas"]
    factors = {"data ranks": ranks, "accumulated batches": trainer.accumulate_grad_batches}
    if isinstance(trainer.strategy, D9DStrategy):
        count = trainer.strategy.microbatch_count
        factors |= {"rows of a microbatch": count.microbatch_size or 1, "microbatches": count.num_microbatches or 1}
    check_divides(global_batch_size, factors)
    return global_batch_size // (ranks * trainer.accumulate_grad_batches)


def check_divides(global_batch_size: int, factors: Mapping[str, int]) -> None:
    """Refuse a size that the product of its factors does not divide. Local.

    Args:
        global_batch_size: Rows of an optimizer step.
        factors: The factors of a step, by name.

    Raises:
        ConfigError: The product does not divide the size; the message has the nearest sizes that fit.
    """
    divisor = math.prod(factors.values())
    if global_batch_size % divisor:
        below = global_batch_size // divisor * divisor
        sizes = " and ".join(str(size) for size in (below, below + divisor) if size)
        parts = " x ".join(f"{factor} {name}" for name, factor in factors.items() if factor > 1)
        raise ConfigError(
            f"global_batch_size={global_batch_size} does not divide by {divisor} ({parts}); the nearest that fit: "
            f"{sizes}"
        )
