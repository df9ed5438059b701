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
    """The tensors of a directory or a file, mapped, one after the other; each is read when it is asked for. Local.

    Args:
        path: A directory with `model.safetensors` or an index, or one file; also a URL that fsspec knows.
        mapper: From names in the files; those that it does not take are not read. None: all, as they are.
        verify: Compare with the manifest first, if the directory has one.
        check_finite: Look first for numbers that are infinite or NaN.

    Returns:
        Name and tensor, on the CPU or as a DTensor, of which a rank reads what it will hold.

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
    """Fills tensors in place with those of a directory or file. Collective over the default group where there is one.

    A rank reads what it holds: of DTensors its own slices, whatever their meshes and placements. What several ranks
    hold alike one of them reads, and passes on. What has several names, such as a weight in two modules, or in the
    state dict of those, is filled under the first that is there. Floats are cast, but not float8, which needs a scale.
    Names, shapes and dtypes are checked on all ranks before the first tensor changes on any.

    Args:
        target: A module, whose state dict is filled, or tensors by name. Ranks may have different names.
        path: As in `read_tensors`, on every rank.
        mapper: From names in the files to names in the target. None: they are the same.
        strict: All of the target must be filled, and all that is in the files must be used on some rank. Otherwise what
            both have: tensors of which all is in the files that the mapper makes them of.
        verify: Compare with the manifest, if the directory has one.
        check_finite: Look for numbers that are infinite or NaN.
        check_first: Do so before the first tensor changes, which reads the files once more, divided over the ranks.
            False: while they are read. After an error the tensors have some of the new values.
        progress: Show bars on the first rank.

    Raises:
        StateError: On every rank: a file is missing or damaged, or names, shapes or dtypes do not fit.
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
    """Writes tensors as safetensors files with a manifest, and an index if they are several. Collective, as loading.

    Tensors may lie on many ranks, which all write, each other files than the rest: the files are the same as from one
    process. No rank holds more than one whole tensor of the files besides its own, and the slices of it and of others
    that ranks send to each other meanwhile. From a reader, one tensor is in memory at a time.

    Args:
        source: A module or tensors by name, with DTensors of any mesh; ranks may have different names. Or what can be
            read by name, such as a `SafetensorsReader`.
        directory: As for `complete_directory`.
        mapper: From names of the source, all of which it must take, to names in the files, which come in its order.
            None: they are the same, sorted with numbers by value.
        dtype: Of floats in the files; float8 is refused. None: as they are.
        max_shard_bytes: Size at which a new file begins; a larger tensor gets a file of its own.
        files: What else the directory gets, name and content; the first rank's.
        overwrite: Replace an existing directory, with everything in it.
        verify: Compare what a reader reads with its manifest first.
        progress: Show a bar on the first rank.
        only_file: Name of one file for all tensors, whatever their size.

    Raises:
        StateError: On every rank: tensors do not fit the mapper, the directory is where a reader reads, or a rank
            cannot write. Nothing is left then.
        ConfigError: A dtype that is no float's of safetensors.
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
    """For an order that no stages have a say in, in which layer 10 comes behind layer 2."""
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
        raise StateError(f"{name} is {tensor.dtype}, which safetensors files do not have; cast it before")
    if not isinstance(tensor, Tensor):
        return LocalShard(tensor, whole_box(tensor.shape))
    return LocalShard.of(name, tensor)


class _Lazy:
    """A tensor of a reader's, whose file is opened for each slice: readers keep few files open."""

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
            f"{name} has shape {list(view.shape)} in the files and {list(tensor.shape)} here; build the model as it was"
        )
    if view.dtype is not None:
        _check_cast(name, view.dtype, "in the files", tensor.dtype, "here")


def _check_cast(name: str, dtype: torch.dtype, where: str, target: torch.dtype, there: str) -> None:
    if dtype == target or (dtype in DTYPE_NAMES and target in DTYPE_NAMES):
        return
    floats = dtype.is_floating_point and target.is_floating_point
    remedy = "their scales are not known, use an unquantized checkpoint" if floats else "only floats are cast"
    raise StateError(f"{name} is {dtype} {where} and {target} {there}; {remedy}")
