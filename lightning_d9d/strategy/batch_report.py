"""The report of a batch, which is sent with its loss and metrics, without a separate message.

[Note: rows of ranks] Loss and metrics are summed over all ranks of a pipeline, and then over the ranks with other
tokens. Numbers of single ranks are sent with them: there is a row for each rank, to which only that rank has written.
Then every rank has all rows, and computes sums, means and extremes from them. Ranks of tensor parallelism, which
compute the same loss, are not among those sums. If there are such ranks, a batch with rows is summed over them, too,
and only the first of them adds its loss. After the rows are numbers of which only the sum over all ranks is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_d9d.mesh import Axis, MeshDomains


class BatchReport:
    """Sends numbers of each rank to all ranks, and sums the weights of batches. It is idle unless opened.

    Args:
        mesh: Mesh of several ranks; None for one process.
        device: Device on which numbers are summed.
    """

    def __init__(self, mesh: MeshDomains | None, device: torch.device) -> None:
        self.logs_every_norm = False
        """True if the norm of the gradients is logged in every step."""
        self.norm_groups: Mapping[str, Sequence[nn.Parameter]] = {}
        """Parameters by the name of a group whose gradient norm is logged; some ranks may have none of a group."""
        self.skipped: Tensor | None = None
        """How many optimizer steps of the fit were left out: int64 on the device. None: no fit has begun."""
        self.weight: Tensor | None = None
        """The weight of all batches since `open`, on all ranks: float64. None: losses are means, or nothing has run."""
        self.rows: Tensor | None = None
        """The numbers that ranks sent last, `[ranks, numbers]` float64 on the device; None: nothing yet."""
        self.sums: Tensor | None = None
        """The sum over all ranks of what they sent to be added up, float64 on the device; None: nothing."""
        self._mesh = mesh
        self._device = device
        self._is_open = False
        self._group: dist.ProcessGroup | None = None
        self._ours: Tensor | None = None
        self._added: Tensor | None = None

    def open(self) -> None:
        """Begin to report in a fit. Collective over all ranks."""
        self._is_open = True
        self.weight = self.rows = self.sums = self._ours = self._added = None
        if self._mesh is not None and self._mesh.sizes[Axis.TP] > 1:
            self._group = self._mesh.group(Axis.DP, Axis.CP, Axis.TP)

    def close(self) -> None:
        """Stop reporting. Local."""
        self._is_open = self.logs_every_norm = False
        self.norm_groups = {}
        self._ours = self._added = self._group = None

    def send(self, numbers: Sequence[float | Tensor], added: Tensor | None = None) -> None:
        """Send numbers with the report of the next batch. All ranks must send equally many, with the same batch. Local.

        Args:
            numbers: A row, which all ranks receive.
            added: `[more]` float64 on the device; all ranks receive the sum over ranks.
        """
        rank, size = (0, 1) if self._mesh is None else (self._mesh.rank, self._mesh.config.world_size)
        rows = torch.zeros(size, len(numbers), dtype=torch.float64)
        rows[rank] = torch.tensor([0.0 if isinstance(each, Tensor) else each for each in numbers], dtype=torch.float64)
        self._ours = rows.to(self._device, non_blocking=True)
        for index, number in enumerate(numbers):
            if isinstance(number, Tensor):
                self._ours[rank, index] = number
        self._added = self._ours.new_empty(0) if added is None else added

    def attach(self, sums: Tensor) -> Tensor:
        """Return the message of a batch. See [Note: rows of ranks]. Local.

        Args:
            sums: `[values, 2]` float64 of this rank.
        """
        if self._ours is None or self._added is None:
            return sums
        if self._group is not None and self._mesh is not None and self._mesh.coordinates[Axis.TP] > 0:
            sums = torch.zeros_like(sums)
        return torch.cat([sums.flatten(), self._ours.flatten(), self._added])

    def group_or(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Return the ranks over which the message is summed last, by default those of `group`. Local."""
        return group if self._ours is None or self._group is None else self._group

    def detach(self, message: Tensor, num_values: int, weighs: bool) -> Tensor:
        """Return the sums of loss and metrics, `[values, 2]`, and keep the rest. Local.

        Args:
            message: Message summed over ranks.
            num_values: Number of values for the loss and the metrics.
            weighs: Whether the weight of the loss, which comes first, is a number of tokens instead of a mean's weight.
        """
        if self._ours is not None:
            values, rows, self.sums = message.flatten().tensor_split(
                (2 * num_values, 2 * num_values + self._ours.numel())
            )
            self.rows = rows.view_as(self._ours)
            message = values.view(-1, 2)
            self._ours = self._added = None
        if self._is_open and weighs:
            self.weight = message[0, 1].clone() if self.weight is None else self.weight + message[0, 1]
        return message
