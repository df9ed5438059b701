"""Counts what a process copies into the memory of other ranks.

As in `recorder.py`, torch's dispatcher is asked: every copy between tensors is `aten::copy_`, whoever makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


class PeerWrites:
    """Adds up the bytes of copies into the buffers of other ranks, inside of a `with` block.

    Args:
        buffers: The buffer of each rank, as they are mapped here.
        rank: The number of this rank, whose own buffer does not count.
    """

    def __init__(self, buffers: Sequence[Tensor], rank: int) -> None:
        self.num_bytes = 0
        self._places = [
            range(buffer.data_ptr(), buffer.data_ptr() + buffer.numel())
            for other, buffer in enumerate(buffers)
            if other != rank
        ]

    def __enter__(self) -> Self:
        self._library = torch.library.Library("aten", "IMPL")
        copy = torch.ops.aten.copy_.default

        def count_and_copy(keys: torch.DispatchKeySet, target: Tensor, source: Any, *rest: Any) -> Any:
            if any(target.data_ptr() in place for place in self._places):
                self.num_bytes += target.numel() * target.element_size()
            # the dispatcher gives tensors that stand for numbers to Python as numbers
            return copy.redispatch(keys & _BELOW, target, torch.as_tensor(source), *rest)

        self._library.impl("copy_", count_and_copy, "BackendSelect", with_keyset=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._library._destroy()
