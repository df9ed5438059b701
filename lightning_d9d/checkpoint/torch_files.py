"""Files of `torch.save`, checked before torch loads them with `weights_only=True`.

Then torch does not run their code. It would still inflate compressed parts and allocate memory for sizes that a file
merely claims. It would read beyond the stored numbers, and would let a saved device mesh join a process group.
"""

from __future__ import annotations

import math
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import torch

from lightning_d9d.checkpoint.pickles import Made, Name, Persistent, check_containers, check_key, read_pickle
from lightning_d9d.errors import StateError

_BEGIN, _END, _END_64, _LOCATOR_64 = (b"PK" + code for code in (b"\3\4", b"\5\6", b"\6\6", b"\6\7"))
_END_BYTES, _LOCATOR_BYTES, _END_64_BYTES, _HEADER_BYTES = 22, 20, 56, 30
_NUM_PICKLES_OF_OLD_FILES = 5
_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "QInt8Storage": torch.qint8,
    "QInt32Storage": torch.qint32,
    "QUInt8Storage": torch.quint8,
    "QUInt4x2Storage": torch.quint4x2,
    "QUInt2x4Storage": torch.quint2x4,
    "UntypedStorage": torch.uint8,
}
_PLAIN = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_LATIN = ("latin1", "latin-1")
_COPIES_TEXT = ("builtins.bytearray", "_codecs.encode")
_TAKES_MEMORY = re.compile(r"torch\.(\w+\.)*\w*(Tensor|Storage)")
_MAKES_TENSORS = re.compile(r"torch\.(_utils|_tensor|nn\.parameter)\.\w+")
_FOREIGN = "torch.save does not write this"


def read_saved(file: BinaryIO, *, old_format: bool = False) -> Any:
    """Return the content that torch would load from a file, as records, after checking that loading is safe.

    Args:
        file: The whole file, seekable.
        old_format: If True, it may be a file of torch 1.5 or earlier, which is not an archive.

    Raises:
        StateError: The file is damaged or foreign, or loading it would do more than read its values.
    """
    if is_archive(file):
        return _read_archive(file)
    if not old_format:
        raise StateError("is not an archive that torch.save has written")
    return _read_old(file)


def is_archive(file: BinaryIO) -> bool:
    """Return True if torch takes a file for an archive."""
    file.seek(0)
    return file.read(len(_BEGIN)) == _BEGIN


def saved_tensor(saved: Any) -> tuple[torch.Size, torch.dtype]:
    """Return the shape and dtype of the one plain tensor that a file holds.

    Args:
        saved: Result of `read_saved`.

    Raises:
        StateError: The file does not hold exactly one plain tensor.
    """
    if type(saved) is not Made or saved.by not in _PLAIN:
        raise StateError("does not hold a single tensor")
    storage, _, size, _, *rest = saved.args
    return torch.Size(size), _named_dtype(rest[2]) if saved.by == _PLAIN[1] else _dtype(storage)


def check_archive(file: BinaryIO) -> dict[str, int]:
    """Compare an archive with those that torch writes: consecutive parts, stored uncompressed.

    Returns:
        The length of each part by its name.

    Raises:
        StateError: The archive differs from those, or is damaged.
    """
    length = file.seek(0, 2)
    file.seek(max(0, length - _END_64_BYTES - _LOCATOR_BYTES - _END_BYTES))
    tail = file.read()
    is_long = tail[-_END_BYTES - _LOCATOR_BYTES :].startswith(_LOCATOR_64)
    try:
        if is_long:
            directory_length, begin = struct.unpack_from("<QQ", tail, 40)
            end = length - len(tail)
            is_whole = tail.startswith(_END_64) and struct.unpack_from("<Q", tail, _END_64_BYTES + 8)[0] == end
        else:
            directory_length, begin = struct.unpack_from("<II", tail, len(tail) - 10)
            end, is_whole = length - _END_BYTES, True
        with zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
    except Exception as error:
        raise StateError(f"is damaged or not an archive ({error})") from error
    if not (is_whole and tail[-_END_BYTES:].startswith(_END) and tail.endswith(b"\0\0")):
        raise StateError(f"is an archive with bytes after its end: {_FOREIGN}")
    if begin + directory_length != end:
        raise StateError(f"is an archive with bytes before its beginning: {_FOREIGN}")
    at = 0
    for part in sorted(parts, key=lambda part: part.header_offset):
        if part.compress_type != zipfile.ZIP_STORED or part.compress_size != part.file_size:
            raise StateError(f"has a compressed part {part.filename[:80]!r}: {_FOREIGN}")
        if part.header_offset < at:
            raise StateError(f"has parts that overlap, {part.filename[:80]!r} among them: {_FOREIGN}")
        at = part.header_offset + _HEADER_BYTES + len(part.orig_filename) + part.file_size
    names = {part.orig_filename.lower() for part in parts}  # torch looks for a name in any case
    if at > begin or len(names) != len(parts) or len({name.partition("/")[0] for name in names}) != 1:
        raise StateError(f"has parts of one name, or of several folders: {_FOREIGN}")
    return {part.orig_filename: part.file_size for part in parts}


def _read_archive(file: BinaryIO) -> Any:
    lengths = check_archive(file)
    folder = next(iter(lengths)).partition("/")[0]
    try:
        with zipfile.ZipFile(file) as archive:
            content = archive.read(f"{folder}/data.pkl")
    except Exception as error:
        raise StateError(f"lacks a whole part data.pkl ({error})") from error
    return _read(content, lambda key, length: lengths.get(f"{folder}/data/{key}") == length)[0]


