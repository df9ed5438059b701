"""The `.metadata` file of torch Distributed Checkpoint: file and place of each tensor.

torch pickles it. Here it is read as records, and rebuilt only from the few kinds that belong in it. Functions import
torch's package for checkpoints, as commands that read none start faster without it.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lightning_d9d.checkpoint.pickles import Made, Name, Persistent, read_pickle
from lightning_d9d.errors import StateError
from lightning_d9d.mesh.agreement import first_of
from lightning_d9d.state.regular import open_regular

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

METADATA_NAME = ".metadata"
_OF_TORCH = "torch.distributed.checkpoint."
_DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_ENCODING = f"{_OF_TORCH}metadata._MEM_FORMAT_ENCODING"
_ALLOWED = {
    *("torch.Size", "torch.serialization._get_layout", *_DTYPES),
    *(f"{_OF_TORCH}metadata.{kind}" for kind in ("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta")),
    *(f"{_OF_TORCH}metadata.{kind}" for kind in ("TensorProperties", "TensorStorageMetadata")),
    *(_ENCODING, f"{_OF_TORCH}filesystem._StorageInfo"),
}
_MEMBER_BY_NAME = "builtins.getattr"
"""Member of an enum, as Python 3.11.2 pickles it."""
_FILE_NAME = re.compile(r"__\d{1,9}_\d{1,9}\.distcp")
_MAX_DIMS = 64
_MAX_SIZE = 2**63 // 16  # in numbers; the longest have 16 bytes
_FOREIGN = "it was not written by this package, or was changed later; give another checkpoint"


class StoredTensor(NamedTuple):
    """Shape and dtype of a whole tensor in a checkpoint."""

    shape: torch.Size
    dtype: torch.dtype


def digest(directory: Path) -> str:
    """Hash the metadata file."""
    with open_regular(directory / METADATA_NAME) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_metadata(directory: Path, expected_digest: str, share: slice = slice(None)) -> Metadata:
    """Read the metadata of a directory with torch's files, after checking that these files are there.

    Args:
        directory: Their folder.
        expected_digest: Result of `digest`.
        share: Files, in the order of their names, whose lengths are checked too. If thousands of ranks checked all
            files, the file system would be overloaded.

    Raises:
        StateError: The metadata file or another file is missing, damaged, too short, or not this package's.
    """
    file = directory / METADATA_NAME
    if directory.is_symlink():
        raise StateError(f"{str(directory)!r} is a link, which is not followed; put the folder itself there")
    try:
        with open_regular(file) as stream:
            content = stream.read()
    except FileNotFoundError as error:
        raise StateError(f"{str(file)!r} is missing: the checkpoint is incomplete; give another one") from error
    if hashlib.sha256(content).hexdigest() != expected_digest:
        raise StateError(f"{str(file)!r} is damaged, truncated or another checkpoint's; give another checkpoint")
    try:
        metadata = _read(content)
        lengths = _file_lengths(metadata)
    except StateError as error:
        raise StateError(f"{str(file)!r} {error}") from error
    except Exception as error:
        raise StateError(f"{str(file)!r} has content of another kind ({error}): {_FOREIGN}") from error
    _check_files(directory, lengths, share)
    return metadata


def stored_tensors(metadata: Metadata) -> dict[str, StoredTensor]:
    """Return shape and dtype of each tensor, by name, for metadata that `read_metadata` returned."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    return {
        name: StoredTensor(entry.size, entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _read(content: bytes) -> Metadata:
    """Read the metadata of tensors, and refuse anything else that a pickle may contain.

    Raises:
        StateError: The content is not what torch writes for tensors.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    fields = _fields(read_pickle(content, _check_name)[0], "metadata.Metadata")
    num_places, num_chunks = len(fields["storage_data"]), 0
    entries: dict[str, Any] = {}
    known: dict[Made, TensorStorageMetadata] = {}  # names may share an entry
    sizes = _Sizes()
    for name, made in fields["state_dict_metadata"].items():
        num_chunks += len(_fields(made, "metadata.TensorStorageMetadata")["chunks"])
        if num_chunks > num_places:  # entries may share a list, so there may be more of them than the file has bytes
            break
        if made not in known:
            known[made] = _entry(_text(name), made, sizes)
        entries[_text(name)] = known[made]
    if num_chunks != num_places:
        raise StateError(f"has {num_places} places for {num_chunks} pieces or more: {_FOREIGN}")
    places: dict[MetadataIndex, _StorageInfo] = {}
    for made, stored in fields["storage_data"].items():
        index, place = _fields(made, "metadata.MetadataIndex"), _fields(stored, "filesystem._StorageInfo")
        name = _text(index["fqn"])
        _require(place.get("transform_descriptors") is None, name)
        info = _StorageInfo(place["relative_path"], place["offset"], place["length"])
        _require(type(info.offset) is int and type(info.length) is int, name)
        _require(0 <= info.offset < 2**63 and 0 <= info.length < 2**63, name)
        if not _FILE_NAME.fullmatch(_text(info.relative_path)):
            raise StateError(f"names the file {info.relative_path[:80]!r}: {_FOREIGN}")
        places[MetadataIndex(name, sizes(index["offset"], name))] = info
    if len(places) != num_places:
        raise StateError(f"has one place for several pieces: {_FOREIGN}")
    return Metadata(entries, storage_data=places)


def _check_name(asked: Name | Made | Persistent) -> None:
    if type(asked) is Name and asked not in _ALLOWED and asked != _MEMBER_BY_NAME:
        raise StateError(f"names {asked[:80]}, which metadata of tensors do not need: {_FOREIGN}")
    if type(asked) is Made and asked.by == _MEMBER_BY_NAME and asked.args[:1] != (_ENCODING,):
        raise StateError(f"sets an attribute of something other than {_ENCODING}: {_FOREIGN}")


def _state(made: Any, kind: str) -> Any:
    if type(made) is not Made or made.by != _OF_TORCH + kind:
        raise StateError(f"has something else in place of a {kind.rpartition('.')[2]}: {_FOREIGN}")
    return made.state


def _fields(made: Any, kind: str) -> Mapping[str, Any]:
    state = _state(made, kind)
    if type(state) is not dict:
        raise StateError(f"has a {kind.rpartition('.')[2]} without fields: {_FOREIGN}")
    return state


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise StateError(f"has a {type(value).__name__} where a name belongs: {_FOREIGN}")
    return value


def _entry(name: str, made: Any, sizes: _Sizes) -> TensorStorageMetadata:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

    fields = _fields(made, "metadata.TensorStorageMetadata")
    dtype = _DTYPES[_text(_state(fields["properties"], "metadata.TensorProperties")[0])]
    size = sizes(fields["size"], name)
    chunks = [_fields(chunk, "metadata.ChunkStorageMetadata") for chunk in fields["chunks"]]
    boxes = [(sizes(chunk["offsets"], name), sizes(chunk["sizes"], name)) for chunk in chunks]
    _require(_fill(size, boxes), name)
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype), size, [ChunkStorageMetadata(offsets, sizes) for offsets, sizes in boxes]
    )


class _Sizes:
    """The sizes of a pickle; each is checked once, since entries share them."""

    def __init__(self) -> None:
        self._known: dict[Made, torch.Size] = {}

    def __call__(self, made: Any, name: str) -> torch.Size:
        _require(type(made) is Made, name)
        if made not in self._known:
            self._known[made] = _size(made, name)
        return self._known[made]


def _size(made: Made, name: str) -> torch.Size:
    _require(made.by == "torch.Size" and made.state is None, name)
    dims: tuple[int, ...] = made.args[0]
    _require(type(dims) is tuple and len(dims) <= _MAX_DIMS, name)
    _require({*map(type, dims)} <= {int} and min(dims, default=0) >= 0, name)
    _require(math.prod(filter(None, dims)) <= _MAX_SIZE, name)
    return torch.Size(dims)


def _fill(size: torch.Size, boxes: list[tuple[torch.Size, torch.Size]]) -> bool:
    """Return True if boxes fill a tensor without overlap: they are cells of a grid, as a mesh of ranks shards it."""
    if not boxes or any(not len(offsets) == len(sizes) == len(size) for offsets, sizes in boxes):
        return False
    if 0 in size:
        return all(math.prod(sizes) == 0 and all(map(_ends_within, offsets, sizes, size)) for offsets, sizes in boxes)
    cut = {dim for _, sizes in boxes for dim, extent in enumerate(sizes) if extent != size[dim]}
    if any(begin and dim not in cut for offsets, _ in boxes for dim, begin in enumerate(offsets)):
        return False
    num_cells = 1
    for dim in cut:
        extents = sorted({(offsets[dim], sizes[dim]) for offsets, sizes in boxes})
        ends = [0, *(begin + extent for begin, extent in extents)]
        if any(begin != end or extent == 0 for (begin, extent), end in zip(extents, ends, strict=False)):
            return False
        num_cells *= len(extents)
        if ends[-1] != size[dim] or num_cells > len(boxes):
            return False
    return num_cells == len(boxes) == len({offsets for offsets, _ in boxes})


def _ends_within(begin: int, extent: int, length: int) -> bool:
    return begin + extent <= length


def _file_lengths(metadata: Metadata) -> dict[str, int]:
    """Return the bytes that each named file must have.

    Raises:
        StateError: A piece lacks a place, has a place that is too short, or shares its place with another piece.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks:
            stored = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            _require(stored.length >= math.prod(chunk.sizes) * entry.properties.dtype.itemsize, name)
    ends: dict[str, int] = {}
    for index, stored in sorted(metadata.storage_data.items(), key=lambda item: item[1].offset):
        _require(stored.offset >= ends.get(stored.relative_path, 0), index.fqn)
        ends[stored.relative_path] = stored.offset + stored.length
    return ends


def _require(true: bool, name: str) -> None:
    if not true:
        raise StateError(f"is inconsistent at {name[:80]!r}: {_FOREIGN}")


def _check_files(directory: Path, lengths: dict[str, int], share: slice) -> None:
    with os.scandir(directory) as entries:
        found = {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}
    problems = [f"{str(directory / name)!r} is missing" for name in sorted(lengths.keys() - found)]
    for name in sorted(lengths.keys() & found)[share]:
        length = (directory / name).stat().st_size
        if length < lengths[name]:
            problems.append(f"{str(directory / name)!r} is truncated ({length} of {lengths[name]} bytes)")
    if problems:
        raise StateError(
            f"{first_of(problems)}: the path must lie on a file system that all ranks see, and the checkpoint must "
            "be complete; give another path"
        )
