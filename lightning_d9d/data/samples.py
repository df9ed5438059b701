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

    Item `i` has the `input_ids` and `labels` of sample `i`, `[length]` int64. A label is the token one place further
    on if that counts, else -100; the last token of a sample is a label only.

    Args:
        samples: At least two tokens each.
    """

    def __init__(self, samples: Iterable[ChatTokens]) -> None:
        tokens, counted, ends = array("i"), bytearray(), [0]
        for sample in samples:
            tokens.extend(sample.input_ids)
            counted.extend(sample.is_counted)
            ends.append(len(tokens))
        self._tokens = torch.frombuffer(tokens, dtype=torch.int32) if tokens else torch.empty(0, dtype=torch.int32)
        self._is_counted = torch.frombuffer(counted, dtype=torch.bool) if counted else torch.empty(0, dtype=torch.bool)
        self._ends = torch.tensor(ends)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample that are read."""
        return (self._ends.diff() - 1).tolist()

    @property
    def num_counted(self) -> int:
        """The tokens of all samples that count."""
        return int(self._is_counted.sum())

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start, end = self._ends[index : index + 2].tolist()
        tokens = self._tokens[start:end].long()
        return tokens[:-1], tokens[1:].where(self._is_counted[start + 1 : end], IGNORED)


class PackedRows(Dataset[dict[str, Tensor]]):
    """Rows of several samples: an item is asked for by the samples that are in it, see `packed_row`.

    Args:
        samples: All of them.
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
    """Rows of one sample: items are asked for together, and are padded to one length, see `padded_rows`.

    Args:
        samples: All of them.
        multiple: Lengths of rows are multiples of it.
        padding_id: Token of the padding.
    """

    def __init__(self, samples: Samples, multiple: int, padding_id: int) -> None:
        self.samples = samples
        self.multiple = multiple
        self.padding_id = padding_id

    def __getitems__(self, rows: Sequence[tuple[int, ...]]) -> list[dict[str, Tensor]]:
        """Return the rows of a batch."""
        return padded_rows([self.samples[index] for (index,) in rows], self.multiple, self.padding_id)
