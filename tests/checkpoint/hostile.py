"""Checkpoints forged byte by byte, with all hashes and checksums as they should be."""

from __future__ import annotations

import hashlib
import io
import pickle
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_d9d.checkpoint import save_directory
from lightning_d9d.errors import StateError

NAME = "torch.distributed.checkpoint.metadata"


def save(path: Path, values: dict[str, Any] | None = None, **more: torch.Tensor) -> Path:
    """Two tensors or more in one file, and values."""
    save_directory(path, {"a": torch.arange(12.0).view(3, 4), "b": torch.arange(5), **more}, values or {"number": 1})
    return path


def metadata_file(path: Path) -> Path:
    (file,) = path.glob("data-*/.metadata")
    return file


def data_file(path: Path) -> Path:
    (file,) = path.glob("data-*/__0_0.distcp")
    return file


def forge_metadata(path: Path, content: bytes) -> None:
    metadata_file(path).write_bytes(content)
    forge_values(path, metadata=hashlib.sha256(content).hexdigest())


def change_metadata(path: Path, change: Callable[[Any], object]) -> None:
    metadata = pickle.loads(metadata_file(path).read_bytes())
    change(metadata)
    forge_metadata(path, pickle.dumps(metadata))


def forge_values(path: Path, **changes: Any) -> None:
    torch.save({**torch.load(path / "values.pt", weights_only=True), **changes}, path / "values.pt")


def forge_piece(path: Path, name: str, piece: bytes) -> None:
    """Other content of a tensor's piece, at the end of the file."""
    file = data_file(path)
    begin = file.stat().st_size
    file.write_bytes(file.read_bytes() + piece)

    def change(metadata: Any) -> None:
        (stored,) = (stored for index, stored in metadata.storage_data.items() if index.fqn == name)
        stored.offset, stored.length = begin, len(piece)

    change_metadata(path, change)
    sums = torch.load(path / "values.pt", weights_only=True)["checksums"]
    sums[file.name][begin] = zlib.crc32(piece)
    forge_values(path, checksums=sums)


def saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def packed_again(
    archive: bytes,
    pickled: Callable[[bytes], bytes] = lambda content: content,
    compression: int = zipfile.ZIP_STORED,
    more: dict[str, bytes] | None = None,
) -> bytes:
    """The parts of an archive in a new one, with other parts and another pickle."""
    buffer = io.BytesIO()
    with (
        warnings.catch_warnings(),
        zipfile.ZipFile(io.BytesIO(archive)) as old,
        zipfile.ZipFile(buffer, "w", compression) as new,
    ):
        warnings.simplefilter("ignore")  # of parts of one name
        for name, content in (more or {}).items():
            new.writestr(name, content)
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, pickled(content) if name.endswith("/data.pkl") else content)
    return buffer.getvalue()


def text(value: str) -> bytes:
    """How a pickle has it."""
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def problem(read: Callable[[], object]) -> str:
    """The text of the `StateError` that something raises."""
    try:
        read()
    except StateError as error:
        return str(error)
    return "nothing was raised"
