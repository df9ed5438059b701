from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.errors import StateError
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.mesh.collectives import device_of_messages
from lightning_d9d.state.format import INDEX_FILE, WEIGHTS_FILE, num_bytes, write_json, write_safetensors
from lightning_d9d.state.layout import Box, LocalShard, Piece, tensor_shapes


class _Source(NamedTuple):
    """Where the values of a piece come from."""

    parameter: str
    piece: Piece
    owners: Mapping[Box, int]
    """The boxes that make up the parameter, and the rank that gives each."""


class _StoredTensor(NamedTuple):
    """A tensor as a file will have it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    writer: int
    """The rank that puts it together and writes it."""
    sources: Sequence[_Source]


@torch.no_grad()
def write_tensors(
    folder: Path,
    local: Mapping[str, LocalShard],
    layout: Mapping[str, Sequence[Piece]],
    dtype: torch.dtype | None,
    max_file_bytes: int,
    failure: str,
) -> torch.dtype:
    """Writes parameters that lie on many ranks into safetensors files, and the index if there are several. Collective.

    The first rank that holds a parameter writes it; ranks send it slices, each slice by one rank. So the stages of a
    pipeline write at the same time, each by one rank. A writing rank holds one tensor of the files at a time besides
    its parameters (and the slices of it that it was sent), a sending rank one slice.

    Args:
        folder: Exists, on a file system that all ranks share.
        local: This rank's parameters by name, in shards or whole. Equal names are one parameter.
        layout: The pieces of all parameters of the model, in the order of the files. Where two parameters have the same
            place in a tensor, the first that a rank holds is written.
        dtype: Of the files; None keeps each parameter's own.
        max_file_bytes: Size at which a new file begins.
        failure: How an error of a rank begins.

    Returns:
        The dtype of the first tensor.

    Raises:
        StateError: On every rank: a parameter is on no rank or in parts, or a rank cannot write.
    """
    ranks = Ranks()
    held = ranks.all_gather({name: (shard.box, dtype or shard.values.dtype) for name, shard in local.items()})
    tensors = _find_sources(layout, held)
    files = _split_into_files(tensors, max_file_bytes)
    file_names = _name_files(len(files))
    # A file of each writer, then all meet: no rank waits for longer than a file takes, nor goes on after a failure.
    by_writer: dict[int, list[tuple[str, list[str]]]] = defaultdict(list)
    for file_name, names in zip(file_names, files, strict=True):
        by_writer[tensors[names[0]].writer].append((file_name, names))
    for files_of_round in zip_longest(*by_writer.values()):
        with ranks.agreed(failure):
            for file_name, names in filter(None, files_of_round):
                _write_file(folder / file_name, {name: tensors[name] for name in names}, local, ranks.rank)
    with ranks.agreed(failure):
        if ranks.is_first and len(files) > 1:
            total = sum(num_bytes(tensor.shape, tensor.dtype) for tensor in tensors.values())
            weight_map = {name: file for file, names in zip(file_names, files, strict=True) for name in names}
            write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return next(iter(tensors.values())).dtype


def _find_sources(
    layout: Mapping[str, Sequence[Piece]], held: Sequence[Mapping[str, tuple[Box, torch.dtype]]]
) -> dict[str, _StoredTensor]:
    """All tensors of the files, from what each rank holds; the same on every rank."""
    owners: dict[str, dict[Box, int]] = defaultdict(dict)
    writers: dict[str, int] = {}
    dtypes: dict[str, torch.dtype] = {}
    for rank, parameters in enumerate(held):
        for name, (box, dtype) in parameters.items():
            owners[name].setdefault(box, rank)
            writers.setdefault(name, rank)
            dtypes.setdefault(name, dtype)
    found: dict[str, dict[Box, _Source]] = defaultdict(dict)  # by tensor, then by the place in it
    for name in (name for name in layout if name in owners):
        _check_complete(name, owners[name], layout[name])
        for piece in layout[name]:
            found[piece.tensor].setdefault(piece.place, _Source(name, piece, owners[name]))
    tensors = {}
    for tensor, shape in tensor_shapes(piece for pieces in layout.values() for piece in pieces).items():
        sources = list(found[tensor].values())
        if sum(_size(source.piece.place) for source in sources) != math.prod(shape):
            raise StateError(
                f"no rank holds {tensor}, or not all of it; save a whole model, or all stages of one in a call on all "
                "ranks."
            )
        first = sources[0].parameter
        tensors[tensor] = _StoredTensor(shape, dtypes[first], writers[first], sources)
    return tensors


def _check_complete(name: str, owners: Mapping[Box, int], pieces: Sequence[Piece]) -> None:
    held, expected = sum(map(_size, owners)), sum(_size(piece.box) for piece in pieces)
    if held != expected:
        raise StateError(
            f"the ranks hold {held} elements of {name} in different shards, but it has {expected}: a parameter that "
            "differs between ranks must be a DTensor over all of them."
        )


def _size(box: Box) -> int:
    return math.prod(map(len, box))


def _split_into_files(tensors: Mapping[str, _StoredTensor], max_bytes: int) -> list[list[str]]:
    """Names of the tensors in each file: consecutive ones of the same writer."""
    files: list[list[str]] = []
    current: dict[int, list[str]] = {}
    sizes: dict[int, int] = {}
    for name, tensor in tensors.items():
        size = num_bytes(tensor.shape, tensor.dtype)
        if tensor.writer not in current or sizes[tensor.writer] + size > max_bytes:
            files.append([])
            current[tensor.writer], sizes[tensor.writer] = files[-1], 0
        current[tensor.writer].append(name)
        sizes[tensor.writer] += size
    return files


def _name_files(number: int) -> list[str]:
    if number == 1:
        return [WEIGHTS_FILE]
    return [f"model-{count:05d}-of-{number:05d}.safetensors" for count in range(1, number + 1)]


def _write_file(path: Path, tensors: Mapping[str, _StoredTensor], local: Mapping[str, LocalShard], rank: int) -> None:
    """One file, whose tensors have one writer: this rank writes or sends. Files come in the same order on all ranks."""
    if next(iter(tensors.values())).writer != rank:
        for tensor in tensors.values():
            _send(tensor, local, rank)
        return
    values = (_put_together(tensor, local, rank) for tensor in tensors.values())
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    try:
        write_safetensors(path, shapes, dtypes, values)
    finally:
        for _ in values:  # those who send do not wait for a rank that cannot write
            pass


def _put_together(tensor: _StoredTensor, local: Mapping[str, LocalShard], rank: int) -> Tensor:
    """The whole tensor, on the CPU, from this rank's slices and those of the others."""
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    device = device_of_messages(dist.group.WORLD)  # the parameters may be on the CPU again, after a run
    for name, piece, owners in tensor.sources:
        received: list[tuple[Tensor, Tensor, int]] = []
        for box, owner in owners.items():
            overlap = piece.overlap(box)
            if overlap is None:
                continue
            in_box, in_tensor = overlap
            target = whole[in_tensor]
            if owner == rank:
                target.copy_(local[name].values[in_box])
            else:
                received.append((target, torch.empty(target.shape, dtype=tensor.dtype, device=device), owner))
        _exchange([dist.P2POp(dist.irecv, message, owner) for _, message, owner in received])
        for target, message, _ in received:
            target.copy_(message)
    return whole


def _send(tensor: _StoredTensor, local: Mapping[str, LocalShard], rank: int) -> None:
    """This rank's slices of the tensor to its writer, one after the other."""
    for name, piece, owners in tensor.sources:
        if name not in local or owners.get(local[name].box) != rank:
            continue
        overlap = piece.overlap(local[name].box)
        if overlap is not None:
            message = local[name].values[overlap[0]].to(device_of_messages(dist.group.WORLD), tensor.dtype).contiguous()
            _exchange([dist.P2POp(dist.isend, message, tensor.writer)])


def _exchange(messages: list[dist.P2POp]) -> None:
    if messages:
        for work in dist.batch_isend_irecv(messages):
            work.wait()
