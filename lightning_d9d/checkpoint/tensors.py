"""The tensors of a checkpoint: files of torch Distributed Checkpoint, and a checksum of every piece in them.

A piece is the part of one tensor that one rank wrote. Its checksum is computed while its bytes are written, and
compared before any tensor is filled.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.futures import Future

from lightning_d9d.checkpoint.torch_files import read_saved, saved_tensor
from lightning_d9d.errors import StateError
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.state.regular import open_regular

_BLOCK_BYTES = 2**22
_NUM_READERS = 4
_FOREIGN = "it was changed after it was saved; give another checkpoint"

Pieces = dict[MetadataIndex, Tensor]
"""This rank's pieces as plain tensors, by tensor and place."""
Checksums = dict[str, dict[int, int]]
"""CRC-32 of each piece, by file and by the place where it begins there."""


class PiecesToSave(DefaultSavePlanner):
    """A plan to save this rank's part of tensors, without empty shards, because nothing would be read from them.

    Args:
        tensors: Tensors, as for `save_directory`. DTensors are not used after the constructor.

    Raises:
        StateError: A value is not a tensor.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                raise StateError(f"{name} is not a tensor but {type(tensor).__name__}; give it among the values")
        plan = create_default_local_save_plan(dict(tensors), is_coordinator=False)
        self._own = dataclasses.replace(plan, items=[item for item in plan.items if not _is_empty_shard(item)])
        everything = dict(tensors)
        self.pieces: Pieces = {
            item.index: find_state_dict_object(everything, item.index).detach() for item in self._own.items
        }
        """The pieces to save."""

    @property
    def version(self) -> list[Any]:
        """A value that changes if the tensors are replaced, or have changed in a way that torch counts."""
        return [(index, piece.data_ptr(), piece._version) for index, piece in self.pieces.items()]

    def create_local_plan(self) -> SavePlan:
        """Plan all pieces that this rank could write."""
        self.plan = self._own
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return a piece."""
        return self.pieces[index]


def write_tensors(data: Path, pieces: PiecesToSave, ranks: Ranks) -> Checksums:
    """Write all ranks' pieces, replicated ones once, into an empty folder. Collective.

    Returns:
        All checksums, on the first rank.

    Raises:
        Exception: The error of this rank; other ranks may have none.
    """
    writer = _Writer(data)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.save({}, storage_writer=writer, planner=pieces, process_group=ranks.group, no_dist=ranks.alone)
        except CheckpointException as error:  # torch raises it on all ranks if some failed
            if ranks.rank in error.failures:
                raise error.failures[ranks.rank][0] from error
    if writer.failure is not None:
        raise writer.failure
    return writer.checksums


