"""What the body of a test marked `ranks(n)` sees of the rank it runs on."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

_kept: dict[tuple[Hashable, ...], Any] = {}
"""Values of `RankContext.from_first_rank`, for the tests that follow."""


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """One of the `world_size` processes that run the same body; the default process group is initialised.

    Torchrun's environment variables are set, so a `lightning.Trainer(devices=world_size, ...)` made in the body takes
    the ranks as they are.
    """

    rank: int
    world_size: int
    device: torch.device
    """The CPU, or this rank's GPU with `--device cuda`: what a test puts its tensors on."""
    backend: str
    """`gloo` or `nccl`."""
    tmp_dir: Path
    """Empty at the start of each test; the same folder on every rank."""

    def __repr__(self) -> str:  # short, since failed asserts show it
        return f"<rank {self.rank} of {self.world_size}>"

    @property
    def group(self) -> dist.ProcessGroup:
        """The default process group, of all ranks."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def barrier(self) -> None:
        """Collective: returns when every rank is here."""
        dist.barrier()

    def all_gather_object(self, value: Any) -> list[Any]:
        """Collective: the picklable `value` of every rank, in rank order."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def from_first_rank(self, function: Callable[..., T], *arguments: Hashable) -> T:
        """Collective: the picklable value of a function that rank 0 calls, once for equal arguments."""
        key = (function, *arguments)
        if key not in _kept:
            _kept[key] = self.all_gather_object(function(*arguments) if self.rank == 0 else None)[0]
        return _kept[key]
