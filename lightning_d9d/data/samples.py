"""Tokenized samples of different lengths in flat arrays, and datasets that make rows of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_d9d.data.chat_masks import ChatTokens
from lightning_d9d.data.packing import packed_row, padded_rows
from lightning_d9d.ops.linear_cross_entropy import IGNORED


class Samples(Sequence[tuple[Tensor, Tensor]]):
    """Samples in arrays that worker processes share: 5 bytes a token.

    Item `i` has the `input_ids` and `labels` of sample `i`, `[length]` int64. A label is the token one place further on
    if that token counts, else -100; the last token of a sample is only a label.

    Args:
        samples: Each sample has at least two tokens.
    """

    def __init__(self, samples: Iterable[ChatTokens]) -> None:
        arrays = SampleArrays()
        for sample in samples:
            arrays.add(sample)
        self._tokens, self._is_counted, lengths = arrays.tensors()
        self._ends = lengths.cumsum(0)
        self._starts = self._ends - lengths

    @classmethod
    def of(cls, tokens: Tensor, is_counted: Tensor, lengths: Tensor) -> Samples:
        """Make samples of arrays.

        Args:
            tokens: Tokens of all samples, one after the other, `[num_tokens]` int32.
            is_counted: Whether each of them counts, bool.
            lengths: Tokens of each sample, `[num_samples]` int64.
        """
        found = cls(())
        found._tokens, found._is_counted = tokens, is_counted
        found._ends = lengths.cumsum(0)
        found._starts = found._ends - lengths
        return found

    def subset(self, chosen: Tensor) -> Samples:
        """Return the samples of some indices, `[num_chosen]` int64, which share memory with these."""
        found = Samples(())
        found._tokens, found._is_counted = self._tokens, self._is_counted
        found._starts, found._ends = self._starts[chosen], self._ends[chosen]
        return found

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens that are read of each sample."""
        return (self._ends - self._starts - 1).tolist()

    @property
    def num_counted(self) -> int:
        """The number of tokens of all samples that count."""
        return sum(int((self[index][1] != IGNORED).sum()) for index in range(len(self)))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start, end = int(self._starts[index]), int(self._ends[index])
        tokens = self._tokens[start:end].long()
        return tokens[:-1], tokens[1:].where(self._is_counted[start + 1 : end], IGNORED)


class SampleArrays:
    """Collects samples in growing arrays of tokens, marks and lengths, which can be sent between processes."""

    def __init__(self) -> None:
        self.tokens, self.is_counted, self.lengths = array("i"), bytearray(), array("q")

    def add(self, sample: ChatTokens) -> None:
        """Append a sample."""
        self.tokens.extend(sample.input_ids)
        self.is_counted.extend(sample.is_counted)
        self.lengths.append(len(sample.input_ids))

    def extend(self, later: SampleArrays) -> None:
        """Append the samples of another object."""
        self.tokens.extend(later.tokens)
        self.is_counted.extend(later.is_counted)
        self.lengths.extend(later.lengths)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens (int32), marks (bool) and lengths (int64), which share memory with the arrays."""
        kinds = (self.tokens, torch.int32), (self.is_counted, torch.bool), (self.lengths, torch.int64)
        tensors = [
            torch.frombuffer(each, dtype=dtype) if len(each) else torch.empty(0, dtype=dtype) for each, dtype in kinds
        ]
        return tensors[0], tensors[1], tensors[2]


class PackedRows(Dataset[dict[str, Tensor]]):
    """Rows of several samples: an item is requested by the indices of its samples, see `packed_row`.

    Args:
        samples: All samples.
        row_length: Tokens of a row.
        padding_id: Token of the padding.
    """

    def __init__(self, samples: Samples, row_length: int, padding_id: int) -> None:
        self.samples = samples
        self.row_length = row_length
        self.padding_id = padding_id

    def __getitem__(self, row: tuple[int, ...]) -> dict[str, Tensor]:
        return packed_row([self.samples[index] for index in row], self.row_length, self.padding_id)


class PaddedRows(Dataset[dict[str, Tensor]]):
    """Rows of one sample: items are requested together, and are padded to one length, see `padded_rows`.

    Args:
        samples: All samples.
        multiple: Lengths of rows are multiples of this.
        padding_id: Token of the padding.
    """

    def __init__(self, samples: Samples, multiple: int, padding_id: int) -> None:
        self.samples = samples
        self.multiple = multiple
        self.padding_id = padding_id

    def __getitems__(self, rows: Sequence[tuple[int, ...]]) -> list[dict[str, Tensor]]:
        """Return the rows of a batch."""
        return padded_rows([self.samples[index] for (index,) in rows], self.multiple, self.padding_id)
