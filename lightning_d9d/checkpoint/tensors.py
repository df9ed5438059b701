"""The tensors of a checkpoint: files of torch Distributed Checkpoint, and a checksum of every piece in them.

A piece is what one rank wrote of one tensor. Its checksum is taken of the bytes on their way into the file, and looked
at before any tensor is filled.
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
_FOREIGN = "it was changed since it was saved; give another checkpoint"

Pieces = dict[MetadataIndex, Tensor]
"""This rank's own, plain and by tensor and place."""
Checksums = dict[str, dict[int, int]]
"""CRC-32 of each piece, by file and by where it begins there."""


class PiecesToSave(DefaultSavePlanner):
    """This rank's part of tensors, but for empty shards: nothing would be read from them.

    Args:
        tensors: As `save_directory` takes them. DTensors are not asked for anything later on.

    Raises:
        StateError: One is no tensor.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                raise StateError(f"{name} is no tensor but {type(tensor).__name__}; give it among the values")
        plan = create_default_local_save_plan(dict(tensors), is_coordinator=False)
        self._own = dataclasses.replace(plan, items=[item for item in plan.items if not _is_empty_shard(item)])
        everything = dict(tensors)
        self.pieces: Pieces = {
            item.index: find_state_dict_object(everything, item.index).detach() for item in self._own.items
        }
        """What is saved."""

    @property
    def version(self) -> list[Any]:
        """Differs when tensors are others or have changed, as far as torch counts that."""
        return [(index, piece.data_ptr(), piece._version) for index, piece in self.pieces.items()]

    def create_local_plan(self) -> SavePlan:
        """What this rank could write."""
        self.plan = self._own
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """A piece."""
        return self.pieces[index]


def write_tensors(data: Path, pieces: PiecesToSave, ranks: Ranks) -> Checksums:
    """Write all ranks' pieces, replicated ones once, into an empty folder. Collective.

    Returns:
        On the first rank, all checksums.

    Raises:
        Exception: What failed on this rank; on others perhaps nothing.
    """
    writer = _Writer(data)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.save({}, storage_writer=writer, planner=pieces, process_group=ranks.group, no_dist=ranks.alone)
        except CheckpointException as error:  # torch raises it on all ranks, for the failures of some
            if ranks.rank in error.failures:
                raise error.failures[ranks.rank][0] from error
    if writer.failure is not None:
        raise writer.failure
    return writer.checksums


class TensorReader:
    """What `dcp.load` does on each rank, without asking rank 0 about it and with the metadata read already.

    Args:
        data: The folder.
        metadata: Of it, checked.
        checksums: Likewise.
    """

    def __init__(self, data: Path, metadata: Metadata, checksums: Checksums) -> None:
        self.data = data
        self.metadata = metadata
        self._checksums = checksums
        self._checked: set[tuple[str, int]] = set()

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Compare the checksums of all pieces from which these tensors would be filled.

        Raises:
            StateError: One is wrong; with its file and tensor.
        """
        _, _, plan = self._planned(tensors)
        self._check_pieces(item.storage_index for item in plan.items)

    def check_share(self, names: Iterable[str], share: slice) -> None:
        """Compare the checksums of a part of the pieces of whole tensors: with the shares of all ranks, of each once.

        Raises:
            StateError: As `check`.
        """
        self._check_pieces(self._pieces_of(names)[share])

    def trust(self, names: Iterable[str]) -> None:
        """Compare no more checksums of these tensors, as other ranks have done it."""
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
        with ThreadPoolExecutor(_NUM_READERS) as readers:  # the sums are taken without the interpreter's lock
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
                raise StateError(f"{str(file)!r} is damaged where it has {piece.fqn}: {_FOREIGN}")
            try:
                shape, dtype = saved_tensor(
                    read_saved(io.BufferedReader(_ByteRange(stream, stored.offset, stored.length)))
                )
            except StateError as error:
                raise StateError(f"{str(file)!r}, where it has {piece.fqn}, {error}: {_FOREIGN}") from error
        assert piece.index is not None
        if (shape, dtype) != (entry.chunks[piece.index].sizes, entry.properties.dtype):
            raise StateError(f"{str(file)!r} has another shape or dtype of {piece.fqn} than it should: {_FOREIGN}")


class _ByteRange(io.RawIOBase):
    """Some bytes of a file as a file."""

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
    """Torch's file system, but for links and devices."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        assert mode == "rb"
        with open_regular(Path(path)) as stream:
            yield stream


@dataclass(frozen=True)
class _Written(WriteResult):
    """What a rank tells the first one of a piece."""

    checksum: int


class _Writer(dcp.FileSystemWriter):
    """Names no path in the metadata. Keeps what fails for later: torch cannot send every exception to other ranks."""

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
    """Stands where torch has its transformations of what is written: it changes nothing, and adds up."""

    def __init__(self) -> None:
        self.streams: dict[MetadataIndex, _SummingStream] = {}

    def transform_save_stream(self, write_item: WriteItem, raw_stream: IO[bytes]) -> tuple[Any, list[str]]:
        self.streams[write_item.index] = _SummingStream(raw_stream)
        return self.streams[write_item.index], []


class _SummingStream(io.IOBase):
    """Into a file that stays open, in which other pieces follow."""

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
