"""The files of a directory of weights (https://github.com/huggingface/safetensors#format)."""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Semaphore
from typing import IO, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_d9d.errors import StateError, printable, reason
from lightning_d9d.state.boxes import Index
from lightning_d9d.state.places import Place, UrlPath, flush, read_small
from lightning_d9d.state.regular import open_regular

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ROWS_INDEX_FILE = "rows.safetensors.index.json"
"""The index of files with rows in order, such as predictions."""
MANIFEST_FILE = "model.safetensors.manifest.json"
DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""Names of the dtypes of weights."""
_OTHER_DTYPE_NAMES = {
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    **{torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
}
ALL_DTYPE_NAMES = {**DTYPE_NAMES, **_OTHER_DTYPE_NAMES}
_DTYPES = {name: dtype for dtype, name in ALL_DTYPE_NAMES.items()}
_MAX_HEADER_BYTES = 100_000_000
"""The limit of other readers."""
_MAX_DIMS = 64
"""More dims than any tensor has; torch does not support more."""
_CHUNK_BYTES = 2**24
_PIECE_BYTES = 2**21
"""Size of a piece, small enough to stay in the processor's cache until it is copied."""
MOST_READS = 8
_reads = Semaphore(MOST_READS)
"""Limits concurrent reads, because more do not make a disk faster."""
_AGAIN = "fetch or export it again"
_REMEDIES: dict[int | None, str] = {
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "give this user permission to read it"),
    errno.ENOMEM: "raise the limit of memory, or export it in smaller files",
    errno.EIO: "check the disk, or the address, the rights and the connection",
}


@contextmanager
def reading(path: object) -> Iterator[None]:
    """Convert errors of the system and of the content to a `StateError` that names the file or directory."""
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        remedy = _REMEDIES.get(getattr(error, "errno", None), _AGAIN)
        raise StateError(f"{path}: cannot be read ({reason(error)}); {remedy}.") from error


class StoredTensor:
    """A tensor in a file whose slices can be read; a `Readable`."""

    def __init__(self, file: SafetensorsFile, entry: _Entry) -> None:
        self.shape, self.dtype, self._file, self._entry = entry.shape, entry.dtype, file, entry

    def __getitem__(self, index: Index) -> Tensor:
        """Return a slice, in new memory. It reads the bytes from the slice's first number to its last."""
        return self._read(self._picked(index))

    def copy_to(
        self,
        index: Index,
        target: Tensor,
        casts: Sequence[torch.dtype] = (),
        see: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Copy a slice, cast to some dtypes one after the other, into a tensor of its shape.

        Bytes that need no change are read directly into the target. Others are read in pieces: new memory for all would
        take several times as long, because the system must clear it first. Under a URL they are read all at once,
        because a request takes long.

        Args:
            index: The slice.
            target: Target tensor.
            casts: Dtypes.
            see: Receives the numbers as stored in the file, flat, piece by piece; for a slice also the numbers between.
        """
        picked, is_url = self._picked(index), isinstance(self._file.path, UrlPath)
        is_same = target.is_cpu and {target.dtype, *casts} == {self.dtype}
        is_straight = is_same and not is_url and target.is_contiguous() and picked.is_contiguous()
        if not picked.dim():
            picked, target = picked[None], target[None]
        row_bytes = max(1, int(picked.stride(0)) * self.dtype.itemsize)
        num_rows = max(1, len(picked) if is_url else _PIECE_BYTES // row_bytes)
        no_room = is_url or is_straight
        room = None if no_room else torch.empty(_span(picked[:num_rows]), dtype=torch.uint8, device="cpu")
        for begin in range(0, len(picked), num_rows):
            rows, part = picked[begin : begin + num_rows], target[begin : begin + num_rows]
            if is_straight:
                self._read(rows, part.detach().view(-1).view(torch.uint8), see)
                continue
            values = self._read(rows, room, see)
            for dtype in casts:
                values = values.to(dtype)
            part.copy_(values)

    def _picked(self, index: Index) -> Tensor:
        """Return the slice without its values."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")[index]

    def _read(self, picked: Tensor, room: Tensor | None = None, see: Callable[[Tensor], None] | None = None) -> Tensor:
        begin = self._entry.begin + int(picked.storage_offset()) * self.dtype.itemsize
        values = self._file.values(begin, begin + _span(picked), self.dtype, room)
        if see is not None:
            see(values)
        return values.as_strided(picked.shape, picked.stride())

    @property
    def num_bytes(self) -> int:
        """The size in the file."""
        return self._entry.end - self._entry.begin

    def chunks(self) -> Iterator[Tensor]:
        """Yield all elements, flat, in chunks; a chunk is valid until the next one is requested."""
        is_url = isinstance(self._file.path, UrlPath)
        length = _CHUNK_BYTES if is_url else _PIECE_BYTES
        room = None if is_url else torch.empty(min(length, self.num_bytes), dtype=torch.uint8, device="cpu")
        for begin in range(self._entry.begin, self._entry.end, length):
            yield self._file.values(begin, min(begin + length, self._entry.end), self.dtype, room)


