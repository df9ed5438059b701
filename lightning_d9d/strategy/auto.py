"""Chooses a schedule for `schedule=Auto(...)` in a run, the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info

from lightning_d9d.errors import ConfigError
from lightning_d9d.memory import device_bytes
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.schedule import Auto, Choice
from lightning_d9d.strategy.module import D9DModule

CHOICE = "lightning_d9d_schedule"
"""The name under which a checkpoint stores the choice."""
_FLOAT32_BYTES = 4


def choose(
    auto: Auto, module: D9DModule, num_ranks: int, dtype: torch.dtype, device: torch.device, compiles: bool
) -> Choice:
    """Choose a schedule on rank 0, for all ranks. Collective over all ranks.

    Args:
        auto: The schedule, with batch size, sequence length, and other settings.
        module: Gives the costs of its layers.
        num_ranks: Number of pipeline ranks.
        dtype: Bytes of a number in weights, activations and the two states that Adam keeps for a weight. Gradients are
            in float32.
        device: Device whose memory is the cap, if it is a GPU and no cap is given.
        compiles: Whether layers are compiled, so that they have no weight phase.

    Raises:
        ScheduleError: No schedule fits.
        ConfigError: The module does not give the costs of its layers.
    """
    ranks = Ranks()

    def on_first() -> dict[str, Any] | None:
        if not ranks.is_first:
            return None
        costs = module.model_costs(auto.sequence_length, dtype.itemsize)
        if costs is None:
            raise ConfigError(
                f"schedule=Auto(...) needs the costs of the layers of {type(module).__name__}: implement "
                "model_costs(sequence_length, bytes_per_element) -> ModelCosts, or name a schedule"
            )
        costs = costs.compiled() if compiles else costs
        state_ratio = 3 + max(_FLOAT32_BYTES, dtype.itemsize) / dtype.itemsize
        return auto.choose(num_ranks, costs, state_ratio=state_ratio, device_memory=device_bytes(device)).to_dict()

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
