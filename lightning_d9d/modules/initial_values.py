"""How a module's parameters start, said so that any block of rows can be drawn alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Normal:
    """Independent normal numbers of mean zero."""

    std: float
    """Standard deviation."""

    def draw(self, generator: np.random.Generator, shape: tuple[int, int]) -> Tensor:
        """A block of rows, float32 on the CPU."""
        return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32)).mul_(self.std)

    def fill_(self, tensor: Tensor) -> None:
        """All of a tensor, in place, from torch's random state."""
        nn.init.normal_(tensor, std=self.std)


@dataclass(frozen=True)
class Constant:
    """One number everywhere."""

    value: float

    def draw(self, generator: np.random.Generator, shape: tuple[int, int]) -> Tensor:
        """A block of rows, float32 on the CPU."""
        return torch.full(shape, self.value, dtype=torch.float32)

    def fill_(self, tensor: Tensor) -> None:
        """All of a tensor, in place."""
        nn.init.constant_(tensor, self.value)


class DrawnByRows(nn.Module):
    """A module that says how its parameters start, so that a rank draws those rows alone that it holds.

    Put it in front of another base class (`class Linear(DrawnByRows, nn.Linear)`) and write `initial_values`. A class
    that overrides `reset_parameters` further down has its way, and is drawn as a whole.
    """

    def initial_values(self) -> Mapping[str, Normal | Constant]:
        """For each parameter and buffer that this module owns itself: its name, and what it starts as."""
        raise NotImplementedError(f"{type(self).__name__} must implement initial_values()")

    def reset_parameters(self) -> None:
        """Gives all of them their initial values again, from torch's random state."""
        for name, value in self.initial_values().items():
            value.fill_(getattr(self, name))
