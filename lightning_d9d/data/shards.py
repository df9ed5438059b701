"""Map-style datasets that wrap others: a shard of one, one sorted by length in parts, and padded batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_d9d.errors import ConfigError, StateError
from lightning_d9d.mesh.seeds import derived

T_co = TypeVar("T_co", covariant=True)


class SizedDataset(Protocol[T_co]):
    """A map-style dataset that knows its length."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> T_co: ...


class SortableDataset(SizedDataset[T_co], Protocol[T_co]):
    """A map-style dataset that gives the length of an item without reading it."""

    def sort_key(self, index: int, /) -> Any:
        """Return the key by which items are sorted, such as a length."""
        ...


class ShardedDataset(Dataset[T_co], Generic[T_co]):
    """The part of a dataset that belongs to one of several shards, such as a data rank.

    Together the shards have each item once.

    | | item `i` of shard `s` of `S`, for `n` items |
    |---|---|
    | `"sequential"` | `i * S + s` |
    | `"chunked"` | `s * ceil(n / S) + i` |

    Args:
        dataset: The dataset that is divided. If it has `state_dict` and `load_state_dict`, its state is kept with this
            one's.
        total_shards: Number of shards.
        current_shard: Index of this shard.
        indexing_mode: Distribution of the items: see the table.
        pad_to_equal_size_across_shards: Whether all shards have equally many items. The dataset's last item stands for
            those that a shard lacks.

    Raises:
        ConfigError: The dataset has no length, or the shard or mode does not exist.
    """

    def __init__(
        self,
        dataset: SizedDataset[T_co],
        total_shards: int,
        current_shard: int,
        indexing_mode: Literal["sequential", "chunked"] = "sequential",
        pad_to_equal_size_across_shards: bool = True,
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise ConfigError(f"{type(dataset).__name__} has no length, so it cannot be divided into shards")
        if not 0 <= current_shard < total_shards:
            raise ConfigError(f"current_shard={current_shard} must be at least 0 and less than {total_shards=}")
        if indexing_mode not in ("sequential", "chunked"):
            raise ConfigError(f"indexing_mode={indexing_mode!r} must be 'sequential' or 'chunked'")
        self.dataset = dataset
        self.total_shards = total_shards
        self.current_shard = current_shard
        self.indexing_mode = indexing_mode
        self.is_padded = pad_to_equal_size_across_shards

    def _places(self) -> range:
        """Return the places of this shard's own items in the dataset."""
        num_items, shards, shard = len(self.dataset), self.total_shards, self.current_shard
        if self.indexing_mode == "sequential":
            return range(shard, num_items, shards)
        size = -(-num_items // shards)
        return range(min(shard * size, num_items), min((shard + 1) * size, num_items))

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.total_shards) if self.is_padded else len(self._places())

    def __getitem__(self, index: int) -> T_co:
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of {len(self)} items of shard {self.current_shard}")
        places = self._places()
        return self.dataset[places[index] if index < len(places) else len(self.dataset) - 1]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of shards, and the dataset's state if it has one."""
        return {"total_shards": self.total_shards, **_inner_state(self.dataset)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the dataset's state. The shard itself does not change.

        Raises:
            StateError: The state has another number of shards.
        """
        if state_dict["total_shards"] != self.total_shards:
            raise StateError(
                f"the state is of {state_dict['total_shards']} shards, but there are {self.total_shards}, so items "
                "have other places; resume with as many"
            )
        _load_inner_state(self.dataset, state_dict)


class BufferSortedDataset(Dataset[T_co], Generic[T_co]):
    """A dataset in an order in which neighbours have similar lengths, so that batches have little padding.

    Each `buffer_size` neighbours are sorted by length and divided into packs; items of equal length are in random
    order. The packs are in random order, and so are the items in each. A last pack that is not full stays last, so that
    packs are batches. Only seed and epoch determine the order, whichever items are read before.

    Args:
        base: The dataset to be read. If it has `state_dict` and `load_state_dict`, its state is kept with this one's.
        buffer_size: Number of items that are sorted together.
        pack_size: Number of items in a pack, such as those of a global batch.
        seed: Seed of the order, the same on all ranks.

    Raises:
        ConfigError: A size is less than 1.
    """

    def __init__(self, base: SortableDataset[T_co], buffer_size: int, pack_size: int, seed: int = 0) -> None:
        if min(buffer_size, pack_size) < 1:
            raise ConfigError(f"buffer_size={buffer_size} and pack_size={pack_size} must be at least 1")
        self.base = base
        self.buffer_size = buffer_size
        self.pack_size = pack_size
        self.seed = seed
        self.epoch = 0
        self._buffer: tuple[tuple[int, ...], list[int]] = ((), [])
        """Which buffer was read last, and its order."""

    def set_epoch(self, epoch: int) -> None:
        """Use the order of an epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> T_co:
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of {len(self)} items")
        number, place = divmod(index, self.buffer_size)
        about = (self.seed, self.epoch, number)
        if self._buffer[0] != about:
            self._buffer = (about, self._order(number))
        return self.base[self._buffer[1][place]]

    def _order(self, number: int) -> list[int]:
        numbers = random.Random(derived(self.seed, "order of a buffer", self.epoch, number))
        start = number * self.buffer_size
        indices = list(range(start, min(start + self.buffer_size, len(self.base))))
        numbers.shuffle(indices)
        indices.sort(key=self.base.sort_key)
        packs = [indices[place : place + self.pack_size] for place in range(0, len(indices), self.pack_size)]
        rest = [packs.pop()] if len(packs[-1]) < self.pack_size else []
        numbers.shuffle(packs)
        for pack in packs + rest:
            numbers.shuffle(pack)
        return [index for pack in packs + rest for index in pack]

    def state_dict(self) -> dict[str, Any]:
        """Return seed and epoch, and the base's state if it has one."""
        return {"seed": self.seed, "epoch": self.epoch, **_inner_state(self.base)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Use the saved order, and load the base's state."""
        self.seed, self.epoch = state_dict["seed"], state_dict["epoch"]
        _load_inner_state(self.base, state_dict)


def pad_stack_1d(
    items: Sequence[Tensor],
    pad_value: float,
    padding_side: Literal["left", "right"] = "right",
    pad_to_multiple_of: int | None = None,
) -> Tensor:
    """Stack tensors of different lengths, `[length]` each, as rows of one tensor, `[batch, longest]`.

    Args:
        items: At least one, of one dtype.
        pad_value: Value that fills the shorter ones.
        padding_side: Where.
        pad_to_multiple_of: The rows' length is the next multiple of this. None uses the length of the longest.

    Raises:
        ConfigError: The list is empty, an item has another number of dims, or a setting is out of range.
    """
    if not items:
        raise ConfigError("pad_stack_1d needs at least one tensor")
    if any(item.ndim != 1 for item in items):
        raise ConfigError(f"pad_stack_1d takes tensors [length], not {[list(item.shape) for item in items]}")
    if padding_side not in ("left", "right"):
        raise ConfigError(f"padding_side={padding_side!r} must be 'left' or 'right'")
    multiple = 1 if pad_to_multiple_of is None else pad_to_multiple_of
    if multiple < 1:
        raise ConfigError(f"pad_to_multiple_of={pad_to_multiple_of} must be at least 1")
    length = -(-max(map(len, items)) // multiple) * multiple
    missing = [length - len(item) for item in items]
    pads = [(each, 0) if padding_side == "left" else (0, each) for each in missing]
    padded = [torch.nn.functional.pad(item, pad, value=pad_value) for item, pad in zip(items, pads, strict=True)]
    return torch.stack(padded)


def _inner_state(dataset: Any) -> dict[str, Any]:
    return {"dataset": dataset.state_dict()} if hasattr(dataset, "state_dict") else {}


def _load_inner_state(dataset: Any, state: dict[str, Any]) -> None:
    if "dataset" in state and hasattr(dataset, "load_state_dict"):
        dataset.load_state_dict(state["dataset"])
