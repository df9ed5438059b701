"""Directories of weights to tensors, modules to directories, and directories to directories, through a mapper."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_d9d.errors import ConfigError, StateError
from lightning_d9d.mesh.agreement import Ranks, first_of
from lightning_d9d.state.boxes import Index, LocalShard, Readable, memory_of, whole_box
from lightning_d9d.state.directory import complete_directory
from lightning_d9d.state.format import ALL_DTYPE_NAMES, DTYPE_NAMES, write_bytes
from lightning_d9d.state.mappers import Identity, Mapper
from lightning_d9d.state.places import place_of, refuse_overlap
from lightning_d9d.state.reader import SafetensorsReader
from lightning_d9d.state.shards import Checks, check_names, fill_shards
from lightning_d9d.state.threads import uncollected
from lightning_d9d.state.views import Spec, View, materialized
from lightning_d9d.state.writer import write_tensors

MAX_SHARD_BYTES = 5 * 1000**3


def read_tensors(
    path: str | Path, mapper: Mapper | None = None, *, verify: bool = True, check_finite: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a directory or a file through a mapper, each read when it is requested. Local.

    Args:
        path: A directory with `model.safetensors` or an index, or one file; also a URL that fsspec knows.
        mapper: Mapper from names in the files; tensors that it does not take are not read. None reads all, unchanged.
        verify: Whether to compare with the manifest first, if the directory has one.
        check_finite: Whether to search first for numbers that are infinite or NaN.

    Returns:
        Name and tensor, on the CPU or as a DTensor; a rank reads only its shard of a DTensor.

    Raises:
        StateError: A file is missing or damaged, or its tensors do not fit the mapper.
    """
    reader = SafetensorsReader(path)
    mapper = mapper or Identity(reader)
    views = mapper.plan(reader.specs)
    reader.verify(mapper.group_of, Checks(verify, check_finite))
    yield from materialized(views, reader)


@torch.no_grad()
@uncollected()
def load_tensors(
    target: nn.Module | Mapping[str, Tensor],
    path: str | Path,
    mapper: Mapper | None = None,
    *,
    strict: bool = True,
    verify: bool = True,
    check_finite: bool = False,
    check_first: bool = True,
    progress: bool = False,
) -> None:
    """Fill tensors in place with those of a directory or file. Collective over the default group, if there is one.

    A rank reads its own part: its slices of DTensors, for any meshes and placements. If several ranks hold the same
    part, one of them reads it and passes it on. A tensor may have several names, such as a weight in two modules or in
    their state dict. The tensor is filled under the first name that is found. Floats are cast, but not float8, which
    needs a scale. Names, shapes and dtypes are checked on all ranks before the first tensor changes on any.

    Args:
        target: A module, whose state dict is filled, or tensors by name. Ranks may have different names.
        path: The same path as for `read_tensors`, on every rank.
        mapper: Mapper from names in the files to names in the target. None: the names are the same.
        strict: If True, all of the target must be filled, and all tensors of the files must be used on some rank. If
            False, only common tensors are loaded: those whose inputs to the mapper are all in the files.
        verify: Whether to compare with the manifest, if the directory has one.
        check_finite: Whether to search for numbers that are infinite or NaN.
        check_first: Whether to check before the first tensor changes, which reads the files once more, divided over the
            ranks.
            False: check while reading. Then the tensors have some of the new values after an error.
        progress: Whether to show progress bars on the first rank.

    Raises:
        StateError: A file is missing or damaged, or names, shapes or dtypes do not fit. Every rank raises it.
    """
    ranks, failure = Ranks(), f"weights cannot be loaded from {str(path)!r}"
    held = _tensors_of(target)
    everywhere = ranks.merge(dict.fromkeys(held))
    with ranks.agreed(failure):
        reader = SafetensorsReader(path)
        chosen = mapper or Identity(reader)
        views = chosen.plan(reader.specs, strict=strict)
        if strict:
            filled = {memory_of(tensor) for name, tensor in held.items() if name in views}
            check_names(
                missing=[
                    name for name, tensor in held.items() if name not in views and memory_of(tensor) not in filled
                ],
                unexpected=[name for name in (*views, *_unused(reader, chosen)) if name not in everywhere],
                remedy="give the files of this model, a mapper, or strict=False",
            )
        local: dict[object, tuple[str, LocalShard]] = {}
        for name, tensor in held.items():
            if name in views:
                _check_fit(name, views[name], tensor)
                local.setdefault(memory_of(tensor), (name, LocalShard.of(name, tensor)))
    fill_shards(reader, views, [*local.values()], Checks(verify, check_finite, check_first), failure, progress)


