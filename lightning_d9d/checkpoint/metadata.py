"""The `.metadata` file of torch Distributed Checkpoint: which tensor lies where in which file.

torch pickles it. Here it is read with the few classes that belong in it, so that a foreign file runs no code.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout  # type: ignore[attr-defined]

from lightning_d9d.errors import StateError
from lightning_d9d.mesh.agreement import first_of

METADATA_NAME = ".metadata"
_CLASSES = (
    *(Metadata, TensorStorageMetadata, TensorProperties, ChunkStorageMetadata, MetadataIndex),
    *(StorageMeta, _StorageInfo, _MEM_FORMAT_ENCODING, _get_layout),
)
_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    **{(value.__module__, value.__name__): value for value in _CLASSES},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}
_FILE_NAME = re.compile(r"__\d+_\d+\.distcp")
_FOREIGN = "it was not written by this package, or was changed since; give another checkpoint"


class StoredTensor(NamedTuple):
    """What a checkpoint knows of a whole tensor."""

    shape: torch.Size
    dtype: torch.dtype


def digest(directory: Path) -> str:
    """A hash of the metadata file."""
    return hashlib.sha256((directory / METADATA_NAME).read_bytes()).hexdigest()


def read_metadata(directory: Path, expected_digest: str, share: slice = slice(None)) -> Metadata:
    """The metadata of a directory with torch's files, after checking that these files are there.

    Args:
        directory: Their folder.
        expected_digest: What `digest` returned.
        share: Of which files, in order of their names, the length is looked up too: that of all of them on thousands of
            ranks would keep a file system busy.

    Raises:
        StateError: The metadata file or another one is missing, damaged, too short or not this package's.
    """
    file = directory / METADATA_NAME
    try:
        content = file.read_bytes()
    except FileNotFoundError as error:
        raise StateError(f"{str(file)!r} is missing: the checkpoint is incomplete; give another one") from error
    if hashlib.sha256(content).hexdigest() != expected_digest:
        raise StateError(f"{str(file)!r} is damaged, truncated or another checkpoint's; give another checkpoint")
    try:
        metadata = _Unpickler(io.BytesIO(content)).load()
        lengths = _file_lengths(metadata)
    except StateError as error:
        raise StateError(f"{str(file)!r} {error}") from error
    except Exception as error:
        raise StateError(f"{str(file)!r} has content of another kind ({error}): {_FOREIGN}") from error
    _check_files(directory, lengths, share)
    return metadata


def stored_tensors(metadata: Metadata) -> dict[str, StoredTensor]:
    """Name to shape and dtype, for metadata that `read_metadata` returned."""
    return {
        name: StoredTensor(entry.size, entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise StateError(f"names {module}.{name}, which no metadata of tensors need: {_FOREIGN}") from None


def _file_lengths(metadata: Metadata) -> dict[str, int]:
    """How many bytes each named file must have.

    Raises:
        StateError: Something is not as torch writes it for tensors.
    """
    lengths: dict[str, int] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise StateError(f"holds more than tensors, at {name!r}: {_FOREIGN}")
        _require(isinstance(name, str) and isinstance(entry.properties.dtype, torch.dtype), name)
        _require(sum(math.prod(chunk.sizes) for chunk in entry.chunks) == math.prod(entry.size), name)
        for chunk in entry.chunks:
            _require(len(chunk.offsets) == len(chunk.sizes) == len(entry.size), name)
            stored = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            _require(isinstance(stored, _StorageInfo) and stored.transform_descriptors is None, name)
            _require(stored.offset >= 0 and stored.length >= 0, name)
            if not _FILE_NAME.fullmatch(stored.relative_path):
                raise StateError(f"names the file {stored.relative_path!r}: {_FOREIGN}")
            end = stored.offset + stored.length
            lengths[stored.relative_path] = max(end, lengths.get(stored.relative_path, 0))
    return lengths


def _require(true: bool, name: str) -> None:
    if not true:
        raise StateError(f"is inconsistent at {name!r}: {_FOREIGN}")


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
            f"{first_of(problems)}: the path must lie on a file system that all ranks see, and a checkpoint is copied "
            "whole; give another path"
        )