class TensorReader:
    """A reader that fills tensors like `dcp.load`, without asking rank 0, and with metadata that was read before.

    Args:
        data: The folder.
        metadata: The checked metadata of the directory.
        checksums: The checked checksums of the directory.
    """

    def __init__(self, data: Path, metadata: Metadata, checksums: Checksums) -> None:
        self.data = data
        self.metadata = metadata
        self._checksums = checksums
        self._checked: set[tuple[str, int]] = set()

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Compare the checksums of all pieces from which these tensors would be filled.

        Raises:
            StateError: A checksum is wrong. The message has file and tensor.
        """
        _, _, plan = self._planned(tensors)
        self._check_pieces(item.storage_index for item in plan.items)

    def check_share(self, names: Iterable[str], share: slice) -> None:
        """Compare the checksums of this rank's share of the pieces of whole tensors.

        All shares together have each piece once.

        Raises:
            StateError: A checksum is wrong. The message has file and tensor.
        """
        self._check_pieces(self._pieces_of(names)[share])

    def trust(self, names: Iterable[str]) -> None:
        """Skip further checks of these tensors, because other ranks have made them."""
        self._checked |= {_place(self.metadata.storage_data[piece]) for piece in self._pieces_of(names)}

    def _pieces_of(self, names: Iterable[str]) -> list[MetadataIndex]:
        return [
            MetadataIndex(name, chunk.offsets, number)
            for name in names
            for number, chunk in enumerate(self._entry(name).chunks)
        ]

    def _entry(self, name: str) -> TensorStorageMetadata:
        entry = self.metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        return entry

    def _check_pieces(self, pieces: Iterable[MetadataIndex]) -> None:
        places = {_place(self.metadata.storage_data[piece]): piece for piece in pieces}
        left = [piece for place, piece in sorted(places.items(), key=itemgetter(0)) if place not in self._checked]
        with ThreadPoolExecutor(_NUM_READERS) as readers:  # checksums are computed without the interpreter's lock
            for _ in readers.map(self._check_piece, left):
                pass
        self._checked |= places.keys()

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite tensors in place."""
        planner, reader, plan = self._planned(tensors)
        try:
            reader.read_data(planner.finish_plan(plan), planner).wait()
        except OSError:
            raise
        except Exception as error:
            raise StateError(f"a file in {str(self.data)!r} is damaged ({error}); give another checkpoint") from error

    def _planned(self, tensors: Mapping[str, Tensor]) -> tuple[DefaultLoadPlanner, dcp.FileSystemReader, LoadPlan]:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False, allow_partial_load=True)
        planner.set_up_planner(dict(tensors), self.metadata)
        reader = dcp.FileSystemReader(self.data)
        reader.fs = _RegularFiles()
        reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        return planner, reader, reader.prepare_local_plan(planner.create_local_plan())

    def _check_piece(self, piece: MetadataIndex) -> None:
        entry, stored = self._entry(piece.fqn), self.metadata.storage_data[piece]
        file, expected = (
            self.data / stored.relative_path,
            self._checksums.get(stored.relative_path, {}).get(stored.offset),
        )
        checksum, left = 0, stored.length
        with open_regular(file) as stream:
            stream.seek(stored.offset)
            while left > 0 and (block := stream.read(min(left, _BLOCK_BYTES))):
                checksum, left = zlib.crc32(block, checksum), left - len(block)
            if left or checksum != expected:
                raise StateError(f"{str(file)!r} is damaged at the place of {piece.fqn}: {_FOREIGN}")
            try:
                shape, dtype = saved_tensor(
                    read_saved(io.BufferedReader(_ByteRange(stream, stored.offset, stored.length)))
                )
            except StateError as error:
                raise StateError(f"{str(file)!r}, where it has {piece.fqn}, {error}: {_FOREIGN}") from error
        assert piece.index is not None
        if (shape, dtype) != (entry.chunks[piece.index].sizes, entry.properties.dtype):
            raise StateError(f"{str(file)!r} has {piece.fqn} in another shape or dtype than the metadata: {_FOREIGN}")


class _ByteRange(io.RawIOBase):
    """A range of a file's bytes as a file."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._at = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._begin + self._at)
        read = self._file.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(read)] = read
        self._at += len(read)
        return len(read)


class _RegularFiles(FileSystem):
    """Torch's file system, but it refuses links and devices."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        assert mode == "rb"
        with open_regular(Path(path)) as stream:
            yield stream


@dataclass(frozen=True)
class _Written(WriteResult):
    """The result of a written piece, which a rank sends to the first rank."""

    checksum: int


class _Writer(dcp.FileSystemWriter):
    """A writer without a path in the metadata.

    It keeps exceptions, because torch cannot send all of them to other ranks.
    """

    failure: Exception | None = None

    def __init__(self, data: Path) -> None:
        super().__init__(data)
        self.transforms = self._sums = _Sums()  # type: ignore[assignment]
        self.checksums: Checksums = {}

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        with self._keeping():
            return super().prepare_local_plan(plan)
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written: list[WriteResult] = []
        with self._keeping():
            results = super().write_data(plan, planner).value()
            written = [_Written(**vars(each), checksum=self._sums.streams[each.index].checksum) for each in results]
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with self._keeping():
            super().finish(metadata, results)
            for each in chain.from_iterable(results):
                assert isinstance(each, _Written)
                self.checksums.setdefault(each.storage_data.relative_path, {})[each.storage_data.offset] = each.checksum

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failure = self.failure or error


class _Sums:
    """A transformation of the written stream, as torch defines it: it changes nothing, and computes checksums."""

    def __init__(self) -> None:
        self.streams: dict[MetadataIndex, _SummingStream] = {}

    def transform_save_stream(self, write_item: WriteItem, raw_stream: IO[bytes]) -> tuple[Any, list[str]]:
        self.streams[write_item.index] = _SummingStream(raw_stream)
        return self.streams[write_item.index], []


class _SummingStream(io.IOBase):
    """A stream into a file that stays open, because other pieces follow."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.checksum = 0

    def write(self, data: Any) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self.flush()


def _place(stored: Any) -> tuple[str, int]:
    return stored.relative_path, stored.offset


def _is_empty_shard(item: WriteItem) -> bool:
    data = item.tensor_data
    return data is not None and math.prod(data.chunk.sizes) == 0 < math.prod(data.size)
