"""Initial values of a module's parameters, of which a rank can compute any slice alone."""

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
    """A module that defines its initial values, so that a rank computes only the values that it holds.

    List it before the other base class (`class Linear(DrawnByRows, nn.Linear)`) and implement `initial_values`. If a
    subclass overrides `reset_parameters`, that method is used, and the module is drawn as a whole.
    """

    def initial_values(self) -> Mapping[str, Normal | Constant]:
        """Return the name and initial value of each parameter and buffer that this module owns itself."""
        raise NotImplementedError(f"{type(self).__name__} must implement initial_values()")

    def reset_parameters(self) -> None:
        """Set all parameters and buffers of this module to their initial values, from torch's random state."""
        for name, value in self.initial_values().items():
            if not (tensor := getattr(self, name)).is_meta:  # where torch would take its time for nothing
                value.fill_(tensor)
