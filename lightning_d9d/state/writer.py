from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.errors import StateError
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.mesh.collectives import device_of_messages
from lightning_d9d.state.format import INDEX_FILE, WEIGHTS_FILE, num_bytes, write_json, write_safetensors
from lightning_d9d.state.layout import Box, LocalShard, Part, size
from lightning_d9d.state.manifest import write_manifest
from lightning_d9d.state.places import Place
from lightning_d9d.state.progress import Progress
from lightning_d9d.state.views import View


class _StoredTensor(NamedTuple):
    """A tensor as a file will have it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    writer: int
    """The rank that puts it together and writes it."""
    parts: Sequence[tuple[Part, Mapping[Box, int]]]
    """Each part, the boxes that make up its source, and the rank that gives each."""

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.shape, self.dtype)


@torch.no_grad()
def write_tensors(
    folder: Place,
    local: Mapping[str, LocalShard],
    views: Mapping[str, View],
    dtype: torch.dtype | None,
    max_file_bytes: int,
    failure: str,
    progress: bool = False,
) -> torch.dtype:
    """Writes tensors that lie on many ranks into safetensors files: with a manifest, and an index if there are several.

    Collective. The first rank that holds a source of a tensor writes it; ranks send it slices, each slice by one rank.
    So the stages of a pipeline write at the same time, each by one rank. A writing rank holds one tensor of the files
    at a time besides its sources (and the slices of it that it was sent), a sending rank one slice.

    Args:
        folder: Exists, where all ranks reach it.
        local: This rank's sources by name, in shards or whole. Equal names are one source.
        views: What is written, in the order of the files.
        dtype: Of floats in the files; None keeps that of the view, or else of the source.
        max_file_bytes: Size at which a new file begins.
        failure: How an error of a rank begins.
        progress: Show a bar, of what the first rank writes.

    Returns:
        The dtype of the first tensor.

    Raises:
        StateError: On every rank: a source is on no rank or in parts, or a rank cannot write.
    """
    ranks = Ranks()
    held = ranks.all_gather({name: (shard.box, shard.values.dtype) for name, shard in local.items()})
    tensors = _find_sources(views, held, dtype)
    files = _split_into_files(tensors, max_file_bytes)
    file_names = _name_files(len(files))
    # A file of each writer, then all meet: no rank waits for longer than a file takes, nor goes on after a failure.
    by_writer: dict[int, list[tuple[str, list[str]]]] = defaultdict(list)
    for file_name, names in zip(file_names, files, strict=True):
        by_writer[tensors[names[0]].writer].append((file_name, names))
    own_bytes = sum(tensor.num_bytes for tensor in tensors.values() if tensor.writer == ranks.rank)
    sums: dict[str, int] = {}
    with Progress(progress and ranks.is_first, f"writing {folder}", own_bytes) as bar:
        for files_of_round in zip_longest(*by_writer.values()):
            with ranks.agreed(failure):
                for file_name, names in filter(None, files_of_round):
                    of_file = {name: tensors[name] for name in names}
                    sums |= _write_file(folder / file_name, of_file, local, ranks.rank, bar)
    all_sums = {name: value for theirs in ranks.all_gather(sums) for name, value in theirs.items()}
    with ranks.agreed(failure):
        if ranks.is_first:
            if len(files) > 1:
                total = sum(tensor.num_bytes for tensor in tensors.values())
                weight_map = {name: file for file, names in zip(file_names, files, strict=True) for name in names}
                write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
            write_manifest(folder, {name: (each.shape, each.dtype) for name, each in tensors.items()}, all_sums)
    return next(iter(tensors.values())).dtype


def _find_sources(
    views: Mapping[str, View], held: Sequence[Mapping[str, tuple[Box, torch.dtype]]], dtype: torch.dtype | None
) -> dict[str, _StoredTensor]:
    """All tensors of the files, from what each rank holds; the same on every rank."""
    owners: dict[str, dict[Box, int]] = defaultdict(dict)
    writers: dict[str, int] = {}
    dtypes: dict[str, torch.dtype] = {}
    for rank, sources in enumerate(held):
        for name, (box, own_dtype) in sources.items():
            owners[name].setdefault(box, rank)
            writers.setdefault(name, rank)
            dtypes.setdefault(name, own_dtype)
    used: dict[str, int] = defaultdict(int)
    for part in (part for view in views.values() for part in view.parts):
        used[part.source] += size(part.box)
    tensors = {}
    for name, view in views.items():
        if any(part.source not in owners for part in view.parts):
            raise StateError(
                f"no rank holds {name}, or not all of it; save a whole model, or all stages of one in a call on all "
                "ranks."
            )
        for source in {part.source for part in view.parts}:
            _check_complete(source, owners[source], used[source])
        first = view.parts[0].source
        own = view.dtype or dtypes[first]
        writer = min(writers[part.source] for part in view.parts)
        parts = [(part, owners[part.source]) for part in view.parts]
        tensors[name] = _StoredTensor(view.shape, dtype if dtype and own.is_floating_point else own, writer, parts)
    if not tensors:
        raise StateError("there is no tensor to write; give some.")
    return tensors


def _check_complete(name: str, owners: Mapping[Box, int], num_used: int) -> None:
    held = sum(map(size, owners))
    bounds = math.prod(max(held.stop for held in dim) for dim in zip(*owners, strict=True))
    expected = max(num_used, bounds)
    if held != expected:
        raise StateError(
            f"the ranks hold {held} elements of {name} in different shards, but it has {expected}: a parameter that "
            "differs between ranks must be a DTensor over all of them."
        )


def _split_into_files(tensors: Mapping[str, _StoredTensor], max_bytes: int) -> list[list[str]]:
    """Names of the tensors in each file: consecutive ones of the same writer."""
    files: list[list[str]] = []
    current: dict[int, list[str]] = {}
    sizes: dict[int, int] = {}
    for name, tensor in tensors.items():
        if tensor.writer not in current or sizes[tensor.writer] + tensor.num_bytes > max_bytes:
            files.append([])
            current[tensor.writer], sizes[tensor.writer] = files[-1], 0
        current[tensor.writer].append(name)
        sizes[tensor.writer] += tensor.num_bytes
    return files


def _name_files(number: int) -> list[str]:
    if number == 1:
        return [WEIGHTS_FILE]
    return [f"model-{count:05d}-of-{number:05d}.safetensors" for count in range(1, number + 1)]


def _write_file(
    path: Place, tensors: Mapping[str, _StoredTensor], local: Mapping[str, LocalShard], rank: int, progress: Progress
) -> dict[str, int]:
    """One file, whose tensors have one writer: this rank writes or sends. Files come in the same order on all ranks.

    Returns:
        The checksums of what this rank has written.
    """
    if next(iter(tensors.values())).writer != rank:
        for tensor in tensors.values():
            _send(tensor, local, rank)
        return {}

    def assemble() -> Iterator[Tensor]:
        for tensor in tensors.values():
            yield _put_together(tensor, local, rank)
            progress.add(tensor.num_bytes)

    values = assemble()
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    try:
        return write_safetensors(path, shapes, dtypes, values)
    finally:
        for _ in values:  # those who send do not wait for a rank that cannot write
            pass


def _put_together(tensor: _StoredTensor, local: Mapping[str, LocalShard], rank: int) -> Tensor:
    """The whole tensor, on the CPU, from this rank's slices and those of the others."""
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    device = device_of_messages(dist.group.WORLD)  # the sources may be on the CPU again, after a run
    for part, owners in tensor.parts:
        received: list[tuple[Tensor, Tensor, int]] = []
        for box, owner in owners.items():
            held = _held(part, box)
            if held is None:
                continue
            target = whole[held.place_index()]
            if owner == rank:
                target.copy_(held.take(local[part.source].values))
            else:
                received.append((target, torch.empty(target.shape, dtype=tensor.dtype, device=device), owner))
        _exchange([dist.P2POp(dist.irecv, message, owner) for _, message, owner in received])
        for target, message, _ in received:
            target.copy_(message)
    return whole


def _send(tensor: _StoredTensor, local: Mapping[str, LocalShard], rank: int) -> None:
    """This rank's slices of the tensor to its writer, one after the other."""
    for part, owners in tensor.parts:
        if part.source not in local or owners.get(local[part.source].box) != rank:
            continue
        held = _held(part, local[part.source].box)
        if held is not None:
            values = held.take(local[part.source].values)
            message = values.to(device_of_messages(dist.group.WORLD), tensor.dtype).contiguous()
            _exchange([dist.P2POp(dist.isend, message, tensor.writer)])


def _held(part: Part, box: Box) -> Part | None:
    """What of the part lies in a box of its source, with its place in the box."""
    within = part.flipped("").within(box)
    return within and within.flipped(part.source)


def _exchange(messages: list[dist.P2POp]) -> None:
    if messages:
        for work in dist.batch_isend_irecv(messages):
            work.wait()
