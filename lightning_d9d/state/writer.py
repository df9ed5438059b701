from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.errors import StateError
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.mesh.collectives import device_of_messages
from lightning_d9d.state.boxes import Box, LocalShard, MappedBox, size
from lightning_d9d.state.format import INDEX_FILE, WEIGHTS_FILE, num_bytes, write_json, write_safetensors
from lightning_d9d.state.manifest import write_manifest
from lightning_d9d.state.places import Place
from lightning_d9d.state.progress import Progress
from lightning_d9d.state.views import View


class _StoredTensor(NamedTuple):
    """A tensor of a file that will be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: Sequence[tuple[MappedBox, Mapping[Box, Sequence[int]]]]
    """Each mapped box, with the boxes that make up its source and the ranks that hold each."""

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.shape, self.dtype)


class _File(NamedTuple):
    """A file, and the rank that writes it."""

    path: Place
    tensors: Mapping[str, _StoredTensor]
    writer: int


@torch.no_grad()
def write_tensors(
    folder: Place,
    local: Mapping[str, LocalShard],
    views: Mapping[str, View],
    dtype: torch.dtype | None,
    max_file_bytes: int,
    failure: str,
    progress: bool = False,
    only_file: str | None = None,
) -> torch.dtype:
    """Write tensors of many ranks into safetensors files with a manifest, and an index if there are several files.

    Collective. The files are the same on any mesh. Ranks that hold parts of a file take turns as writers, so all of
    them write at the same time if there are enough files. Other ranks send their slices to the writer, each slice from
    one rank. All ranks process their files together, tensor by tensor. So besides its own tensors a rank holds one
    tensor of the files, the received slices of it, and the slices that it sends.

    Args:
        folder: An existing folder that all ranks can reach.
        local: This rank's sources by name, as shards or whole. Equal names are one source.
        views: Tensors to write, in the order of the files.
        dtype: Dtype of floats in the files; None keeps that of the view, or else of the source.
        max_file_bytes: Size at which a new file begins.
        failure: Beginning of a rank's error.
        progress: Whether to show a progress bar for the bytes that the first rank writes.
        only_file: Name of one file for all tensors, whatever their size.

    Returns:
        The dtype of the first tensor.

    Raises:
        StateError: A source is missing or incomplete on the ranks, or a rank cannot write. Every rank raises it.
    """
    ranks = Ranks()
    held = ranks.all_gather({name: (shard.box, shard.values.dtype) for name, shard in local.items()})
    tensors = _find_sources(views, held, dtype)
    files = _split_into_files(folder, tensors, max_file_bytes, only_file)
    # One file of each writer, then all ranks meet: none waits for longer than a file takes, or goes on after a failure.
    by_writer: dict[int, list[_File]] = defaultdict(list)
    for file in files:
        by_writer[file.writer].append(file)
    own_bytes = sum(each.num_bytes for file in by_writer.get(ranks.rank, ()) for each in file.tensors.values())
    sums: dict[str, int] = {}
    with Progress(progress and ranks.is_first, f"writing {folder}", own_bytes) as bar:
        for files_of_round in zip_longest(*by_writer.values()):
            with ranks.agreed(failure):
                sums |= _write_round([file for file in files_of_round if file], local, ranks.rank, bar)
    all_sums = {name: value for theirs in ranks.all_gather(sums) for name, value in theirs.items()}
    with ranks.agreed(failure):
        if ranks.is_first:
            if len(files) > 1:
                total = sum(tensor.num_bytes for tensor in tensors.values())
                weight_map = {name: file.path.name for file in files for name in file.tensors}
                write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
            write_manifest(folder, {name: (each.shape, each.dtype) for name, each in tensors.items()}, all_sums)
    return next(iter(tensors.values())).dtype


def _find_sources(
    views: Mapping[str, View], held: Sequence[Mapping[str, tuple[Box, torch.dtype]]], dtype: torch.dtype | None
) -> dict[str, _StoredTensor]:
    """Return all tensors of the files with the ranks that hold their parts; the same on every rank."""
    owners: dict[str, dict[Box, list[int]]] = defaultdict(dict)
    dtypes: dict[str, torch.dtype] = {}
    for rank, sources in enumerate(held):
        for name, (box, own_dtype) in sources.items():
            owners[name].setdefault(box, []).append(rank)
            dtypes.setdefault(name, own_dtype)
    used: dict[str, int] = defaultdict(int)
    for mapped in (mapped for view in views.values() for mapped in view.boxes):
        used[mapped.source] += size(mapped.box)
    tensors = {}
    for name, view in views.items():
        if any(mapped.source not in owners for mapped in view.boxes):
            raise StateError(
                f"the ranks do not hold all of {name}. Save a whole model, or all stages of one in a call on all ranks."
            )
        for source in {mapped.source for mapped in view.boxes}:
            _check_complete(source, owners[source], used[source])
        first = view.boxes[0].source
        own = view.dtype or dtypes[first]
        boxes = [(mapped, owners[mapped.source]) for mapped in view.boxes]
        tensors[name] = _StoredTensor(view.shape, dtype if dtype and own.is_floating_point else own, boxes)
    if not tensors:
        raise StateError("nothing to write; give at least one tensor.")
    return tensors


def _check_complete(name: str, owners: Iterable[Box], num_used: int) -> None:
    boxes = list(owners)
    held = sum(map(size, boxes))
    bounds = math.prod(max(held.stop for held in dim) for dim in zip(*boxes, strict=True))
    expected = max(num_used, bounds)
    if held != expected:
        raise StateError(
            f"the ranks hold {held} elements of {name} in different shards, but it has {expected}. A parameter that "
            "differs between ranks must be a DTensor over all of them."
        )


def _split_into_files(
    folder: Place, tensors: Mapping[str, _StoredTensor], max_bytes: int, only_file: str | None
) -> list[_File]:
    """Put consecutive tensors into each file."""
    contents: list[dict[str, _StoredTensor]] = []
    num_bytes = max_bytes
    for name, tensor in tensors.items():
        if not contents or (only_file is None and num_bytes + tensor.num_bytes > max_bytes):
            contents.append({})
            num_bytes = 0
        contents[-1][name] = tensor
        num_bytes += tensor.num_bytes
    num_written: dict[int, int] = defaultdict(int)
    files = []
    for number, content in enumerate(contents, 1):
        name = (
            (only_file or WEIGHTS_FILE)
            if len(contents) == 1
            else f"model-{number:05d}-of-{len(contents):05d}.safetensors"
        )
        held = _num_held(content)
        writer = min(held, key=lambda rank: (num_written[rank], -held[rank], rank))
        num_written[writer] += sum(tensor.num_bytes for tensor in content.values())
        files.append(_File(folder / name, content, writer))
    return files


def _num_held(tensors: Mapping[str, _StoredTensor]) -> dict[int, int]:
    """Count the elements that each rank holds of the sources of some tensors."""
    sources = {mapped.source: owners for tensor in tensors.values() for mapped, owners in tensor.boxes}
    held: dict[int, int] = defaultdict(int)
    for owners in sources.values():
        for box, ranks in owners.items():
            for rank in ranks:
                held[rank] += size(box)
    return held


def _write_round(
    files: Sequence[_File], local: Mapping[str, LocalShard], rank: int, progress: Progress
) -> dict[str, int]:
    """Write some files at the same time, each on another rank. Files come in the same order on all ranks.

    Returns:
        Return the checksums of what this rank has written.
    """
    own = next((file.tensors for file in files if file.writer == rank), {})
    path = next((file.path for file in files if file.writer == rank), None)
    values = _exchange_tensors(files, local, rank, progress)
    shapes = {name: tensor.shape for name, tensor in own.items()}
    dtypes = {name: tensor.dtype for name, tensor in own.items()}
    try:
        return {} if path is None else write_safetensors(path, shapes, dtypes, values)
    finally:
        for _ in values:  # others must not wait for a rank that has no file, or cannot write it
            pass


def _exchange_tensors(
    files: Sequence[_File], local: Mapping[str, LocalShard], rank: int, progress: Progress
) -> Iterator[Tensor]:
    """Yield this rank's tensors of the files, one by one, each whole and on the CPU.

    Ranks send the slices that others need for their current tensors.
    """
    for tensors in zip_longest(*(file.tensors.values() for file in files)):
        messages: list[dist.P2POp] = []
        received: list[tuple[Tensor, Tensor]] = []
        whole: Tensor | None = None
        for file, tensor in zip(files, tensors, strict=True):
            if tensor is None:
                continue
            if file.writer == rank:
                whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                _put_together(whole, tensor, local, rank, messages, received)
            else:
                messages += _sent(tensor, file.writer, local, rank)
        if messages:
            for work in dist.batch_isend_irecv(messages):
                work.wait()
        for target, message in received:
            target.copy_(message)
        if whole is not None:
            del messages, received
            yield whole
            progress.add(whole.nbytes)


def _put_together(
    whole: Tensor,
    tensor: _StoredTensor,
    local: Mapping[str, LocalShard],
    rank: int,
    messages: list[dist.P2POp],
    received: list[tuple[Tensor, Tensor]],
) -> None:
    """Fill in this rank's slices, and add the messages with slices of others and their places."""
    device = device_of_messages(dist.group.WORLD)  # the sources may be back on the CPU after a run
    for mapped, owners in tensor.boxes:
        for box, ranks in owners.items():
            if (held := _held(mapped, box)) is None:
                continue
            target = whole[held.place_index()]
            if rank in ranks:
                held.copy(local[mapped.source].values, target)
                continue
            message = target
            if device.type != "cpu" or not target.is_contiguous():
                message = torch.empty(target.shape, dtype=target.dtype, device=device)
                received.append((target, message))
            messages.append(dist.P2POp(dist.irecv, message, ranks[0]))


def _sent(tensor: _StoredTensor, writer: int, local: Mapping[str, LocalShard], rank: int) -> list[dist.P2POp]:
    """Make the messages with this rank's slices of a tensor to its writer."""
    messages = []
    for mapped, owners in tensor.boxes:
        ranks = owners.get(local[mapped.source].box, []) if mapped.source in local else []
        if ranks[:1] == [rank] and writer not in ranks and (held := _held(mapped, local[mapped.source].box)):
            values = held.take(local[mapped.source].values)
            values = values.to(device_of_messages(dist.group.WORLD), tensor.dtype).contiguous()
            messages.append(dist.P2POp(dist.isend, values, writer))
    return messages


def _held(mapped: MappedBox, box: Box) -> MappedBox | None:
    """Return the part of a mapped box that lies in a box of its source, with its place in that box."""
    within = mapped.flipped("").within(box)
    return within and within.flipped(mapped.source)
