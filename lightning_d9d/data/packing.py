"""Samples of different lengths in rows of one length: several in a row, or padded beside others of similar length.

The orders here are functions of a seed and an epoch. `EpochSampler` distributes them over data ranks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.ops.linear_cross_entropy import IGNORED

_POOL = 64
"""Number of groups of rows that are sorted by length together: a larger number makes lengths in a group more alike."""


class PackedOrder:
    """Rows of several samples each, packed by best fit, in a different order in each epoch. Local.

    Samples are taken from the longest to the shortest. Each goes into the row that has the least space among those in
    which it fits, or into a new one. Samples of equal length are exchanged in each epoch, and rows are shuffled.

    Args:
        lengths: Number of tokens of each sample.
        row_length: Tokens of a row.

    Raises:
        ConfigError: A sample is longer than a row.
    """

    def __init__(self, lengths: Sequence[int], row_length: int) -> None:
        if (longest := max(lengths, default=0)) > row_length:
            raise ConfigError(
                f"a sample has {longest} tokens, but a row only {row_length}; make rows longer, or leave the sample out"
            )
        self.description = {"row_length": row_length}
        self._lengths = torch.tensor(lengths, dtype=torch.int64)
        self._places = _best_fit(sorted(lengths, reverse=True), row_length)

    def __len__(self) -> int:
        return len(self._places)

    def __call__(self, seed: int, epoch: int) -> list[tuple[int, ...]]:
        """Return the samples of each row, in the order of an epoch."""
        generator = _generator(seed, epoch)
        samples = _by_length(torch.randperm(len(self._lengths), generator=generator), self._lengths).tolist()
        order = torch.randperm(len(self._places), generator=generator).tolist()
        return [tuple(samples[place] for place in self._places[row]) for row in order]


class GroupedOrder:
    """Rows of one sample each, in groups of similar length. Local.

    Args:
        lengths: Number of tokens of each sample.
        group_size: Number of rows in a group, such as the rows of an optimizer step on all data ranks.
    """

    def __init__(self, lengths: Sequence[int], group_size: int) -> None:
        self.description = {"group_size": group_size}
        self._lengths = torch.tensor(lengths, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._lengths)

    def __call__(self, seed: int, epoch: int) -> list[tuple[int, ...]]:
        """Return the sample of each row, in the order of an epoch; rows that fill no group are at the end."""
        generator, size = _generator(seed, epoch), self.description["group_size"]
        mixed = torch.randperm(len(self._lengths), generator=generator)
        num_groups = len(mixed) // size
        whole, rest = mixed[: num_groups * size], mixed[num_groups * size :]
        pools = [_by_length(pool, self._lengths) for pool in whole.split(_POOL * size)]
        groups = torch.cat([*pools, whole[:0]]).view(num_groups, size)
        groups = groups[torch.randperm(num_groups, generator=generator)]
        return [(sample,) for sample in torch.cat([groups.flatten(), rest]).tolist()]


def packed_row(samples: Sequence[tuple[Tensor, Tensor]], row_length: int, padding_id: int = 0) -> dict[str, Tensor]:
    """Return a row of whole samples, as `Qwen3MoePretraining` takes it; the rest of the row is padding.

    Args:
        samples: `input_ids` and shifted `labels` of each sample, `[length]` integers.
        row_length: Tokens of the row.
        padding_id: Token of the padding.

    Returns:
        `input_ids`, `labels` and `document_ids`, `[row_length]` int64. Documents are numbered from 0, and padding has
        the next number.
    """
    row = {
        "input_ids": torch.full((row_length,), padding_id),
        "labels": torch.full((row_length,), IGNORED),
        "document_ids": torch.full((row_length,), len(samples)),
    }
    start = 0
    for index, (input_ids, labels) in enumerate(samples):
        end = start + len(input_ids)
        row["input_ids"][start:end] = input_ids
        row["labels"][start:end] = labels
        row["document_ids"][start:end] = index
        start = end
    return row


def padded_rows(
    samples: Sequence[tuple[Tensor, Tensor]], multiple: int = 1, padding_id: int = 0
) -> list[dict[str, Tensor]]:
    """Return rows of one sample each, padded on the right to the longest. No token of a sample sees the padding.

    Args:
        samples: `input_ids` and shifted `labels` of each sample, `[length]` integers.
        multiple: The number of tokens in a row is rounded up to a multiple of this.
        padding_id: Token of the padding.

    Returns:
        `input_ids` and `labels` of each row, `[seq]` int64.
    """
    length = max(len(input_ids) for input_ids, _ in samples)
    length += -length % multiple
    rows = [packed_row([sample], length, padding_id) for sample in samples]
    return [{name: row[name] for name in ("input_ids", "labels")} for row in rows]


def _best_fit(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Return for each row the places of its samples in `lengths`, which must not increase."""
    rows: list[list[int]] = []
    by_space: dict[int, list[int]] = {}
    spaces: list[int] = []
    for place, length in enumerate(lengths):
        index = bisect_left(spaces, length)
        if index == len(spaces):
            row, space = len(rows), row_length
            rows.append([])
        else:
            space = spaces[index]
            row = by_space[space].pop()
            if not by_space[space]:
                spaces.pop(index)
        rows[row].append(place)
        left = space - length
        if not by_space.setdefault(left, []):
            insort(spaces, left)
        by_space[left].append(row)
    return rows


def _by_length(samples: Tensor, lengths: Tensor) -> Tensor:
    """Return an order with the longest first; samples of equal length stay in their order."""
    return samples[lengths[samples].argsort(descending=True, stable=True)]


def _generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed + epoch)  # as torch's DistributedSampler
