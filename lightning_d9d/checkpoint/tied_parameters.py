"""Tied parameters, which have several names, and checkpoints in which they differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_d9d.checkpoint.directory import Checkpoint
from lightning_d9d.checkpoint.whole import MODEL
from lightning_d9d.errors import StateError
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.mesh.sharding import local


def tied_names(module: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter):
            names.setdefault(value, []).append(name)
    return [each for each in names.values() if len(each) > 1]


def check_tied_parameters(tied: Iterable[Sequence[str]], saved: Mapping[str, Any]) -> None:
    """Refuse weights in which parameters differ that are tied in this model: the last would overwrite the others.

    Local.

    Args:
        tied: Result of `tied_names`.
        saved: Weights to load, by name.

    Raises:
        StateError: Two names of one parameter have different values.
    """
    for names in tied:
        present = [name for name in names if isinstance(saved.get(name), Tensor)]
        for name in present[1:]:
            if not torch.equal(local(saved[present[0]]), local(saved[name])):
                raise StateError(
                    f"{present[0]} and {name} are one parameter in this model, but have different values in the "
                    "checkpoint: they were not tied. Build the module with two parameters, or leave one of the two "
                    "out of the checkpoint"
                )


def check_saved_tied_parameters(module: nn.Module, state: Mapping[str, Any], opened: Checkpoint) -> None:
    """Check a directory like `check_tied_parameters`, before the module's tensors are overwritten. Collective.

    Args:
        module: The module.
        state: The part of the state dict that will be loaded.
        opened: The checkpoint that will be loaded.
    """
    tied = tied_names(module)
    if any(Ranks().all_gather(len(tied) > 0)):
        names = [name for each in tied for name in each if name in state and f"{MODEL}{name}" in opened.tensors]
        saved = {name: torch.empty_like(state[name]) for name in names}
        opened.load({f"{MODEL}{name}": value for name, value in saved.items()}, strict=False)
        Ranks().together(
            f"checkpoint {str(opened.path)!r} cannot be loaded", lambda: check_tied_parameters(tied, saved)
        )