def _span(picked: Tensor) -> int:
    """Return the number of bytes from the first number of a slice to its last."""
    if not picked.numel():
        return 0
    last = sum((length - 1) * stride for length, stride in zip(picked.shape, picked.stride(), strict=True))
    return (last + 1) * picked.dtype.itemsize


class _Entry(NamedTuple):
    """The entry of a header for a tensor; offsets are those in the file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    end: int


class SafetensorsFile:
    """An open file, whose header the `safetensors` package has checked.

    Slices are read here, not by the package. The package does not read URLs. It maps local files into memory and
    refuses one larger than the memory (measured: 200 GB, with 23 GB of memory). Its single thread takes 1.1 to 1.25
    times as long as the two here (measured from a disk). If a file is truncated meanwhile, it ends the process without
    a message.

    Raises:
        StateError: The file cannot be read, or its header does not fit it.
    """

    def __init__(self, path: Place) -> None:
        self.path = path
        with reading(path):
            if isinstance(path, UrlPath):
                size = path.size()
            else:
                file = open_regular(path, follow_links=True)  # `check_link` has checked where links lead
                weakref.finalize(self, file.close)
                self._descriptor = file.fileno()
                size = os.fstat(self._descriptor).st_size
            self.entries = self._header(size)
            """Entries by name. Tensors hold the file, so they are not kept here: it is closed as soon as nobody else
            holds it."""

    def __getitem__(self, name: str) -> StoredTensor:
        return StoredTensor(self, self.entries[name])

    def values(self, begin: int, end: int, dtype: torch.dtype, room: Tensor | None = None) -> Tensor:
        """Read a range of bytes as a flat tensor, in new memory or in `room`.

        Raises:
            StateError: The bytes cannot be read, or the file was truncated meanwhile.
        """
        with reading(self.path):
            return self._bytes(begin, end, room).view(dtype)

    def _bytes(self, begin: int, end: int, room: Tensor | None = None) -> Tensor:
        """Read a range of bytes, of type uint8."""
        if begin == end:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        if isinstance(self.path, UrlPath):
            fetched = bytearray(self.path.read_bytes(begin, end))
            if len(fetched) != end - begin:
                raise ValueError("it ends too early")
            return torch.frombuffer(fetched, dtype=torch.uint8)
        content = torch.empty(end - begin, dtype=torch.uint8, device="cpu") if room is None else room[: end - begin]
        left = content.numpy().data
        with _reads:
            while left:
                if not (num_read := os.preadv(self._descriptor, [left], end - len(left))):
                    raise ValueError("it ends too early")
                left = left[num_read:]
        return content

    def _header(self, size: int) -> dict[str, _Entry]:
        if size < 8:
            raise ValueError(f"its {size} bytes are too few for a header")
        first = self._bytes(0, 8).numpy().tobytes()
        start = 8 + int.from_bytes(first, "little")
        if start > size or start > _MAX_HEADER_BYTES:
            raise ValueError(
                f"its {size} bytes cannot have the announced header of {start - 8} bytes; the limit is "
                f"{_MAX_HEADER_BYTES}"
            )
        text = self._bytes(8, start).numpy().tobytes()
        _check_by_package(first + text, size)
        header = json.loads(text.decode(), object_pairs_hook=_without_repetition)
        header.pop("__metadata__", None)
        return {name: _entry(name, values, start) for name, values in header.items()}


def _check_by_package(header: bytes, size: int) -> None:
    """Check a header with the package, in a file of the same size with a hole instead of the tensors.

    So one parser checks files under URLs too, and nothing can change between the check and the use.

    Raises:
        ValueError: The header is not that of a safetensors file.
    """
    with _scratch_file() as file:
        file.write(header)
        file.truncate(size)
        file.flush()
        try:
            with safe_open(f"/dev/fd/{file.fileno()}", framework="numpy"):
                pass
        except SafetensorError as error:
            raise ValueError(printable(str(error))) from None  # a traceback would show the cause unescaped


def _scratch_file() -> IO[bytes]:
    """Open an empty file that vanishes when it is closed; in memory if the system supports it."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("header"), "w+b")
    return tempfile.TemporaryFile()


