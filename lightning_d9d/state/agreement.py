from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from lightning_d9d.errors import StateError
from lightning_d9d.mesh.collectives import all_gather_object

T = TypeVar("T")


@contextmanager
def agreed() -> Iterator[None]:
    """A block that succeeds on all ranks or on none. Collective over the default process group, if there is one.

    The block may take as long as the group's timeout lets the other ranks wait.

    Raises:
        StateError: Another rank raised in its block; the message has its rank and its error. A rank whose own block
            raises gets that exception.
    """
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
    texts = from_all_ranks(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text is not None:
            raise StateError(f"rank {rank} failed with {text}")


def from_all_ranks(value: T) -> list[T]:
    """The picklable value of every rank of the default process group, in their order; without a group just this one.

    Collective.
    """
    return all_gather_object(value) if dist.is_initialized() else [value]


def is_first_rank() -> bool:
    """Whether this is rank 0 of the default process group, or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0
