"""The files of a directory of weights (https://github.com/huggingface/safetensors#format)."""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_d9d.errors import StateError, reason
from lightning_d9d.state.layout import Index
from lightning_d9d.state.places import Place, UrlPath, flush, read_small

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ROWS_INDEX_FILE = "rows.safetensors.index.json"
"""Of files with rows in order, such as predictions."""
MANIFEST_FILE = "model.safetensors.manifest.json"
DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""Of weights."""
_OTHER_DTYPE_NAMES = {
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    **{torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
}
ALL_DTYPE_NAMES = {**DTYPE_NAMES, **_OTHER_DTYPE_NAMES}
_DTYPES = {name: dtype for dtype, name in ALL_DTYPE_NAMES.items()}
_MAX_HEADER_BYTES = 100_000_000
"""As other readers have it."""
_CHUNK_BYTES = 2**24
_MAP_FLAGS = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
"""Private: torch asks for memory that may be written to. What nobody writes is not copied, and no memory is set aside
for it, so a file may be larger than all memory."""
_AGAIN = "fetch or export it again"
_REMEDIES: dict[int | None, str] = {
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "let this user read it"),
    errno.ENOMEM: "raise the limit of memory, or export it in smaller files",
    errno.EIO: "look at the disk, or at the address, the rights and the connection",
}


@contextmanager
def reading(path: object) -> Iterator[None]:
    """Errors of the system and of the content become a `StateError` that names the file or directory."""
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        remedy = _REMEDIES.get(getattr(error, "errno", None), _AGAIN)
        raise StateError(f"{path}: cannot be read ({reason(error)}); {remedy}.") from error


class StoredTensor:
    """A tensor in a file, of which slices can be read; see `Readable`."""

    def __init__(self, file: SafetensorsFile, entry: _Entry) -> None:
        self.shape, self.dtype, self._file, self._entry = entry.shape, entry.dtype, file, entry

    def __getitem__(self, index: Index) -> Tensor:
        """A slice: memory of the file where that is mapped, which must not be written to."""
        begin, end, shape = self._entry.begin, self._entry.end, self.shape
        if isinstance(self._file.path, UrlPath) and index:  # no more than the bytes between first and last
            row, first = (end - begin) // max(shape[0], 1), index[0]
            rows = slice(first, first + 1) if isinstance(first, int) else first
            begin, end = begin + rows.start * row, begin + rows.stop * row
            shape = (rows.stop - rows.start, *shape[1:])
            index = (0 if isinstance(first, int) else slice(None), *index[1:])
        return self._file.values(begin, end, shape, self.dtype)[index]

    @property
    def num_bytes(self) -> int:
        """Of the file."""
        return self._entry.end - self._entry.begin

    def chunks(self) -> Iterator[Tensor]:
        """All of its elements, flat, some at a time; under a URL those are fetched when they are asked for."""
        for begin in range(self._entry.begin, self._entry.end, _CHUNK_BYTES):
            end = min(begin + _CHUNK_BYTES, self._entry.end)
            yield self._file.values(begin, end, (-1,), self.dtype)

    def forget(self) -> None:
        """Let the system take back the memory into which the file was mapped."""
        self._file.forget(self._entry.begin, self._entry.end)


class _Entry(NamedTuple):
    """What a header says of a tensor; offsets are those in the file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    end: int


