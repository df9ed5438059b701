"""Map-style loaders that go on in the middle of an epoch without reading again what was read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_d9d.mesh.seeds import random_state, set_random_state

_ORDERED = (SequentialSampler, DistributedSampler)
"""Samplers whose order follows from the epoch, and from a seed."""
_CPU = torch.device("cpu")
_FROM_THE_START: dict[str, Any] = {"num_read": 0, "seeds": [], "global": None, "own": []}


class ResumableSampler:
    """A sampler, or batch sampler, that can leave out what an earlier run drew in the same epoch.

    Samplers that shuffle draw from torch generators of their own, or from the global ones (torch, NumPy, Python), when
    an epoch begins. The states at that moment belong to the place in the epoch: drawing from them again gives the same
    order. Between epochs it is the states of own generators, from which the next epoch draws; the global ones are for
    whoever saves to keep.

    Args:
        sampler: What a DataLoader takes its indices, or lists of indices, from.
        num_read: How many of these the current pass has used so far; 0 between epochs.
    """

    def __init__(self, sampler: Any, num_read: Callable[[], int]) -> None:
        self._order = sampler
        self._num_read = num_read
        self._global: dict[str, Any] | None = None
        self._own: list[Tensor] = []
        self._resumed: Mapping[str, Any] | None = None

    def __len__(self) -> int:
        return len(self._order)

    def __getattr__(self, name: str) -> Any:
        if name == "_order":  # not there yet: while it is unpickled
            raise AttributeError(name)
        return getattr(self._order, name)  # set_epoch, sampler, batch_size, ...

    def __iter__(self) -> Iterator[Any]:
        resumed, self._resumed = self._resumed or _FROM_THE_START, None
        with self._drawing_from(resumed):
            indices = iter(self._order)
            first = list(islice(indices, resumed["num_read"], resumed["num_read"] + 1))
        yield from first
        yield from indices

    def state_dict(self) -> dict[str, Any]:
        """The place in the epoch, and what its order or, between epochs, the next one's follows from."""
        seeds = [sampler.seed for sampler in _seeded(self._order)]
        if num_read := self._num_read():
            return {"num_read": num_read, "seeds": seeds, "global": self._global, "own": self._own}
        return {**_FROM_THE_START, "seeds": seeds, "own": _states(self._order)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The next iteration goes on where `state_dict` was taken."""
        for sampler, seed in zip(_seeded(self._order), state_dict["seeds"], strict=False):  # the job may have another
            sampler.seed = seed
        self._resumed = state_dict if state_dict["num_read"] else None
        if self._resumed is None:
            _set_states(self._order, state_dict["own"])

    @contextmanager
    def _drawing_from(self, state: Mapping[str, Any]) -> Iterator[None]:
        """The order is drawn in the body: from `state`, or from the generators as they are; which is remembered."""
        if not _draws(self._order):
            yield
            return
        before = random_state(_CPU)
        self._global = state["global"] or before
        _set_states(self._order, state["own"])
        self._own = _states(self._order)
        if state["global"]:
            set_random_state(state["global"], _CPU)
        yield
        if state["global"]:  # dropout and all else goes on with its own numbers
            set_random_state(before, _CPU)


def make_resumable(loader: DataLoader[Any], num_read: Callable[[], int]) -> Callable[[], None]:
    """Give a map-style DataLoader a `state_dict` and a `load_state_dict`, in place.

    Args:
        loader: Without these methods.
        num_read: How many batches the current epoch has used so far; 0 between epochs. In a loader that is shorter and
            begins again the place is counted from there; one that has just been read to its end is at its end.

    Returns:
        What takes them away again.
    """
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    original = getattr(loader, name)
    sampler = ResumableSampler(original, lambda: _place_in_pass(num_read(), len(loader)))
    object.__setattr__(loader, name, sampler)  # a DataLoader does not let its sampler be set
    loader.state_dict, loader.load_state_dict = sampler.state_dict, sampler.load_state_dict  # type: ignore[attr-defined]

    def undo() -> None:
        object.__setattr__(loader, name, original)
        del loader.state_dict, loader.load_state_dict  # type: ignore[attr-defined]

    return undo


def without_resuming(sampler: Any) -> Any:
    """The sampler that a `ResumableSampler` has around; another as it is."""
    return sampler._order if isinstance(sampler, ResumableSampler) else sampler


def is_place_of_sampler(state: object) -> bool:
    """Whether it is a state of a `ResumableSampler`."""
    return isinstance(state, Mapping) and state.keys() == _FROM_THE_START.keys()


def can_resume_by_sampler(loader: object) -> bool:
    """Whether it is a map-style DataLoader without a way of its own to resume."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return not hasattr(loader, "load_state_dict")


def _place_in_pass(num_read: int, length: int) -> int:
    return (num_read - 1) % length + 1 if num_read > 0 and length > 0 else 0


def _draws(sampler: Any) -> bool:
    """Whether its order may follow from random numbers."""
    while type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return type(sampler) not in _ORDERED


def _attributes(sampler: Any) -> Iterator[Any]:
    """Of a sampler and of those inside of it."""
    for value in getattr(sampler, "__dict__", {}).values():
        yield value
        if isinstance(value, Sampler) or isinstance(getattr(value, "_sampler", None), Sampler):
            yield from _attributes(value)  # the latter: how Lightning spreads any sampler over ranks


def _seeded(sampler: Any) -> list[DistributedSampler]:
    return [each for each in (sampler, *_attributes(sampler)) if isinstance(each, DistributedSampler)]


def _generators(sampler: Any) -> list[torch.Generator]:
    return [value for value in _attributes(sampler) if isinstance(value, torch.Generator)]


def _states(sampler: Any) -> list[Tensor]:
    return [generator.get_state() for generator in _generators(sampler)]


def _set_states(sampler: Any, states: list[Tensor]) -> None:
    for generator, state in zip(_generators(sampler), states, strict=False):  # none, where it begins anew
        generator.set_state(state)
