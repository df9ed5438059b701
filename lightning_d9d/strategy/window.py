"""An accumulation window: the batches between two optimizer steps, and what their gradients are divided by.

[Note: windows] A window begins where Lightning zeroes gradients (every `accumulate_grad_batches`-th batch of an epoch).
It also begins after a batch that was the last of one. So gradients that never met a step are dropped, as in stock
Lightning. That happens where `on_train_batch_start` returned -1 inside a window, an overridden `optimizer_step` left
the step out, or a closure ran twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Window:
    """Holds gradients between the schedule and the optimizer.

    Args:
        parameters: This rank's parameters.
        num_ranks: Ranks over which tokens are split. A loss that is a mean is divided by it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], num_ranks: int) -> None:
        self.parameters = parameters
        self.num_ranks = num_ranks
        self.weight: Tensor | None = None
        """The weight of all its batches over all ranks, float64. None: losses are means, or nothing has run."""
        self.is_scaled = False
        """True if its losses were divided by the total weight before backward."""
        self.is_idle = False
        """True if all of its batches so far are of other replicas alone."""
        self._is_new = True
        self._loss_is_mean: bool | None = None
        self._aside: list[tuple[nn.Parameter, Tensor]] = []

    def begin_batch(self, batch_index: int, accumulated_batches: int) -> bool:
        """Begin a batch. The first one of a window drops what an earlier window left.

        Args:
            batch_index: The index of the batch in its epoch.
            accumulated_batches: The batches of a full window.

        Returns:
            True for the first batch of a window.
        """
        is_first = self._is_new or batch_index % accumulated_batches == 0
        if is_first:  # Lightning's own zero_grad comes after the schedule, too late
            for parameter in self.parameters:
                parameter.grad = None
            self.weight = self._loss_is_mean = None
            self.is_scaled = False
        self._is_new = False
        return is_first

    def add(self, weight: Tensor | None) -> None:
        """Count a batch: its weight over all ranks, or None for a loss that is a mean."""
        self._loss_is_mean = weight is None
        if weight is not None:
            self.weight = weight if self.weight is None else self.weight + weight

    def set_aside(self) -> None:
        """Move gradients out of the way of Lightning's `zero_grad`, which comes next."""
        self._aside = []  # in an epoch of Lightning's weight averaging there is no backward to put them back
        for parameter in self.parameters:
            if parameter.grad is not None:
                self._aside.append((parameter, parameter.grad))
                parameter.grad = None

    def restore(self, is_last: bool) -> None:
        """Put gradients back. After the last batch the next one begins a window."""
        for parameter, gradient in self._aside:
            parameter.grad = gradient
        self._aside = []
        self._is_new = is_last

    @property
    def divisor(self) -> Tensor | float:
        """The divisor that gradients still need."""
        if self._loss_is_mean:
            return float(self.num_ranks)
        if self.is_scaled:
            return 1.0
        assert self.weight is not None
        return self.weight


def cast_gradients(parameters: Iterable[nn.Parameter], optimizer: Optimizer) -> None:
    """Cast gradients that are wider than their parameter to its dtype, unless the optimizer takes them."""
    if getattr(optimizer, "takes_wide_gradients", False):
        return
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
            parameter.grad = parameter.grad.to(parameter.dtype)


def scale_gradients(gradients: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiply in place. torch would round a device scalar to a narrow gradient's dtype first: widen those."""
    by_device: dict[torch.device, list[Tensor]] = {}  # some may be kept in the host's memory
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    for device, together in by_device.items():
        here = factor.to(device) if isinstance(factor, Tensor) else factor
        if isinstance(here, Tensor) and any(g.dtype.itemsize < 4 for g in together):
            for gradient in together:
                gradient.copy_(gradient * here.float() if gradient.dtype.itemsize >= 4 else gradient.float() * here)
        elif isinstance(here, Tensor):
            torch._foreach_mul_(together, here.to(together[0].dtype))
        else:
            torch._foreach_mul_(together, here)


def inverse(weight: Tensor) -> Tensor:
    """Return 1 / weight, and 0 where weight is 0, without waiting for the device."""
    return torch.where(weight == 0, 0.0, 1 / weight)
