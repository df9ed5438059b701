"""Chooses a schedule for `schedule=Auto(...)` in a run, the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info

from lightning_d9d.errors import ConfigError
from lightning_d9d.memory import GPU_OVERHEAD, device_bytes
from lightning_d9d.memory.row_costs import peak_of, row_costs
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.schedule import Auto, Choice
from lightning_d9d.strategy.described import RunSettings
from lightning_d9d.strategy.module import D9DModule

CHOICE = "lightning_d9d_schedule"
"""The name under which a checkpoint stores the choice."""
_FLOAT32_BYTES = 4


def choose(
    auto: Auto,
    module: D9DModule,
    settings: RunSettings,
    dtype: torch.dtype,
    device: torch.device,
    *,
    computes_in: torch.dtype,
) -> Choice:
    """Choose a schedule on rank 0, for all ranks, by what ranks of the mesh hold, send and compute. Collective.

    A module whose blocks are not the layers of its costs is taken as whole on each rank.

    Args:
        auto: The schedule, with batch size, sequence length, and other settings.
        module: Gives the costs of its layers.
        settings: The mesh and the other settings of the run.
        dtype: The dtype of weights.
        device: Device whose memory is the cap, if it is a GPU and no cap is given.
        computes_in: The dtype of activations.

    Raises:
        ScheduleError: No schedule fits.
        ConfigError: The module does not give the costs of its layers.
    """
    ranks = Ranks()

    def on_first() -> dict[str, Any] | None:
        if not ranks.is_first:
            return None
        costs = module.model_costs(auto.sequence_length, computes_in.itemsize)
        if costs is None:
            raise ConfigError(
                f"schedule=Auto(...) needs the costs of the layers of {type(module).__name__}: implement "
                "model_costs(sequence_length, bytes_per_element) -> ModelCosts, or name a schedule"
            )
        model = settings.rank_model(module, costs, dtype, tokens=auto.sequence_length)
        of_rank = costs if model is None else row_costs(model)
        of_rank = of_rank.compiled() if settings.parallel.compile else of_rank
        there = device_bytes(device)
        return auto.choose(
            settings.mesh.pipeline_parallel,
            of_rank,
            state_ratio=3 + max(_FLOAT32_BYTES, dtype.itemsize) / dtype.itemsize,
            device_memory=None if there is None else GPU_OVERHEAD.allocatable(there),
            peak=None if model is None else peak_of(model),
        ).to_dict()

    (chosen, *_) = ranks.together("no schedule can be chosen", on_first)
    assert chosen is not None
    choice = Choice.from_dict(chosen)
    rank_zero_info(str(choice))
    return choice


def saved_choice(checkpoint: Mapping[str, Any], num_ranks: int) -> Choice | None:
    """Return the choice of the run that saved a checkpoint, if it was for as many pipeline ranks."""
    if CHOICE not in checkpoint:
        return None
    choice = Choice.from_dict(checkpoint[CHOICE])
    fits = len(choice.schedule.placement(num_ranks)) == len(choice.layers_of_stage)
    return choice if fits else None
