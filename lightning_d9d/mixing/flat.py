"""Flat buffers of this rank's parts of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_d9d.mesh.seeds import derived
from lightning_d9d.mesh.sharding import local
from lightning_d9d.ops.stochastic import round_stochastic_

Batches = Sequence[Sequence[Tensor]]
"""Tensors that may share a message. See [Note: copies stay equal] in `mixer.py`."""


class Flat:
    """A flat buffer for tensors of one dtype.

    Args:
        whole: Parameters or other tensors, of one dtype and device. For a DTensor, the part that this rank holds is
            used.
        is_wide: If True, the buffer is float32 or wider, for sums. If False, it has the tensors' dtype.
    """

    def __init__(self, whole: Sequence[Tensor], *, is_wide: bool = True) -> None:
        self.whole = whole
        self.sum_dtype = torch.promote_types(whole[0].dtype, torch.float32)
        self.dtype = self.sum_dtype if is_wide else whole[0].dtype
        self.num_elements = sum(local(each).numel() for each in whole)
        self._values: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """The device of the tensors and of the buffer."""
        return local(self.whole[0]).device

    @property
    def num_bytes(self) -> int:
        """The size of the buffer."""
        return self.num_elements * self.dtype.itemsize

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that this rank holds."""
        return [local(each) for each in self.whole]

    @property
    def values(self) -> Tensor:
        """The buffer, which is made at the first use."""
        if self._values is None:
            self._values = torch.empty(self.num_elements, dtype=self.dtype, device=self.device)
        return self._values

    @property
    def parts(self) -> list[Tensor]:
        """The part of the buffer for each tensor, in the tensor's shape."""
        return self.split(self.values)

    def split(self, values: Tensor) -> list[Tensor]:
        """Return the part of a buffer like this one for each tensor, in the tensor's shape."""
        tensors = self.tensors
        parts = values.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def place(self, values: Tensor) -> None:
        """Use memory of another owner as the buffer. Local.

        Args:
            values: Shape `[num_elements]`, of this dtype and device.
        """
        self._values = values

    def widened(self) -> list[Tensor]:
        """Return the tensors in the dtype of sums. Local."""
        return [tensor.detach().to(self.sum_dtype) for tensor in self.tensors]

    @torch.no_grad()
    def fill(self) -> Tensor:
        """Copy the tensors into the buffer, and return it. Local."""
        torch._foreach_copy_(self.parts, self.tensors)
        return self.values

    @torch.no_grad()
    def write(self, number: int) -> None:
        """Overwrite the tensors by the buffer; bfloat16 is rounded stochastically. Local.

        Args:
            number: Seed of the rounding: a new one each time, equal on all ranks that round the same values.
        """
        parts, tensors = self.parts, self.tensors
        if tensors[0].dtype != torch.bfloat16:
            torch._foreach_copy_(tensors, parts)
            return
        for index, (tensor, part) in enumerate(zip(tensors, parts, strict=True)):
            round_stochastic_(tensor, part, derived("mixing", number, index, list(tensor.shape)))

    def release(self) -> None:
        """Free the buffer. Local."""
        self._values = None


def flat_buffers(batches: Batches, bucket_bytes: int, *, is_wide: bool = True) -> list[Flat]:
    """Make buffers of a limited size, unless one tensor is larger. Local.

    Args:
        batches: Tensors of different batches have separate buffers.
        bucket_bytes: The limit, for sums in float32 or wider.
        is_wide: As for `Flat`.
    """
    filled: list[list[Tensor]] = []
    for batch in batches:
        room: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
        for tensor in batch:
            own = local(tensor)
            size = own.numel() * torch.promote_types(own.dtype, torch.float32).itemsize
            members, left = room.get((own.dtype, own.device), ([], 0))
            if size > left:
                members, left = [], bucket_bytes
                filled.append(members)
            if size > 0:
                members.append(tensor)
            room[own.dtype, own.device] = members, left - size
    return [Flat(members, is_wide=is_wide) for members in filled if members]


def norm_of(tensors: Iterable[Tensor]) -> Tensor:
    """Return the squared norm of tensors in float32 or wider, a float64 scalar on their device. Local."""
    norms = torch._foreach_norm(list(tensors), 2)
    return torch.stack([norm.double() for norm in norms]).square().sum()
