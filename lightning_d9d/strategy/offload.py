"""Modules whose fully sharded weights stay in the host's memory."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor, nn

from lightning_d9d.parallel.fsdp import fully_sharded


def move(module: nn.Module, device: torch.device, *, offloads: bool) -> None:
    """Move a module to a device, in place, except fully sharded parameters that stay in the host's memory."""
    stays = fully_sharded(module) if offloads else set()
    if not stays:
        module.to(device)
        return

    def moved(tensor: Tensor) -> Tensor:
        return tensor if tensor in stays else tensor.to(device)

    module._apply(moved)
    for part in module.modules():
        if isinstance(part, L.LightningModule):
            part._device = device  # as its `to` does
