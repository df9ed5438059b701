"""Token files that other programs write and read: Megatron's `.bin` with `.idx`, nanoGPT's `.bin`, llm.c's `.bin`.

All are mapped into memory: a file may be larger than the memory, which holds only the pages that are read.
"""

from __future__ import annotations

import mmap
import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lightning_d9d.errors import ConfigError, reason

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
"""Fields of Megatron's index: magic, version, code of the dtype, number of sequences, number of document borders."""
_DTYPES: dict[int, type[np.generic]] = {
    **{1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32},
    **{5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16},
}
_LLMC_HEADER_BYTES = 256 * 4
_LLMC_DTYPES: dict[tuple[int, int], type[np.generic]] = {(20240520, 1): np.uint16, (20240801, 7): np.uint32}
"""Dtypes by magic number and version: files for GPT-2's tokenizer and for Llama 3's."""
_CHUNK = 1 << 22
"""Numbers of an index that are checked together."""


@dataclass(frozen=True)
class BorderToken:
    """The token that separates documents in a file without borders.

    Args:
        token: The id of the token.
        is_first: Whether it begins a document instead of ending one.
    """

    token: int
    is_first: bool


class TokenFile:
    """Tokens of one file, one after the other, and the places at which documents begin.

    Copies in other processes map the file again.

    Args:
        path: A `.bin` file. If an `.idx` file lies beside it, both have Megatron's format. A path without suffix, or
            that of the `.idx`, names both.
        border: Token that separates documents in a file that does not store their borders. None: the file has no
            borders.

    Raises:
        ConfigError: The file is missing, truncated, of another format, or has no tokens of an integer type. Or `border`
            was given for a file with its own borders.
    """

    def __init__(self, path: str | Path, border: BorderToken | None = None) -> None:
        self.path = bin_path(path)
        self.border = border
        self._index: _Index | None = None
        offset, num_tokens = 0, None
        dtype: type[np.generic] = np.uint16
        if self.path.with_suffix(".idx").is_file():
            self._index = _Index(self.path.with_suffix(".idx"))
            dtype, num_tokens = self._index.dtype, self._index.num_tokens
        elif (found := _llmc_header(self.path)) is not None:
            dtype, offset, num_tokens = found
        self._check_size(np.dtype(dtype).itemsize, offset, num_tokens)
        if self._index is not None and border is not None:
            raise ConfigError(
                f"{self.path} has borders of documents in its .idx, so the border token {border.token} has no effect; "
                "leave it out"
            )
        self._tokens = _Tokens(self.path, np.dtype(dtype), offset)

    def _check_size(self, itemsize: int, offset: int, num_tokens: int | None) -> None:
        size = _size(self.path) - offset
        if num_tokens is None and size % itemsize:
            raise ConfigError(
                f"{self.path} has {size} bytes, which is not a whole number of 2-byte tokens: it is truncated"
            )
        if num_tokens is not None and size != num_tokens * itemsize:
            problem = "truncated" if size < num_tokens * itemsize else "longer than its index or header says"
            raise ConfigError(
                f"{self.path} has {size} bytes of tokens, but its index or header declares {num_tokens} tokens of "
                f"{itemsize} bytes each. The file is {problem}; copy or prepare it again"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenFile, (self.path, self.border)

    def __len__(self) -> int:
        """Return the number of tokens in the file."""
        return len(self._tokens)

    @property
    def has_borders(self) -> bool:
        """True if the beginnings of documents are known."""
        return self._index is not None or self.border is not None

    def read(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return a copy of tokens `start` to `stop`, int64; fewer at the end of the file."""
        return self._tokens[start:stop].astype(np.int64)

    def document_starts(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return the places from `start` to before `stop` at which a document begins, in ascending order, int64."""
        if self._index is not None:
            return self._index.starts(start, stop)
        if self.border is None:
            return np.zeros(int(start <= 0 < stop), dtype=np.int64)
        shift = 0 if self.border.is_first else 1
        first = max(0, start - shift)
        found = np.flatnonzero(self._tokens[first : max(first, stop - shift)] == self.border.token) + first + shift
        return np.unique(np.concatenate([np.zeros(int(start <= 0 < stop), dtype=np.int64), found]))

    def next_document(self, place: int) -> int:
        """Return the first place from `place` on at which a document begins; the file's end if there is none."""
        if not self.has_borders:
            return place
        while place < len(self):
            found = self.document_starts(place, min(place + _CHUNK, len(self)))
            if len(found):
                return int(found[0])
            place += _CHUNK
        return len(self)

    def document_lengths(self) -> Iterator[np.ndarray[Any, Any]]:
        """Yield the lengths of all documents, many at a time; nothing if only a token marks where they begin."""
        if self._index is not None:
            yield from self._index.document_lengths()


class _Tokens:
    """The tokens of a file, mapped into memory; the system reads only the pages that are needed.

    Rows are read in random order. Otherwise the system would read some megabytes beside each of them for nothing.

    Args:
        path: The file.
        dtype: The dtype of a token.
        offset: The byte at which tokens begin.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], offset: int) -> None:
        self._itemsize, self._offset = dtype.itemsize, offset
        self._count = (_size(path) - offset) // dtype.itemsize
        if self._count:  # nothing else can be mapped
            with path.open("rb") as file:
                self._pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._advise("MADV_RANDOM", 0, len(self._pages))
        content = self._pages if self._count else b""
        offset = offset if self._count else 0
        self._numbers = np.frombuffer(content, dtype.newbyteorder("<"), self._count, offset)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, places: slice) -> np.ndarray[Any, Any]:
        """Return tokens without a copy; the system reads their pages at once instead of one by one."""
        start, stop, _ = places.indices(self._count)
        begin, end = (self._offset + place * self._itemsize for place in (start, stop))
        begin -= begin % mmap.PAGESIZE
        if end - begin > mmap.PAGESIZE:
            self._advise("MADV_WILLNEED", begin, end - begin)
        return self._numbers[start:stop]

    def _advise(self, name: str, begin: int, length: int) -> None:
        if hasattr(mmap, name):  # not on Windows
            self._pages.madvise(getattr(mmap, name), begin, length)


class _Index:
    """Megatron's `.idx`: sizes and places of sequences, and which of them begin documents.

    Args:
        path: The file.

    Raises:
        ConfigError: The file is truncated, of another format, or its sequences leave gaps in the `.bin`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        size = _size(path)
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise ConfigError(f"{path} does not begin with {_MAGIC!r}, as Megatron's index files do; prepare it again")
        _, version, code, num_sequences, num_borders = _HEADER.unpack(header)
        if version != _VERSION or code not in _DTYPES:
            raise ConfigError(
                f"{path} has version {version} and dtype code {code}; version {_VERSION} and codes 1 to 8 are supported"
            )
        if np.dtype(_DTYPES[code]).kind == "f":
            raise ConfigError(f"{path} has numbers of type {_DTYPES[code].__name__}, but tokens are integers")
        needed = _HEADER.size + 12 * num_sequences + 8 * num_borders
        if size not in (needed, needed + num_sequences):  # with modes of sequences, for several modalities
            raise ConfigError(
                f"{path} has {size} bytes, but {num_sequences} sequences and {num_borders} borders of documents take "
                f"{needed}: it is truncated or damaged; copy or prepare it again"
            )
        self.dtype = _DTYPES[code]
        self._itemsize = np.dtype(self.dtype).itemsize
        self._num_sequences = num_sequences
        self._sizes = _mapped(path, np.int32, _HEADER.size, num_sequences)
        self._pointers = _mapped(path, np.int64, _HEADER.size + 4 * num_sequences, num_sequences)
        self._documents = _mapped(path, np.int64, _HEADER.size + 12 * num_sequences, num_borders)
        self._check()
        self.num_tokens = self._start_of(num_sequences)

    def _check(self) -> None:
        """Check that sequences follow each other without gaps, and that documents consist of them."""
        expected = 0
        for first in range(0, self._num_sequences, _CHUNK):
            sizes = self._sizes[first : first + _CHUNK].astype(np.int64) * self._itemsize
            ends = expected + np.cumsum(sizes)
            is_wrong = (self._pointers[first : first + _CHUNK] != ends - sizes) | (sizes < 0)
            if is_wrong.any():
                raise ConfigError(
                    f"{self.path}: sequence {first + int(is_wrong.argmax())} does not begin where the one before it "
                    "ends, or has a negative size; prepare the files again"
                )
            expected = int(ends[-1])
        documents = self._documents
        if len(documents) == 0 or documents[0] != 0 or documents[-1] != self._num_sequences:
            raise ConfigError(
                f"{self.path}: the documents do not cover sequences 0 to {self._num_sequences}; prepare it again"
            )
        for first in range(0, len(documents), _CHUNK):
            if (np.diff(documents[first : first + _CHUNK + 1]) < 0).any():
                raise ConfigError(f"{self.path}: the borders of documents are not ascending; prepare it again")

    def _start_of(self, sequence: Any) -> Any:
        """Return the place of a sequence's first token; for the index after the last, the number of all tokens."""
        if self._num_sequences == 0:
            return 0 * sequence
        inside = np.minimum(sequence, self._num_sequences - 1)
        end = np.where(sequence == self._num_sequences, self._sizes[inside].astype(np.int64), 0)
        result = self._pointers[inside] // self._itemsize + end
        return result if np.ndim(result) else int(result)

    def _start_of_document(self, document: int) -> int:
        sequence = self._documents[document]
        return self.num_tokens if sequence == self._num_sequences else int(self._pointers[sequence]) // self._itemsize

    def starts(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        documents = range(len(self._documents) - 1)
        first = bisect_left(documents, start, key=self._start_of_document)
        last = bisect_left(documents, stop, lo=first, key=self._start_of_document)
        return np.unique(self._start_of(self._documents[first:last]))  # empty documents begin where the next one does

    def document_lengths(self) -> Iterator[np.ndarray[Any, Any]]:
        for first in range(0, len(self._documents) - 1, _CHUNK):
            yield np.diff(self._start_of(self._documents[first : first + _CHUNK + 1]))


def bin_path(path: str | Path) -> Path:
    """Return the `.bin` file that a path names: itself, the `.bin` beside an `.idx`, or a path without suffix."""
    path = Path(path).expanduser()
    if path.suffix == ".idx":
        return path.with_suffix(".bin")
    if path.suffix == ".bin" or path.is_file():
        return path
    return path.with_name(path.name + ".bin")


def smallest_dtype(num_ids: int) -> type[np.generic]:
    """Return the dtype of tokens in a new file with ids below `num_ids`: two bytes if they fit, else four."""
    return np.uint16 if num_ids <= 1 << 16 else np.int32


class TokenFileWriter:
    """Writes `.bin` and `.idx` of Megatron's format, a document at a time, each of one sequence.

    Neither file has its final name before `finish`: until then both end with `.part`.

    Args:
        path: As for `TokenFile`. Missing folders are made.
        dtype: NumPy dtype of the tokens in the file, an integer one.
    """

    def __init__(self, path: str | Path, dtype: type[np.generic] = np.uint16) -> None:
        self.path = bin_path(path)
        self.num_tokens = 0
        self.longest = 0
        self._dtype = np.dtype(dtype)
        self._code = next((code for code, known in _DTYPES.items() if known is dtype), None)
        if self._code is None or self._dtype.kind == "f":
            raise ConfigError(f"dtype={dtype} of a token file must be an integer type of 1, 2, 4 or 8 bytes")
        self._lengths: list[np.ndarray[Any, Any]] = []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = self._part(self.path).open("wb")

    @property
    def num_documents(self) -> int:
        """Number of documents so far."""
        return sum(map(len, self._lengths))

    def add(self, documents: Iterable[Any]) -> None:
        """Write documents, each a list or array of ids.

        Raises:
            ConfigError: An id does not fit the dtype of the file, or a document has more than 2**31 - 1 tokens.
        """
        documents = list(documents)
        lengths = np.array([len(each) for each in documents], dtype=np.int64)
        ids = np.fromiter(chain.from_iterable(documents), dtype=np.int64, count=int(lengths.sum()))
        self.add_joined(ids, lengths)

    def add_joined(self, ids: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> None:
        """Write documents that follow each other in `ids`, `[num_ids]`; errors are those of `add`."""
        largest = int(np.iinfo(self._dtype.type).max)  # type: ignore[arg-type]
        if len(ids) and (ids.min() < 0 or ids.max() > largest):
            raise ConfigError(f"{self.path}: ids must be 0 to {largest}, but go from {ids.min()} to {ids.max()}")
        if len(lengths) and lengths.max() > np.iinfo(np.int32).max:
            raise ConfigError(
                f"{self.path}: a document has {lengths.max()} tokens; the format supports up to 2**31 - 1"
            )
        self._file.write(ids.astype(self._dtype).tobytes())
        self._lengths.append(lengths)
        self.num_tokens += len(ids)
        self.longest = max(self.longest, int(lengths.max(initial=0)))

    def finish(self) -> None:
        """Write the index, and give both files their names."""
        self._file.close()
        lengths = np.concatenate([np.zeros(0, dtype=np.int64), *self._lengths])
        index = self.path.with_suffix(".idx")
        with self._part(index).open("wb") as file:
            file.write(_HEADER.pack(_MAGIC, _VERSION, self._code, len(lengths), len(lengths) + 1))
            file.write(lengths.astype(np.int32).tobytes())
            file.write(((np.cumsum(lengths) - lengths) * self._dtype.itemsize).tobytes())
            file.write(np.arange(len(lengths) + 1, dtype=np.int64).tobytes())
        self.path.unlink(missing_ok=True)  # one of the two files alone is an error for whoever reads it
        self._part(index).replace(index)
        self._part(self.path).replace(self.path)

    def discard(self) -> None:
        """Remove the files, unless they are finished."""
        self._file.close()
        for path in (self.path, self.path.with_suffix(".idx")):
            self._part(path).unlink(missing_ok=True)

    @staticmethod
    def _part(path: Path) -> Path:
        return path.with_name(path.name + ".part")


def _llmc_header(path: Path) -> tuple[type[np.generic], int, int] | None:
    """Return dtype, offset and number of tokens of a file with llm.c's header; None for one without a header."""
    try:
        with path.open("rb") as file:
            header = np.frombuffer(file.read(_LLMC_HEADER_BYTES), dtype=np.uint8)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {reason(error)}; give a .bin file of tokens") from error
    if len(header) < _LLMC_HEADER_BYTES:
        return None
    magic, version, num_tokens = header.view("<i4")[:3].tolist()
    dtype = _LLMC_DTYPES.get((magic, version))
    return None if dtype is None else (dtype, _LLMC_HEADER_BYTES, num_tokens)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {reason(error)}; give a .bin file of tokens") from error


def _mapped(path: Path, dtype: Any, offset: int, count: int) -> np.ndarray[Any, Any]:
    """Map numbers of a file; an empty part cannot be mapped."""
    if count == 0:
        return np.zeros(0, dtype=dtype)
    little = np.dtype(dtype).newbyteorder("<")
    mapped = np.memmap(path, dtype=little, mode="r", offset=offset, shape=(count,))
    return mapped.view(np.ndarray)  # whose items are read faster
