"""Rows of tokens for training: of one text in files, and mixtures of several texts."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_d9d.data.token_files import TokenFile
from lightning_d9d.errors import ConfigError
from lightning_d9d.ops.linear_cross_entropy import IGNORED

_GOLDEN = 0.6180339887498949


class Rows(Protocol):
    """Rows that a `Mixture` can use: a map-style dataset with a name."""

    name: str

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Span:
    """A part of a file: its tokens from `start` to before `stop`."""

    file: TokenFile
    start: int
    stop: int


class TokenRows(Dataset[dict[str, Tensor]]):
    """Consecutive rows of `sequence_length` tokens from one text, which consists of one or several files.

    A row begins where the one before it ends, in the middle of a document or not. A document that is longer than the
    rest of a row continues in the next row. Tokens at the end of a file that do not fill a row are left out.

    Item `i` has `input_ids` and `labels`, `[sequence_length]` int64; labels are the tokens one place further on, so
    that every token is predicted once. With borders it also has `document_ids`, int64 of the same shape. Ids count the
    documents of the row from 0, and the last token of a document has the label -100.

    Args:
        name: Name of the text, for messages.
        spans: Parts of files that make up the text.
        sequence_length: Tokens of a row.
        borders: Whether documents are kept apart. This needs files with borders, or a token that marks where documents
            begin.
        vocab_size: Vocabulary of the model; ids are checked as rows are read. None does not check them.

    Raises:
        ConfigError: Documents are to be kept apart, and a file does not mark where they begin.
    """

    def __init__(
        self, name: str, spans: Sequence[Span], sequence_length: int, borders: bool, vocab_size: int | None = None
    ) -> None:
        self.name = name
        self.spans = [span for span in spans if span.stop - span.start >= sequence_length]
        self.sequence_length = sequence_length
        self.borders = borders
        self.vocab_size = vocab_size
        unknown = next((span.file.path for span in spans if borders and not span.file.has_borders), None)
        if unknown is not None:
            raise ConfigError(
                f"{unknown} does not mark where documents begin, as a file with an .idx does. Name the token that ends "
                "or begins each (last_token or first_token), or let tokens see other documents with borders=False"
            )
        counts = [(span.stop - span.start) // sequence_length for span in self.spans]
        self._ends = list(accumulate(counts))
        self.num_left_out = sum(span.stop - span.start for span in spans) - sum(counts) * sequence_length
        """Tokens at the ends of files that fill no row."""

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} rows of {self.name}")
        number = bisect_right(self._ends, index)
        span = self.spans[number]
        start = span.start + (index - (self._ends[number - 1] if number else 0)) * self.sequence_length
        stop = start + self.sequence_length
        tokens = span.file.read(start, min(stop + 1, span.stop))
        check_ids(tokens, self.vocab_size, str(span.file.path), start)
        begins = None
        if self.borders:
            begins = span.file.document_starts(start + 1, min(stop + 1, len(span.file))) - start
        return make_row(tokens, self.sequence_length, begins)


def make_row(tokens: np.ndarray, length: int, begins: np.ndarray | None) -> dict[str, Tensor]:
    """Make a row of its tokens and the token after it, which a row at the end of the file lacks.

    Args:
        tokens: `[length]` or `[length + 1]`, int64.
        length: Number of tokens of the row.
        begins: Places in the row, except the first, at which a document begins; the place after the row counts, too.
            None: documents have no borders.

    Returns:
        An item as in `TokenRows`.
    """
    labels = np.full(length, IGNORED)
    labels[: len(tokens) - 1] = tokens[1:]
    row = {"input_ids": torch.from_numpy(tokens[:length]), "labels": torch.from_numpy(labels)}
    if begins is not None:
        marks = np.zeros(length + 1, dtype=np.int64)
        marks[begins] = 1
        labels[marks[1:] == 1] = IGNORED
        row["document_ids"] = torch.from_numpy(marks[:-1].cumsum())
    return row


def check_ids(tokens: np.ndarray, vocab_size: int | None, source: str, start: int) -> None:
    """Check ids that were read.

    Args:
        tokens: Ids of a row.
        vocab_size: Vocabulary of the model; None for any.
        source: Source of the ids, for messages.
        start: Place of the first id there.

    Raises:
        ConfigError: An id is outside of the vocabulary.
    """
    if vocab_size is None:
        return
    is_outside = (tokens < 0) | (tokens >= vocab_size)
    if is_outside.any():
        place = int(is_outside.argmax())
        raise ConfigError(
            f"{source} has the id {tokens[place]} at token {start + place}, but vocab_size={vocab_size} of the model: "
            f"ids go from 0 to {vocab_size - 1}. Prepare the data with the model's tokenizer, or raise vocab_size"
        )


class Mixture(Dataset[dict[str, Tensor]]):
    """Rows of several texts in given proportions, for any number of epochs.

    An epoch has as many rows as the texts have together. Each text has a fixed number of rows, which follows from its
    weight. A text with a small weight contributes a part of its rows to an epoch; one with a large weight repeats its
    rows. In the next epoch a text continues after its last row, so a row is repeated only after all others. The rows of
    an epoch are spread evenly over the text.

    Item `e * len + i` is row `i` of epoch `e`; see `PermutedOrder`, which shuffles each epoch.

    Args:
        texts: Their rows.
        weights: Weight of each text, at least 0; None weighs each by its number of rows, so that an epoch has every row
            once.

    Raises:
        ConfigError: A weight is negative or not finite, all are 0, or a text with a weight has no row.
    """

    def __init__(self, texts: Sequence[Rows], weights: Sequence[float] | None = None) -> None:
        names = [text.name for text in texts]
        weights = [1.0] * len(texts) if weights is None and not sum(map(len, texts)) else weights
        weights = [float(len(text)) for text in texts] if weights is None else list(weights)
        if any(not math.isfinite(weight) or weight < 0 for weight in weights):
            raise ConfigError(f"weights {dict(zip(names, weights, strict=True))} must be finite numbers, at least 0")
        if sum(weights) == 0:
            raise ConfigError(f"the weights of {', '.join(names)} sum to 0; give at least one a larger weight")
        used = [(text, weight) for text, weight in zip(texts, weights, strict=True) if weight > 0]
        if empty := [text.name for text, _ in used if not len(text)]:
            raise ConfigError(f"{', '.join(empty)} does not have a whole row; give more text, or lower sequence_length")
        self.texts = [text for text, _ in used]
        self.shares = _shares(sum(len(text) for text in self.texts), [weight for _, weight in used])
        """Rows of each text in an epoch."""
        self._ends = list(accumulate(self.shares))

    def __len__(self) -> int:
        """Return the number of rows of an epoch."""
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number, row = self.find(index)
        return self.texts[number][row]

    def find(self, index: int) -> tuple[int, int]:
        """Return the number of the text, and the row in it, for an item. Local."""
        epoch, place = divmod(index, len(self))
        number = bisect_right(self._ends, place)
        share, rows = self.shares[number], len(self.texts[number])
        of_text = epoch * share + place - (self._ends[number - 1] if number else 0)
        return number, spread(of_text, rows)


def spread(place: int, size: int) -> int:
    """Return a number below `size` for a place. Neighbouring places get distant numbers, and all are used once.

    Steps are about the golden section of the size, as in a Kronecker sequence.
    """
    step = max(1, round(size * _GOLDEN))
    while math.gcd(step, size) != 1:
        step += 1
    return place * step % size


def _shares(total: int, weights: Sequence[float]) -> list[int]:
    """Divide a total by weights; the largest remainders are rounded up, and each share is at least 1."""
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(each) for each in exact]
    by_remainder = sorted(range(len(exact)), key=lambda each: shares[each] - exact[each])
    for each in by_remainder[: total - sum(shares)]:
        shares[each] += 1
    return [max(1, share) for share in shares]
