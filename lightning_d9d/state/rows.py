"""Rows that ranks receive batch by batch, in any order, written to safetensors files in the order of their numbers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.state.format import ROWS_INDEX_FILE, SafetensorsFile, write_json, write_safetensors
from lightning_d9d.state.places import Place

_MAX_OPEN_FILES = 16


class _RowSpec(NamedTuple):
    """Shape and dtype of one row of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Batch(NamedTuple):
    """The rows of a batch that a rank wrote: tensors in a file, named after `first`."""

    source: int
    """The source whose rows are numbered, such as a dataset."""
    number: int
    rows: Sequence[int]
    """Numbers of the rows. If they are unknown: the number of rows that this rank had before."""
    is_known: bool
    file: str
    first: int
    specs: Mapping[str, _RowSpec]
    """Spec of one row, by the name of a tensor."""

    @property
    def row_bytes(self) -> int:
        return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in self.specs.values())


class _Row(NamedTuple):
    number: int
    batch: _Batch
    place: int
    """Position in the batch."""


_Block = list[_Row]
"""Consecutive rows with equal specs: they become one tensor for each name, named after the first row."""


class RowFiles:
    """Writes rows as they arrive and, at the end, an index in the order of their numbers.

    Files whose rows are in this order stay unchanged. Files of ranks that took turns are written once more in order, by
    all ranks at the same time. A row that arrived several times is kept once.

    Args:
        folder: Folder in which all ranks write.
        max_bytes: Size at which a new file begins. A rank holds about this much in memory.
    """

    def __init__(self, folder: Place, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.ranks = Ranks()
        self._batches: list[_Batch] = []
        self._tensors: dict[str, Tensor] = {}
        """Tensors of the file that is not written yet."""
        self._files: list[str] = [self._next_file(0)]
        self._num_rows: dict[int, int] = defaultdict(int)

    def add(self, source: int, number: int, rows: Sequence[int] | None, tensors: Mapping[str, Tensor]) -> None:
        """Add a batch of this rank. Local.

        Args:
            source: The source whose rows are numbered.
            number: Number of the batch.
            rows: Numbers of the rows. None if unknown: rows then follow the order of batches, and among batches with
                the same number the lowest rank's comes first.
            tensors: At least one tensor, with the rows along dim 0: at least one row, and the same number in all.
        """
        size, before = len(next(iter(tensors.values()))), self._num_rows[source]
        self._num_rows[source] += size
        numbers = range(before, before + size) if rows is None else list(rows)
        new = {f"{name}.{numbers[0]}": each.detach().to("cpu", copy=True) for name, each in tensors.items()}
        num_bytes = sum(tensor.nbytes for tensor in (*self._tensors.values(), *new.values()))
        if num_bytes > self.max_bytes or new.keys() & self._tensors.keys():
            self._write()
        specs = {name: _RowSpec(tuple(each.shape[1:]), each.dtype) for name, each in tensors.items()}
        self._batches.append(_Batch(source, number, numbers, rows is not None, self._files[-1], numbers[0], specs))
        self._tensors |= {name: each.contiguous() for name, each in new.items()}

    def _next_file(self, number: int) -> str:
        return f"rank-{self.ranks.rank}-{number + 1:05d}.safetensors"

    def _write(self) -> None:
        if self._tensors:
            _write_file(self.folder / self._files[-1], self._tensors, self._tensors.values())
            self._tensors = {}
            self._files.append(self._next_file(len(self._files)))

    def finish(self, failure: str) -> int:
        """Write the remaining rows and the index. Collective over all ranks.

        Args:
            failure: Beginning of an error.

        Returns:
            The number of rows; each counts once.

        Raises:
            StateError: A rank cannot write. Every rank raises it.
        """
        with self.ranks.agreed(failure):
            self._write()
        batches = _numbered([batch for theirs in self.ranks.all_gather(self._batches) for batch in theirs])
        rows = {(b.source, number): _Row(number, b, i) for b in reversed(batches) for i, number in enumerate(b.rows)}
        files = _already_in_order(batches)
        if files is None:
            files = self._write_in_order([rows[key] for key in sorted(rows)], failure)
        with self.ranks.agreed(failure):
            if self.ranks.is_first:
                size = sum(row.batch.row_bytes for row in rows.values())
                metadata = {"total_size": size, "num_rows": len(rows)}
                write_json(self.folder / ROWS_INDEX_FILE, {"metadata": metadata, "weight_map": files})
        return len(rows)

    def _write_in_order(self, rows: Iterable[_Row], failure: str) -> dict[str, str]:
        """Write new files that replace the old ones. Return the file of each tensor, in order."""
        contents = _split_into_files(rows, self.max_bytes)
        names = [f"rows-{number:05d}-of-{len(contents):05d}.safetensors" for number in range(1, len(contents) + 1)]
        opened = lru_cache(_MAX_OPEN_FILES)(SafetensorsFile)
        with self.ranks.agreed(failure):
            for name, blocks in list(zip(names, contents, strict=True))[self.ranks.share]:
                tensors = {tensor: spec for block in blocks for tensor, spec in _specs(block).items()}
                values = (value for block in blocks for value in _values(block, self.folder, opened))
                _write_file(self.folder / name, tensors, values)
        with self.ranks.agreed(failure):
            for name in self._files[:-1]:
                _remove(self.folder / name)
        return {
            tensor: name for name, blocks in zip(names, contents, strict=True) for b in blocks for tensor in _specs(b)
        }


def _write_file(path: Place, tensors: Mapping[str, Tensor | _RowSpec], values: Iterable[Tensor]) -> None:
    shapes = {name: tuple(each.shape) for name, each in tensors.items()}
    write_safetensors(path, shapes, {name: each.dtype for name, each in tensors.items()}, values)


def _remove(path: Place) -> None:
    path.unlink() if isinstance(path, Path) else path.remove()


def _numbered(batches: Sequence[_Batch]) -> list[_Batch]:
    """Return the batches, with numbers for rows whose source does not number them, too."""
    unknown = {batch.source for batch in batches if not batch.is_known}
    begins: dict[int, int] = defaultdict(int)
    numbered = []
    for batch in sorted(batches, key=lambda each: each.number):  # the sort keeps the order of ranks
        if batch.source in unknown:
            begin = begins[batch.source]
            begins[batch.source] += len(batch.rows)
            batch = batch._replace(rows=range(begin, begins[batch.source]))
        numbered.append(batch)
    return numbered


def _already_in_order(batches: Sequence[_Batch]) -> dict[str, str] | None:
    """Return the file of each tensor, in the order of rows; None if rows of one tensor are not consecutive."""
    in_order = sorted(batches, key=lambda each: (each.source, each.rows[0]))
    follow = all(one.source != other.source or one.rows[-1] < other.rows[0] for one, other in pairwise(in_order))
    if not follow or any(list(b.rows) != list(range(b.first, b.first + len(b.rows))) for b in batches):
        return None
    return {f"{name}.{batch.first}": batch.file for batch in in_order for name in batch.specs}


def _split_into_files(rows: Iterable[_Row], max_bytes: int) -> list[list[_Block]]:
    """Return the blocks of each file; rows come in order."""
    files: list[list[_Block]] = []
    num_bytes = 0
    last: _Row | None = None
    for row in rows:
        num_bytes += row.batch.row_bytes
        if last is None or num_bytes > max_bytes:
            files.append([[]])
            num_bytes = row.batch.row_bytes
        elif (row.batch.source, row.number) != (
            last.batch.source,
            last.number + 1,
        ) or row.batch.specs != last.batch.specs:
            files[-1].append([])
        files[-1][-1].append(row)
        last = row
    return files


def _specs(block: _Block) -> dict[str, _RowSpec]:
    """Return shape and dtype of the tensors of a block."""
    first = block[0]
    return {
        f"{name}.{first.number}": _RowSpec((len(block), *spec.shape), spec.dtype)
        for name, spec in first.batch.specs.items()
    }


def _values(block: _Block, folder: Place, opened: Callable[[Place], SafetensorsFile]) -> Iterator[Tensor]:
    """Yield the tensors of a block from the files of ranks; one at a time is in memory."""
    places: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for target, row in enumerate(block):
        places[row.batch.file, row.batch.first].append((target, row.place))
    for name, spec in block[0].batch.specs.items():
        values = torch.empty((len(block), *spec.shape), dtype=spec.dtype)
        for (file, first), pairs in places.items():
            targets, sources = map(list, zip(*pairs, strict=True))
            values[targets] = opened(folder / file)[f"{name}.{first}"][()][sources]
        yield values
