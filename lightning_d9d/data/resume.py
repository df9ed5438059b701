"""Loaders that resume in the middle of an epoch; map-style ones do not read old samples again.

On as many data ranks as before, each resumes its own order. If the number of ranks or the batch size has changed, the
unread part of the epoch's order is redistributed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_d9d.data.epoch_sampler import EpochSampler
from lightning_d9d.data.workers import set_unrecorded
from lightning_d9d.errors import StateError
from lightning_d9d.mesh.seeds import random_state, set_random_state

_ORDERED = (SequentialSampler, DistributedSampler, EpochSampler)
"""Samplers whose order the epoch and a seed determine."""
_CPU = torch.device("cpu")
_FROM_THE_START: dict[str, Any] = {
    **{"num_read": 0, "num_batches": 0, "num_ranks": 1, "seeds": [], "global": None, "own": [], "order": None}
}


class DataRank(NamedTuple):
    """The data rank for which a loader reads."""

    rank: int = 0
    num_ranks: int = 1


ALONE = DataRank()


class ResumableSampler:
    """A sampler, or batch sampler, that can skip the indices that an earlier run drew in the same epoch.

    Samplers that shuffle draw from their own torch generators, or from the global ones (torch, NumPy, Python), when an
    epoch begins. The states of the generators at that moment belong to the place in the epoch: drawing from them again
    gives the same order. Between epochs the states of a sampler's own generators are saved, from which the next epoch
    draws. The global ones must be kept by the caller.

    Args:
        sampler: Source of a DataLoader's indices, or lists of indices.
        num_read: Number of indices that the current pass has used; 0 between epochs.
        data_rank: The samples that the indices refer to.
    """

    def __init__(self, sampler: Any, num_read: Callable[[], int], data_rank: DataRank = ALONE) -> None:
        self._order = sampler
        self._num_read = num_read
        self._data_rank = data_rank
        self._global: dict[str, Any] | None = None
        self._own: list[Tensor] = []
        self._resumed: Mapping[str, Any] | None = None
        self._dealt: Mapping[str, Any] | None = None

    def __len__(self) -> int:
        return len(self._order)

    def __getattr__(self, name: str) -> Any:
        if name == "_order":  # not there yet: while it is unpickled
            raise AttributeError(name)
        return getattr(self._order, name)  # set_epoch, sampler, batch_size, ...

    def __iter__(self) -> Iterator[Any]:
        resumed, self._resumed = self._resumed or _FROM_THE_START, None
        self._dealt = resumed.get("dealt")
        if self._dealt is not None:
            self._global, self._own = resumed["global"], resumed["own"]
            share = self._share(self._dealt, self._global, self._own)
            yield from _batches(self._dealt, share, resumed["num_read"] - self._dealt["first_batch"])
            return
        with self._drawing_from(resumed):
            indices = iter(self._order)
            first = list(islice(indices, resumed["num_read"], resumed["num_read"] + 1))
        yield from first
        yield from indices

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the epoch and the source of its order; between epochs, the source of the next order."""
        about: dict[str, Any] = {"num_batches": len(self), "num_ranks": self._data_rank.num_ranks}
        about["seeds"] = [sampler.seed for sampler in _seeded(self._order)]
        if num_read := self._num_read():
            order = self._dealt or _description(self._order, self._data_rank.num_ranks)
            return {"num_read": num_read, **about, "global": self._global, "own": self._own, "order": order}
        return {**_FROM_THE_START, **about, "own": _states(self._order)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume the next iteration where `state_dict` was taken, on this data rank or on the first of others.

        Raises:
            StateError: Another number of data ranks resumes in the middle of an epoch, and the distribution of samples
                over them is unknown.
        """
        state, ranks = state_dict, self._data_rank.num_ranks
        own, saved = _description(self._order, ranks), state["order"]
        is_within = state["num_read"] > 0
        # Of other data only the number of batches says where to go on.
        is_other_data = own is not None and saved is not None and _of_data(own) != _of_data(saved)
        if is_within and saved is not None and not is_other_data and (own is not None or saved["first_sample"]):
            state = self._redistributed(state, saved, own)
        elif is_within and ranks != state["num_ranks"] and len(self) != state["num_batches"]:
            raise StateError(_refusal(state["num_ranks"], ranks))  # with as many, steps have the same samples
        for sampler, seed in zip(_seeded(self._order), state["seeds"], strict=False):  # the job may have another
            sampler.seed = seed
        self._resumed = state if is_within else None
        if not is_within and ranks == state["num_ranks"]:
            _set_states(self._order, state["own"])

    @property
    def resumes_at(self) -> int | None:
        """Number of batches from the beginning of the epoch to the loaded place; None if that is what was saved."""
        return None if self._resumed is None or "dealt" not in self._resumed else self._resumed["num_read"]

    def _redistributed(
        self, state: Mapping[str, Any], saved: Mapping[str, Any], own: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Return the state with this rank's part of the epoch's order, unless the sampler determines that part."""
        if own is None:
            raise StateError(_refusal(state["num_ranks"], self._data_rank.num_ranks))
        dealt = {**saved, **{key: own[key] for key in ("num_ranks", "batch_size", "drop_last", "drops_rest")}}
        is_same = all(own[key] == saved[key] for key in ("num_ranks", "batch_size", "kind"))
        if is_same and saved["kind"] != "epoch":  # which goes to its place at once
            return {**state, "dealt": dealt} if saved["first_sample"] else dict(state)
        num_rows = saved["num_ranks"] * saved["batch_size"]
        dealt["first_sample"] += (state["num_read"] - saved["first_batch"]) * num_rows
        place = len(self) - _num_batches(dealt, self._share(dealt, state["global"], state["own"]))
        return {**state, "num_read": place, "dealt": {**dealt, "first_batch": place}}

    def _share(self, order: Mapping[str, Any], numbers: Mapping[str, Any] | None, own: list[Tensor]) -> Sequence[Any]:
        """Return this rank's samples from `first_sample` on; all ranks have equally many."""
        num_ranks = order["num_ranks"]
        if order["kind"] == "epoch":
            sampler: Any = self._order.sampler if type(self._order) is BatchSampler else self._order
            indices = sampler.order(order["seed"], order["epoch"])
        else:
            indices = _indices(order, numbers, own)
        left = indices[order["first_sample"] :]
        if order["drops_rest"]:
            left = left[: len(left) // num_ranks * num_ranks]
        else:
            left += indices[: -len(left) % num_ranks]  # the last ones filled up, as torch does
        return left[self._data_rank.rank :: num_ranks]

    @contextmanager
    def _drawing_from(self, state: Mapping[str, Any]) -> Iterator[None]:
        """Make the body draw the order from `state`, or from the generators as they are; remember their states."""
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


def make_resumable(
    loader: DataLoader[Any], num_read: Callable[[], int], data_rank: DataRank = ALONE
) -> Callable[[], None]:
    """Give a map-style DataLoader a `state_dict` and a `load_state_dict`, in place.

    Args:
        loader: DataLoader without these methods.
        num_read: Number of batches that the current epoch has used; 0 between epochs. A shorter loader begins again,
            and its place is counted from that beginning. A loader that has just been read to its end is at its end.
        data_rank: The data rank for which it reads.

    Returns:
        A function that removes these methods.
    """
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    original = getattr(loader, name)
    sampler = ResumableSampler(original, lambda: _place_in_pass(num_read(), len(loader)), data_rank)
    set_unrecorded(loader, state_dict=sampler.state_dict, load_state_dict=sampler.load_state_dict, **{name: sampler})

    def undo() -> None:
        set_unrecorded(loader, **{name: original})
        for method in ("state_dict", "load_state_dict"):
            object.__delattr__(loader, method)

    return undo


def make_replayed(loader: Any, num_read: Callable[[], int], data_rank: DataRank = ALONE) -> Callable[[], None]:
    """Give an iterable without a state of its own a `state_dict` and a `load_state_dict`, in place.

    The iterable resumes by reading the old batches again and dropping them: the result is exact if it yields the same
    batches again. Worker processes get the seeds that they had.

    Args:
        loader: Loader without these methods; a DataLoader, or an object of another class written in Python.
        num_read: Number of batches that the current epoch has used; 0 between epochs.
        data_rank: The data rank for which it reads.

    Returns:
        A function that removes these methods.
    """
    kind, before = type(loader), None
    skipped: Mapping[str, Any] = _FROM_THE_START

    class Replayed(kind):
        replays_batches = True

        def __iter__(self) -> Iterator[Any]:
            nonlocal before, skipped
            state, skipped = skipped, _FROM_THE_START
            present = random_state(_CPU)
            before = state["global"] or present
            set_random_state(before, _CPU)
            iterator = super().__iter__()
            for _ in range(state["num_read"]):
                next(iterator, None)  # not in a for loop: where a loader is its own iterator, that would begin again
            if state["global"]:
                set_random_state(present, _CPU)
            return iterator

        def state_dict(self) -> dict[str, Any]:
            count = num_read()
            state = {**_FROM_THE_START, "num_read": count, "num_ranks": data_rank.num_ranks}
            return {**state, "global": before if count else None}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            nonlocal skipped
            if state_dict["num_read"] and state_dict["num_ranks"] != data_rank.num_ranks:
                raise StateError(_refusal(state_dict["num_ranks"], data_rank.num_ranks))
            skipped = state_dict

    Replayed.__name__, Replayed.__qualname__ = kind.__name__, kind.__qualname__
    set_unrecorded(loader, __class__=Replayed)

    def undo() -> None:
        set_unrecorded(loader, __class__=kind)

    return undo


def end_resuming(loader: Any) -> None:
    """Make the next epoch of litdata's `StreamingDataLoader` begin at its beginning; other loaders are left alone.

    Local.

    Such a loader resumes from the state that it was given in each epoch, until it is asked for a batch after the last
    one. Lightning does not ask for that batch, because it knows the number of batches.

    Args:
        loader: Any loader. It has been read in the epoch of the loaded state.
    """
    if getattr(loader, "restore", None) is True:
        loader.restore = False


def is_replayed(loader: object) -> bool:
    """Return whether `make_replayed` changed the loader."""
    return getattr(loader, "replays_batches", False)


def can_replay(loader: object) -> bool:
    """Return whether `make_replayed` can change the loader."""
    return not hasattr(loader, "load_state_dict") and hasattr(loader, "__dict__") and hasattr(type(loader), "__iter__")


def resumes_at(loader: object) -> int | None:
    """Return `ResumableSampler.resumes_at` of a loader's sampler; None for other samplers."""
    samplers = (getattr(loader, name, None) for name in ("batch_sampler", "sampler"))
    return next((sampler.resumes_at for sampler in samplers if isinstance(sampler, ResumableSampler)), None)


def without_resuming(sampler: Any) -> Any:
    """Return the sampler inside a `ResumableSampler`; another sampler is returned as it is."""
    return sampler._order if isinstance(sampler, ResumableSampler) else sampler


def is_place_of_sampler(state: object) -> bool:
    """Return whether a state is one of a `ResumableSampler`."""
    return isinstance(state, Mapping) and state.keys() == _FROM_THE_START.keys()


def can_resume_by_sampler(loader: object) -> bool:
    """Return whether a loader is a map-style DataLoader without its own way to resume."""
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
    """Return whether the order of a sampler may follow from random numbers."""
    while type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return type(sampler) not in _ORDERED


def _attributes(sampler: Any) -> Iterator[Any]:
    """Yield the attributes of a sampler and of the samplers inside of it."""
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
    for generator, state in zip(_generators(sampler), states, strict=False):  # none, where it begins again
        generator.set_state(state)


# Orders that can be redistributed


def _description(sampler: Any, num_ranks: int) -> dict[str, Any] | None:
    """Return the values that decide an epoch's order over all data ranks, with the random state; None if unknown."""
    batches = sampler if type(sampler) is BatchSampler else None
    sampler = sampler if batches is None else batches.sampler
    common = {
        **{"num_ranks": num_ranks, "first_batch": 0, "first_sample": 0},
        "batch_size": 1 if batches is None else batches.batch_size,
        "drop_last": False if batches is None else batches.drop_last,
        "drops_rest": isinstance(sampler, DistributedSampler) and sampler.drop_last,
    }
    if type(sampler) is EpochSampler:
        epoch = sampler.epoch if sampler.shuffle else 0
        about = {"seed": sampler.seed, "epoch": epoch, "order": sampler.order.description}
        return {**common, "kind": "epoch", "num_samples": len(sampler.order), **about}
    if type(sampler) is DistributedSampler:
        about = {"shuffle": sampler.shuffle, "seed": sampler.seed, "epoch": sampler.epoch}
        return {**common, "kind": "distributed", "num_samples": len(sampler.dataset), **about}  # type: ignore[arg-type]
    if num_ranks > 1:  # by whoever made the loader
        return None
    if type(sampler) is SequentialSampler:
        return {**common, "kind": "in order", "num_samples": len(sampler.data_source)}
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
        return {**common, "kind": "random", "num_samples": len(sampler)}
    return None


def _of_data(order: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return values that differ if two orders are of different rows."""
    return order["num_samples"], order.get("order")


def _indices(order: Mapping[str, Any], numbers: Mapping[str, Any] | None, own: list[Tensor]) -> list[int]:
    """Return the order of an epoch that torch's samplers drew, over all data ranks."""
    samples = range(order["num_samples"])
    if order["kind"] == "in order":
        return list(samples)
    if order["kind"] == "distributed":
        sampler = DistributedSampler(samples, 1, 0, shuffle=order["shuffle"], seed=order["seed"])  # type: ignore[arg-type]
        sampler.set_epoch(order["epoch"])
        return list(sampler)
    before, generator = random_state(_CPU), None
    if own:
        generator = torch.Generator()
        generator.set_state(own[0])
    elif numbers is not None:
        set_random_state(numbers, _CPU)
    indices = list(RandomSampler(samples, generator=generator))
    set_random_state(before, _CPU)
    return indices


def _num_batches(order: Mapping[str, Any], share: Sequence[Any]) -> int:
    return len(share) // order["batch_size"] if order["drop_last"] else -(-len(share) // order["batch_size"])


def _batches(order: Mapping[str, Any], share: Sequence[Any], first: int) -> Iterator[list[Any]]:
    """Yield the batches of a rank's samples, beginning with one of them."""
    size = order["batch_size"]
    samples = iter(share[first * size :])
    for _ in range(first, _num_batches(order, share)):
        yield list(islice(samples, size))


def _refusal(saved: int, now: int) -> str:
    return (
        f"{saved} data-parallel ranks saved the checkpoint in the middle of an epoch and {now} resume, but their "
        f"loader does not say how it distributes samples. Resume on {saved}, save at the end of an epoch, or let "
        "Lightning distribute a map-style dataset (use_distributed_sampler=True)"
    )
