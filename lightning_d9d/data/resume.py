"""Map-style loaders that go on in the middle of an epoch without reading again what was read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

_ORDERED = (SequentialSampler, DistributedSampler)
"""Samplers whose order follows from the epoch."""


class ResumableSampler:
    """A sampler, or batch sampler, that can leave out what an earlier run drew in the same epoch.

    Samplers that shuffle draw from a generator, or from torch's own, when an epoch begins. Its state at that moment
    belongs to the place in the epoch: drawing from it again gives the same order.

    Args:
        sampler: What a DataLoader takes its indices, or lists of indices, from.
        num_read: How many of these the current epoch has used so far; 0 between epochs.
    """

    def __init__(self, sampler: Any, num_read: Callable[[], int]) -> None:
        self._order = sampler
        self._num_read = num_read
        self._random_state: Tensor | None = None
        self._resumed: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self._order)

    def __getattr__(self, name: str) -> Any:
        if name == "_order":  # not there yet: while it is unpickled
            raise AttributeError(name)
        return getattr(self._order, name)  # set_epoch, sampler, batch_size, ...

    def __iter__(self) -> Iterator[Any]:
        resumed, self._resumed = self._resumed or {"num_read": 0, "random_state": None}, None
        with self._drawing_from(resumed["random_state"]):
            indices = iter(self._order)
            first = list(islice(indices, resumed["num_read"], resumed["num_read"] + 1))
        yield from first
        yield from indices

    def state_dict(self) -> dict[str, Any]:
        """The place in the epoch, and what its order follows from."""
        num_read = self._num_read()
        return {"num_read": num_read, "random_state": self._random_state if num_read else None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The next iteration goes on where `state_dict` was taken."""
        self._resumed = state_dict

    @contextmanager
    def _drawing_from(self, state: Tensor | None) -> Iterator[None]:
        """The order is drawn in the body: from `state`, or from the generator as it is; which is remembered."""
        shuffling: Any = self._order
        while hasattr(shuffling, "sampler"):
            shuffling = shuffling.sampler
        if type(shuffling) in _ORDERED:
            yield
            return
        own: torch.Generator | None = getattr(shuffling, "generator", None)
        generator = torch.default_generator if own is None else own
        before = generator.get_state()
        self._random_state = before if state is None else state
        generator.set_state(self._random_state)
        yield
        if state is not None and own is None:  # dropout and all else goes on with its own numbers
            generator.set_state(before)


def make_resumable(loader: DataLoader[Any], num_read: Callable[[], int]) -> Callable[[], None]:
    """Give a map-style DataLoader a `state_dict` and a `load_state_dict`, in place.

    Args:
        loader: Without these methods.
        num_read: How many batches the current epoch has used so far; 0 between epochs. A loader that is shorter than
            the epoch and begins again takes it modulo its length.

    Returns:
        What takes them away again.
    """
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    original = getattr(loader, name)
    sampler = ResumableSampler(original, lambda: num_read() % max(1, len(loader)))
    object.__setattr__(loader, name, sampler)  # a DataLoader does not let its sampler be set
    loader.state_dict, loader.load_state_dict = sampler.state_dict, sampler.load_state_dict  # type: ignore[attr-defined]

    def undo() -> None:
        object.__setattr__(loader, name, original)
        del loader.state_dict, loader.load_state_dict  # type: ignore[attr-defined]

    return undo


def can_resume_by_sampler(loader: object) -> bool:
    """Whether it is a map-style DataLoader without a way of its own to resume."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return not hasattr(loader, "load_state_dict")