@torch.no_grad()
def save_tensors(
    source: nn.Module | Mapping[str, Readable],
    directory: str | Path,
    mapper: Mapper | None = None,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    files: Mapping[str, bytes] | None = None,
    overwrite: bool = False,
    verify: bool = True,
    progress: bool = False,
    only_file: str | None = None,
) -> None:
    """Write tensors as safetensors files with a manifest, and with an index if there are several files. Collective.

    The tensors may be sharded over many ranks. All ranks write, each different files; the files are the same as from
    one process. Besides its own tensors, a rank holds at most one whole tensor of the files, and the slices that ranks
    exchange for it. From a reader, one tensor is in memory at a time.

    Args:
        source: A module, or tensors by name, with DTensors of any mesh; ranks may have different names. Or an object
            with tensors that can be read by name, such as a `SafetensorsReader`.
        directory: The target, as for `complete_directory`.
        mapper: Mapper from names of the source to names in the files. The mapper must take all names, and determines
            the order in the files. None keeps the names, sorted with numbers by value.
        dtype: Dtype of floats in the files; float8 is refused. None: unchanged.
        max_shard_bytes: Size at which a new file begins; a larger tensor gets a file of its own.
        files: Further files for the directory, by name and content; the first rank's are written.
        overwrite: Whether to replace an existing directory, with everything in it.
        verify: Whether to compare tensors of a reader with its manifest first.
        progress: Whether to show a progress bar on the first rank.
        only_file: Name of one file for all tensors, whatever their size.

    Raises:
        StateError: Tensors do not fit the mapper, the directory overlaps the one that a reader reads, or a rank cannot
            write. Every rank raises it, and nothing stays on disk.
        ConfigError: The dtype is not a float dtype of safetensors.
    """
    if dtype is not None and dtype not in DTYPE_NAMES:
        legal = ", ".join(map(str, DTYPE_NAMES))
        raise ConfigError(f"save_tensors: dtype={dtype} must be one of {legal}, or None to keep that of each tensor.")
    ranks, failure = Ranks(), f"weights cannot be saved to {str(directory)!r}"
    with ranks.agreed(failure):
        tensors = _tensors_of(source)
        local = {name: _shard(name, tensor) for name, tensor in tensors.items()}
        if isinstance(source, SafetensorsReader):
            for place in {source.path, *source.file_of.values()}:
                refuse_overlap(place, place_of(directory))
            source.verify(sorted(source)[ranks.share], Checks(verify), progress and ranks.is_first)
    specs = ranks.merge({name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()})
    with ranks.agreed(failure):
        mapper = mapper or Identity(sorted(specs, key=_number_aware))
        if lost := [name for name in specs if name not in mapper.group_of]:
            raise StateError(f"{first_of(lost)}: the mapper does not take it; add it, or use mapper.with_rest(names)")
        views = mapper.plan(specs)
        for name, view in views.items():
            if dtype is not None and view.dtype is not None and view.dtype.is_floating_point:
                _check_cast(name, view.dtype, "here", dtype, "in the files")
    with complete_directory(directory, overwrite, failure) as folder:
        write_tensors(folder, local, views, dtype, max_shard_bytes, failure, progress, only_file)
        with ranks.agreed(failure):
            for name, content in (files or {}).items() if ranks.is_first else ():
                write_bytes(folder / name, content)


def _number_aware(name: str) -> list[Any]:
    """Return a sort key that does not depend on stages and puts layer 10 after layer 2."""
    return [int(text) if i % 2 else text for i, text in enumerate(re.split(r"(\d+)", name))]


def _tensors_of(source: nn.Module | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(source, SafetensorsReader):
        return {name: _Lazy(source, name) for name in source}
    if not isinstance(source, nn.Module):
        return dict(source)
    state = source.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _shard(name: str, tensor: Any) -> LocalShard:
    if tensor.dtype not in ALL_DTYPE_NAMES:
        raise StateError(f"{name} is {tensor.dtype}, which safetensors files do not support; cast it before saving")
    if not isinstance(tensor, Tensor):
        return LocalShard(tensor, whole_box(tensor.shape))
    return LocalShard.of(name, tensor)


class _Lazy:
    """A tensor of a reader. It opens its file for each slice, so that readers keep few files open."""

    def __init__(self, reader: SafetensorsReader, name: str) -> None:
        self._reader, self._name = reader, name
        self.shape, self.dtype = reader.specs[name]

    def __getitem__(self, index: Index) -> Tensor:
        return self._reader[self._name][index]

    def copy_to(self, index: Index, target: Tensor, casts: Sequence[torch.dtype] = ()) -> None:
        self._reader[self._name].copy_to(index, target, casts)


def _unused(reader: SafetensorsReader, mapper: Mapper) -> list[str]:
    return [name for name in reader if name not in mapper.group_of]


def _check_fit(name: str, view: View, tensor: Tensor) -> None:
    if view.shape != tuple(tensor.shape):
        raise StateError(
            f"{name} has shape {list(view.shape)} in the files, but {list(tensor.shape)} here; build the model with "
            "the config with which it was saved"
        )
    if view.dtype is not None:
        _check_cast(name, view.dtype, "in the files", tensor.dtype, "here")


def _check_cast(name: str, dtype: torch.dtype, where: str, target: torch.dtype, there: str) -> None:
    if dtype == target or (dtype in DTYPE_NAMES and target in DTYPE_NAMES):
        return
    floats = dtype.is_floating_point and target.is_floating_point
    remedy = "its scales are not known, use an unquantized checkpoint" if floats else "only floats are cast"
    raise StateError(f"{name} is {dtype} {where} and {target} {there}; {remedy}")
