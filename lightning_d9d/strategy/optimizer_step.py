"""Stepping an optimizer unless the gradients are good for nothing, with as few host syncs as the optimizer allows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class OptimizerStep:
    """Steps optimizers, or skips and counts.

    Optimizers that take `found_inf` (torch's fused ones) skip on the device; for others the host reads one flag a step,
    as also for a first step: fused SGD would leave its momentum uninitialized if that is skipped on the device.

    Args:
        device: Where the flags are.
    """

    def __init__(self, device: torch.device) -> None:
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._has_stepped = False

    def __call__(self, optimizer: Optimizer, skip: Tensor | None, **kwargs: Any) -> None:
        """Call `optimizer.step(**kwargs)` unless `skip`, a bool on the device, equal on every rank, is true."""
        if skip is None:
            optimizer.step(**kwargs)
        elif getattr(optimizer, "_step_supports_amp_scaling", False) and self._has_stepped:
            self._skipped += skip
            optimizer.grad_scale, optimizer.found_inf = None, skip.float()  # type: ignore[attr-defined]
            optimizer.step(**kwargs)
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        elif skip.item():
            self._skipped += 1
        else:
            optimizer.step(**kwargs)
            self._has_stepped = True

    @property
    def skipped(self) -> Tensor:
        """The number of skipped steps, int64 on the device."""
        return self._skipped