class SafetensorsFile:
    """An open file. On a file system it is mapped into memory: the system reads what is looked at, and may forget it.

    Raises:
        StateError: It cannot be read, or its header does not fit it.
    """

    def __init__(self, path: Place) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        with reading(path):
            if isinstance(path, UrlPath):
                size = path.size()
            else:
                _check_regular(path)
                with path.open("rb") as file:
                    size = file.seek(0, 2)
                    self._map = mmap.mmap(file.fileno(), size, flags=_MAP_FLAGS) if size else None
            self.entries = self._header(size)
            """By name. Not the tensors, which hold the file: it is closed as soon as nobody else holds it."""

    def __getitem__(self, name: str) -> StoredTensor:
        return StoredTensor(self, self.entries[name])

    def content(self, begin: int, end: int) -> memoryview | bytes:
        """A range of bytes."""
        if isinstance(self.path, UrlPath):
            with reading(self.path):
                content = self.path.read_bytes(begin, end)
                if len(content) != end - begin:
                    raise ValueError("it ends too early")
            return content
        return memoryview(self._map or b"")[begin:end]

    def forget(self, begin: int, end: int) -> None:
        """A range of bytes is not looked at soon."""
        if self._map is not None and begin < end and hasattr(mmap, "MADV_DONTNEED"):
            begin -= begin % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def values(self, begin: int, end: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A range of bytes as a tensor."""
        if begin == end:
            return torch.empty(shape, dtype=dtype)
        if self._map is not None:
            flat = torch.frombuffer(self._map, dtype=dtype, offset=begin, count=(end - begin) // dtype.itemsize)
        else:
            flat = torch.frombuffer(bytearray(self.content(begin, end)), dtype=dtype)
        return flat.view(shape)

    def _header(self, size: int) -> dict[str, _Entry]:
        length = int.from_bytes(self.content(0, min(size, 8)), "little")
        start = 8 + length
        if size < 8 or start > size or length > _MAX_HEADER_BYTES:
            raise ValueError(f"its {size} bytes have no header of the {length} bytes that they promise")
        header = json.loads(bytes(self.content(8, start)).decode(), object_pairs_hook=_without_repetition)
        if not isinstance(header, dict):
            raise ValueError("its header is no table of tensors")  # noqa: TRY004
        header.pop("__metadata__", None)
        entries = {name: _entry(name, values, start) for name, values in header.items()}
        end = start
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != end or entry.end > size:
                cause = "overlaps another or leaves a gap" if entry.begin != end else "lies behind its end"
                raise ValueError(f"{name} {cause}")
            end = entry.end
        if end != size:
            raise ValueError(f"it has {size} bytes and tensors up to {end}")
        return entries


def _check_regular(path: Path) -> None:
    """Others, a pipe say, may block forever when they are opened."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("it is no regular file")


def _entry(name: str, values: Any, start: int) -> _Entry:
    try:
        shape, (begin, end), dtype = tuple(values["shape"]), values["data_offsets"], str(values["dtype"])
        numbers = [*shape, begin, end]
        if any(type(number) is not int or not 0 <= number < 2**63 for number in numbers):
            raise TypeError(f"numbers {numbers}")
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"its header does not say what {name} is") from error
    if dtype not in _DTYPES:
        raise ValueError(f"{name} is {dtype[:20]}, not one of {', '.join(_DTYPES)}")
    if end - begin != num_bytes(shape, _DTYPES[dtype]):
        raise ValueError(f"{name} has {end - begin} bytes, not those of {dtype} {list(shape)}")
    return _Entry(shape, _DTYPES[dtype], start + begin, start + end)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {next(name for name in names if names.count(name) > 1)} twice")
    return values


def write_safetensors(
    path: Place, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], values: Iterable[Tensor]
) -> dict[str, int]:
    """Writes one file, with the tensors in the order of `shapes`. Local.

    Args:
        path: of the file.
        shapes: of its tensors, by name.
        dtypes: of these and perhaps others.
        values: contiguous tensors on the CPU, in the same order; each is asked for when those before it are written.

    Returns:
        CRC-32 of each tensor.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + num_bytes(shape, dtypes[name])
        header[name] = {"dtype": ALL_DTYPE_NAMES[dtypes[name]], "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data begins at a multiple of 8 bytes
    checksums: dict[str, int] = {}
    try:
        with path.open("wb") as file:
            file.write(len(encoded).to_bytes(8, "little"))
            file.write(encoded)
            for name, tensor in zip(shapes, values, strict=True):
                content = tensor.reshape(-1).view(torch.uint8).numpy().data
                checksums[name] = zlib.crc32(content)
                file.write(content)
            flush(file)
    except OSError as error:
        at = f", at {next(reversed(checksums))}" if checksums else ""
        raise OSError(error.errno, f"{path.name}{at}: {error.strerror}") from error
    return checksums


def write_json(path: Place, values: Mapping[str, Any]) -> None:
    """Writes a file for people too. Local."""
    write_bytes(path, (json.dumps(values, indent=2) + "\n").encode())


def write_bytes(path: Place, content: bytes) -> None:
    """Writes a file. Local."""
    with path.open("wb") as file:
        file.write(content)
        flush(file)


def read_json(path: Place) -> dict[str, Any]:
    """Reads a file with one table.

    Raises:
        ValueError: It has none, or one with a name twice.
        StateError: It cannot be read.
    """
    with reading(path):
        content = read_small(path)
    try:
        values = json.loads(content.decode(), object_pairs_hook=_without_repetition)
    except RecursionError as error:
        raise ValueError("it is too deep") from error
    if not isinstance(values, dict):
        raise ValueError("it is no table")  # noqa: TRY004
    return values


def num_bytes(shape: Iterable[int], dtype: torch.dtype) -> int:
    """The size of a tensor."""
    return math.prod(shape) * dtype.itemsize
