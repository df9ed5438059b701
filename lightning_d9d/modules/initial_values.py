"""How a module's parameters start, so that a rank can make any slice of them alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_d9d.ops import fill_normal_


@dataclass(frozen=True)
class Normal:
    """Independent normal numbers of mean zero."""

    std: float
    """Standard deviation."""

    def fill_slice_(self, target: Tensor, shape: Sequence[int], ranges: Sequence[range], key: int) -> None:
        """Fill a slice of a whole tensor, in place: the indices `ranges` of `shape`. `key` decides all values."""
        fill_normal_(target, self.std, key, shape, ranges)

    def fill_(self, tensor: Tensor) -> None:
        """Fill all of a tensor, in place, from torch's random state."""
        nn.init.normal_(tensor, std=self.std)


@dataclass(frozen=True)
class Constant:
    """One number everywhere."""

    value: float

    def fill_slice_(self, target: Tensor, shape: Sequence[int], ranges: Sequence[range], key: int) -> None:
        """Fill a slice of a whole tensor, in place."""
        target.fill_(self.value)

    def fill_(self, tensor: Tensor) -> None:
        """Fill all of a tensor, in place."""
        nn.init.constant_(tensor, self.value)


class DrawnByRows(nn.Module):
    """A module that defines how its parameters start, so that a rank makes only the values that it holds.

    Put it in front of another base class (`class Linear(DrawnByRows, nn.Linear)`) and write `initial_values`. A class
    that overrides `reset_parameters` further down has its way, and is drawn as a whole.
    """

    def initial_values(self) -> Mapping[str, Normal | Constant]:
        """Return the name and initial value of each parameter and buffer that this module owns itself."""
        raise NotImplementedError(f"{type(self).__name__} must implement initial_values()")

    def reset_parameters(self) -> None:
        """Gives all parameters and buffers of this module their initial values, from torch's random state."""
        for name, value in self.initial_values().items():
            if not (tensor := getattr(self, name)).is_meta:  # where torch would take its time for nothing
                value.fill_(tensor)
