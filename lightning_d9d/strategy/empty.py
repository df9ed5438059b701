"""Batches, windows of accumulated batches and epochs in which nothing counts."""

from __future__ import annotations

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.pipeline.host_copy import HostCopy

MAX_IN_A_ROW = 10
"""Number of consecutive windows in which nothing counts, after which a run ends."""

CAUSE = "microbatch_loss gave the weight 0 for all of it; where labels are the weight, all of them are ignored (-100)"
_WARNINGS = (
    f"a training batch has nothing that counts: {CAUSE}. Its train_loss is shown as 0",
    f"an optimizer step is left out, as nothing counted in any of its batches: {CAUSE}",
    f"an epoch had nothing that counts, and trained nothing: {CAUSE}. Look at the data",
)


class EmptyBatches:
    """Counts batches, windows and epochs with a total weight of 0, and reports each kind once.

    Counts are kept on the device and read late, so that the host does not wait.

    Args:
        device: Device of the weights.
    """

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(4, dtype=torch.int64, device=device)
        """Counts of batches, windows and epochs, and the most windows in a row."""
        self._in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self._epoch_is_empty: Tensor | None = None
        self._copy = HostCopy()
        self._num_said = [0, 0, 0]

    @property
    def num_batches(self) -> int:
        """The number of batches in which nothing counted. It reads the device."""
        return int(self._counts[0])

    def add_batch(self, weight: Tensor) -> None:
        """Add a batch with this weight over all ranks."""
        is_empty = weight == 0
        self._counts[0] += is_empty
        self._epoch_is_empty = is_empty if self._epoch_is_empty is None else self._epoch_is_empty & is_empty

    def add_window(self, weight: Tensor) -> None:
        """Add a window with this weight over all batches and ranks, the same on every rank.

        Raises:
            ConfigError: Too many consecutive windows counted nothing; on an accelerator raised some windows late.
        """
        is_empty = weight == 0
        self._counts[1] += is_empty
        self._in_a_row = torch.where(is_empty, self._in_a_row + 1, 0)
        self._counts[3] = torch.maximum(self._counts[3], self._in_a_row)
        counts = self._copy.exchange(self._counts)
        if counts is not None:
            self._tell(counts)

    def end_epoch(self) -> None:
        """Report the epoch of the added batches, if there were any."""
        if self._epoch_is_empty is not None:
            self._counts[2] += self._epoch_is_empty
            self._epoch_is_empty = None

    def finish(self) -> None:
        """Report the remaining facts at the end of a fit. It reads the device.

        Raises:
            ConfigError: Too many consecutive windows counted nothing.
        """
        self.end_epoch()
        self._tell(self._counts)

    def _tell(self, counts: Tensor) -> None:
        *numbers, in_a_row = counts.tolist()
        for text, number, said in zip(_WARNINGS, numbers, self._num_said, strict=True):
            if number > 0 and said == 0:
                rank_zero_warn(text)
        self._num_said = numbers
        if in_a_row >= MAX_IN_A_ROW:
            raise ConfigError(
                f"{MAX_IN_A_ROW} consecutive optimizer steps counted nothing: {CAUSE}. Check how the data and its "
                "collate_fn make labels: the whole text may be masked, or a prompt may fill every row"
            )
