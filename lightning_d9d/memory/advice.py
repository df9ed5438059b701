"""Compares the needs of a step with the available memory, and finds the nearest settings that fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import torch

from lightning_d9d.errors import ConfigError
from lightning_d9d.memory.step import StepMemory, StepSettings, gib

_MARGIN = 1.05
"""A step is refused if it needs this many times the available memory by arithmetic."""
_MAX_RANKS = 1024


def device_bytes(device: torch.device) -> int | None:
    """Return the memory of a GPU in bytes; None for the host, whose memory others use. Local."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def most_in_use(device: torch.device) -> int:
    """Return the most bytes of a GPU that were in use at a time, for tensors and outside of torch's allocator. Local.

    On the host, whose memory others use, it is 0.
    """
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.max_memory_allocated(device) + total - free - torch.cuda.memory_reserved(device)


def refuse_too_large(
    step: StepMemory, settings: StepSettings, available: int, *, can_step_in_backward: bool = False
) -> str | None:
    """Refuse a step that cannot fit. Local.

    A step is refused if weights, gradients and states alone exceed the memory, or if the arithmetic needs at least 5 %
    more than that. So a step that fits is not refused.

    Args:
        step: The memory of the step.
        settings: The settings of the run.
        available: Bytes of the device.
        can_step_in_backward: Whether the update may run inside of the backward.

    Returns:
        A note if it may be too close to fit, else None.

    Raises:
        ConfigError: The step cannot fit.
    """
    memory = step.of(settings)
    if memory.certain > available or memory.total >= _MARGIN * available:
        raise ConfigError(
            f"a training step needs {gib(memory.total)} on this device, which has "
            f"{gib(available)}: {memory}; {advice(step, settings, available, can_step_in_backward)}"
        )
    if memory.needed > available:
        return (
            f"a training step needs at least {gib(memory.total)} of {gib(available)} on this device: {memory}. With "
            f"fragments and what torch does not know it is {gib(memory.needed)}. If memory runs out, "
            f"{advice(step, settings, available, can_step_in_backward)}"
        )
    return None


def advice(step: StepMemory, settings: StepSettings, available: int, can_step_in_backward: bool = False) -> str:
    """Return a sentence with the nearest settings that fit, or that none is known. Local.

    Args:
        step: The memory of the step.
        settings: The settings of the run.
        available: Bytes of the device, also for fragments and memory outside of torch.
        can_step_in_backward: Whether the update may run inside of the backward.
    """
    for candidate in _nearest(step, settings, can_step_in_backward):
        memory = step.of(candidate)
        if memory.needed <= available:
            return f"by arithmetic it fits with {_changes(settings, candidate)} ({gib(memory.total)})"
    return "no setting is known that makes it fit; take a smaller model or shorter sequences"


def _nearest(step: StepMemory, settings: StepSettings, can_step_in_backward: bool) -> Iterator[StepSettings]:
    """Yield other settings, those with the fewest changes first.

    Among these, changes that keep all numbers come first, and more ranks come last.
    """
    knows_activations = step.of(settings).knows_activations
    rows = [settings.num_rows]
    while knows_activations and rows[-1] is not None and rows[-1] > 1:
        rows.append(rows[-1] // 2)
    choices: list[dict[Any, None]] = [
        dict.fromkeys([settings.recompute, *(["full", "offload"] if knows_activations else [])]),
        dict.fromkeys(rows),
        dict.fromkeys([settings.step_in_backward, *([True] if can_step_in_backward else [])]),
        dict.fromkeys([settings.eight_bits, *([True] if step.eight_bit_states is not None else [])]),
    ]
    given, *others = itertools.product(*choices)
    others.sort(key=lambda values: _distance(values, given))
    names = ("recompute", "num_rows", "step_in_backward", "eight_bits")
    candidates = [replace(settings, **dict(zip(names, values, strict=True))) for values in (given, *others)]
    yield from candidates[1:]
    for each in candidates:
        num_ranks = 2
        while num_ranks <= _MAX_RANKS:
            yield replace(each, num_ranks=num_ranks)
            num_ranks *= 2


def _distance(values: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[int, list[bool]]:
    is_same = [one == other for one, other in zip(values, given, strict=True)]
    return is_same.count(False), is_same


def _changes(before: StepSettings, after: StepSettings) -> str:
    """Return the text of the changes that a user makes to some settings."""
    texts = {
        "recompute": f'ParallelConfig(recompute="{after.recompute}")',
        "num_rows": f"microbatches of {after.num_rows} row{'s' if after.num_rows != 1 else ''}",
        "eight_bits": "StochasticAdamW(state_dtype=torch.uint8)",
        "step_in_backward": "D9DStrategy(step_in_backward=True)",
        "num_ranks": f"weights sharded over {after.num_ranks} times as many ranks (MeshConfig.data_parallel_shard)",
    }
    names = [each.name for each in fields(after) if getattr(before, each.name) != getattr(after, each.name)]
    return " and ".join(texts[name] for name in names)
