"""Parameter groups for torch's optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def parameter_groups(
    module: nn.Module, weight_decay: float = 0.1, *, decays: Callable[[str, nn.Parameter], bool] | None = None
) -> list[dict[str, Any]]:
    """Trainable parameters in groups that fused and foreach optimizers take, those with weight decay first.

    A group has parameters of one device, dtype and mesh: fused and foreach steps take no plain tensors beside DTensors.
    Groups, and parameters in them, come in the order in which the module names them.

    Args:
        module: Its frozen parameters are left out.
        weight_decay: Of those that decay; the others have 0.
        decays: Tells by name and parameter whether it decays; by default matrices and larger do, while vectors (biases,
            weights of norms) do not.

    Returns:
        Mappings with `params` and `weight_decay`. Where nothing is trainable, as in a pipeline stage that is frozen,
        one group without parameters: torch's optimizers refuse an empty list of groups, but not this.
    """
    decays = decays or _has_several_dims
    groups: dict[tuple[bool, torch.device, torch.dtype, DeviceMesh | None], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            key = (decays(name, parameter), parameter.device, parameter.dtype, mesh)
            groups.setdefault(key, []).append(parameter)
    by_decay = [
        {"params": parameters, "weight_decay": weight_decay if decay else 0.0}
        for wanted in (True, False)
        for (decay, *_), parameters in groups.items()
        if bool(decay) == wanted
    ]
    return by_decay or [{"params": [], "weight_decay": weight_decay}]


def _has_several_dims(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim >= 2
