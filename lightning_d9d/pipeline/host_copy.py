"""Copies small values from the device to the host without making the host wait."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """A copier that queues copies to the host after the device's work; each value is read when a later one is sent."""

    def __init__(self) -> None:
        self._host: Tensor | None = None
        self._copied: torch.Event | None = None

    def exchange(self, value: Tensor) -> Tensor | None:
        """Send a value, and return the one that was sent before it.

        Args:
            value: Value, always of the same shape, dtype and device.

        Returns:
            The earlier value, on the host; for a value on the CPU the value itself. None after the first call. None
            also while the last copy is under way; then this value is not sent.
        """
        if value.device.type == "cpu":
            return value
        earlier = None
        if self._host is None or self._copied is None:
            self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._copied = torch.Event(value.device)
        elif self._copied.query():
            earlier = self._host.clone()
        else:
            return None
        self._host.copy_(value, non_blocking=True)
        self._copied.record()
        return earlier

    def __deepcopy__(self, memo: dict[int, Any]) -> HostCopy:
        return HostCopy()  # a value under way reaches the original