def _read_old(file: BinaryIO) -> Any:
    file.seek(0)
    content, at, values = file.read(), 0, list[Any]()
    for _ in range(_NUM_PICKLES_OF_OLD_FILES):
        value, at = _read(content, lambda _, length: length <= len(content), at)
        values.append(value)
    return values[3]


def _read(content: bytes, has: Callable[[str, int], bool], start: int = 0) -> tuple[Any, int]:
    """Read a pickle that stores the numbers of its tensors elsewhere.

    Args:
        content: Buffer that holds the pickle.
        has: Function that returns True if the key has at least that many bytes.
        start: The place at which the pickle begins.
    """
    num_given = 0

    def check(asked: Name | Made | Persistent) -> None:
        nonlocal num_given
        if isinstance(asked, Persistent):
            _check_storage(asked, has)
        elif isinstance(asked, Made):
            for num in _given(asked):
                num_given += num
                if num_given > len(content):
                    raise StateError(f"gives the same values to several calls, {asked.by} among them: {_FOREIGN}")
            _check_call(asked.by, asked.args)
            if asked.state is not None and _MAKES_TENSORS.fullmatch(asked.by):
                raise StateError(f"changes what {asked.by} has made: {_FOREIGN}")
        elif asked.startswith("torch.distributed"):
            raise StateError(f"names {asked}, which could join a process group on loading; save plain tensors")

    value, end = read_pickle(content, check, start)
    check_containers(value, len(content))
    return value, end


def _given(made: Made) -> Iterator[int]:
    """Count the values in the arguments of a call, or in the state of its result, which the call may copy.

    Each value takes at least a byte in a pickle that gives no value twice.
    """
    yield from _lengths(made.args if made.state is None else (made.state,), made.by in _COPIES_TEXT, 3)


def _lengths(values: tuple[Any, ...], counts_text: bool, depth: int) -> Iterator[int]:
    yield len(values)
    for value in values:
        if type(value) is tuple and depth > 0:
            yield from _lengths(value, counts_text, depth - 1)
        elif type(value) in (tuple, list, dict) or (counts_text and type(value) in (str, bytes)):
            yield len(value)


def _check_storage(found: Persistent, has: Callable[[str, int], bool]) -> None:
    _, kind, key, _, num = found.id[:5]
    if found.id[0] != "storage" or type(kind) is not Name or type(key) is not str or type(num) is not int:
        raise StateError(f"refers to stored data that is not a tensor: {_FOREIGN}")
    if num < 0 or not has(key, num * _dtype(found).itemsize):
        raise StateError(f"does not have the {num} numbers that tensor {key[:80]!r} claims; it is damaged")


def _dtype(found: Persistent) -> torch.dtype:
    return _DTYPES[found.id[1].rpartition(".")[2]]


def _check_call(by: Name, args: tuple[Any, ...]) -> None:
    known = _CALLS.get(by)
    if not known(*args) if known else _TAKES_MEMORY.fullmatch(by):
        raise StateError(f"calls {by} in a way that torch.save does not")


def _lies_within(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> bool:
    """Return True if a tensor lies within its storage; torch would enlarge the storage, with arbitrary numbers."""
    if type(storage) is not Persistent or not (type(size) is type(stride) is tuple and len(size) == len(stride)):
        return False
    if any(type(number) is not int or not 0 <= number < 2**63 for number in (offset, *size, *stride)):
        return False
    dtype = _named_dtype(rest[2]) if len(rest) > 2 else _dtype(storage)  # as _rebuild_tensor_v3 does
    num = storage.id[4] * _dtype(storage).itemsize // dtype.itemsize
    return 0 in size or offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) < num


def _named_dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None) if type(name) is Name else None
    if not isinstance(dtype, torch.dtype):
        raise StateError(f"has a tensor of an unknown dtype: {_FOREIGN}")
    return dtype


def _is_quantized(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> bool:
    return _lies_within(storage, offset, size, stride) and math.prod(size) <= storage.id[4]


def _is_of_type(by: Any, _: Any, args: Any, state: Any) -> bool:
    if type(by) is not Name or not _MAKES_TENSORS.fullmatch(by):
        return False
    _check_call(by, args)
    return True


def _is_parameter(tensor: Any, *_: Any) -> bool:
    return type(tensor) is Made and _MAKES_TENSORS.fullmatch(tensor.by) is not None


def _is_set(members: Any = ()) -> bool:
    for member in members:
        check_key(member)
    return True


_CALLS: dict[str, Callable[..., bool]] = {
    "torch._utils._rebuild_tensor": _lies_within,
    _PLAIN[0]: lambda storage, offset, size, stride, *_: _lies_within(storage, offset, size, stride),
    _PLAIN[1]: _lies_within,
    "torch._utils._rebuild_qtensor": _is_quantized,
    "torch._tensor._rebuild_from_type_v2": _is_of_type,
    "torch._utils._rebuild_parameter": _is_parameter,
    "torch._utils._rebuild_parameter_with_state": _is_parameter,
    "builtins.set": _is_set,
    "builtins.bytearray": lambda *args: (
        all(type(arg) is not int for arg in args) and (len(args) < 2 or args[1] in _LATIN)
    ),
    "_codecs.encode": lambda _, encoding: encoding in _LATIN,
    "collections.OrderedDict": lambda *args: not args,
    "collections.Counter": lambda *args: all(type(arg) is dict for arg in args),
}