def _entry(name: str, values: Mapping[str, Any], start: int) -> _Entry:
    """Make an entry of a header. The package has checked it, except for limits of torch."""
    shape, (begin, end), dtype = tuple(values["shape"]), values["data_offsets"], values["dtype"]
    if dtype not in _DTYPES:
        raise ValueError(printable(f"{name} is {dtype}, not one of {', '.join(_DTYPES)}"))
    if len(shape) > _MAX_DIMS or math.prod(max(length, 1) for length in shape) >= 2**63:
        text = f"{name} has {len(shape)} dims, {list(shape[:4])} first; at most {_MAX_DIMS} are read"
        raise ValueError(printable(text))
    return _Entry(shape, _DTYPES[dtype], start + begin, start + end)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(printable(f"it has {next(name for name, count in counts.items() if count > 1)} twice"))
    return values


def write_safetensors(
    path: Place, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], values: Iterable[Tensor]
) -> dict[str, int]:
    """Write one file, with the tensors in the order of `shapes`. Local.

    The `safetensors` package is as fast, but needs all tensors at once, in its own order. The ranks of a mesh have one
    tensor at a time. Checksums would also need a second pass: 1 GiB took 7.0 s instead of 4.5 s.

    Args:
        path: Path of the file.
        shapes: Shapes of its tensors, by name.
        dtypes: Dtypes of these tensors; it may contain others.
        values: Contiguous tensors on the CPU, in the same order; each is requested when the earlier ones are written.

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
    """Write a readable JSON file. Local."""
    write_bytes(path, (json.dumps(values, indent=2) + "\n").encode())


def write_bytes(path: Place, content: bytes) -> None:
    """Write a file. Local."""
    with path.open("wb") as file:
        file.write(content)
        flush(file)


def read_json(path: Place) -> dict[str, Any]:
    """Read a JSON file with one table.

    Raises:
        ValueError: The file does not have a table, or has a name twice.
        StateError: The file cannot be read.
    """
    with reading(path):
        content = read_small(path)
    try:
        values = json.loads(content.decode(), object_pairs_hook=_without_repetition)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(values, dict):
        raise ValueError("it is not a table")  # noqa: TRY004
    return values


def num_bytes(shape: Iterable[int], dtype: torch.dtype) -> int:
    """Return the size of a tensor in bytes."""
    return math.prod(shape) * dtype.itemsize
