"""Reads this rank's shards of tensors from files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.errors import StateError
from lightning_d9d.mesh.agreement import Ranks, first_of
from lightning_d9d.mesh.collectives import device_of_messages
from lightning_d9d.startup import start_part
from lightning_d9d.state.boxes import Box, LocalShard, MappedBox, size
from lightning_d9d.state.reader import NO_CHECKS, Checks, SafetensorsReader
from lightning_d9d.state.views import View


class _Copies(NamedTuple):
    """Ranks that hold the same part of a tensor in one dtype: the first reads it, and each passes it on."""

    name: str
    box: Box
    dtype: torch.dtype
    line: tuple[int, ...]


def check_names(missing: Collection[str], unexpected: Collection[str], remedy: str) -> None:
    """Raise a `StateError` that names missing and unexpected tensors of files.

    Args:
        missing: Tensors that the files lack.
        unexpected: Tensors that they have in addition.
        remedy: Remedy, as the end of a sentence.
    """
    texts = [
        f"{len(names)} {kind} in the files: {first_of(sorted(names))}"
        for kind, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    if texts:
        raise StateError(f"{'. '.join(texts)}; {remedy}")


@start_part("weights from files")
@torch.no_grad()
def fill_shards(
    reader: SafetensorsReader,
    views: Mapping[str, View],
    local: Sequence[tuple[str, LocalShard]],
    checks: Checks,
    failure: str,
    progress: bool = False,
) -> None:
    """Overwrite the shards that this rank holds with values of the files. Collective; all files were checked before.

    If several ranks hold the same part, one of them reads it. Different parts have different readers, so that ranks
    read at the same time. Then the values are passed from rank to rank. Besides the tensors, one message of a part is
    in memory.

    Args:
        reader: Reader of the same files on all ranks.
        views: All tensors, as views of the tensors in the files.
        local: Names and shards that this rank holds; a name may occur more than once.
        checks: Checks, divided over the ranks. While reading, a rank checks tensors that it reads whole; the rest is
            read once more.
        failure: Beginning of a rank's error.
        progress: Whether to show progress bars for the bytes that the first rank reads.

    Raises:
        StateError: A check failed. Every rank raises it. Nothing has changed if checks come first.
    """
    ranks = Ranks()
    shown = progress and ranks.is_first
    checking = checks.checksums or checks.finite
    own = {mapped.source for name, _ in local for mapped in views[name].boxes} if checking else set()
    sources = ranks.merge(dict.fromkeys(own)) if checking else {}
    copies = _find_copies(local, ranks)
    received = {(each.name, each.box, each.dtype) for each in copies if each.line[0] != ranks.rank}
    targets = _targets(views, [(n, s) for n, s in local if (n, s.box, s.values.dtype) not in received])
    if checking and checks.first:
        with ranks.agreed(failure):
            reader.verify(sorted(sources)[ranks.share], checks, shown)
    with ranks.agreed(failure):
        reader.fill(targets, shown, NO_CHECKS if checks.first else checks)
    if checking and not checks.first:
        seen = ranks.merge(dict.fromkeys(reader.names_of_whole(targets)))
        with ranks.agreed(failure):
            reader.verify(sorted(sources.keys() - seen.keys())[ranks.share], checks, shown)
    values_of: dict[tuple[str, Box, torch.dtype], list[Tensor]] = defaultdict(list)
    for name, shard in local:
        values_of[name, shard.box, shard.values.dtype].append(shard.values)
    for name, box, dtype, line in copies:
        if ranks.rank in line:
            _pass_on(values_of[name, box, dtype], line, ranks.rank)


def _find_copies(local: Sequence[tuple[str, LocalShard]], ranks: Ranks) -> list[_Copies]:
    """Return parts that several ranks hold, in the same order on all; ranks read about the same number of bytes."""
    ours = list(dict.fromkeys((name, shard.box, shard.values.dtype) for name, shard in local))
    holders: dict[tuple[str, Box, torch.dtype], list[int]] = defaultdict(list)
    for rank, theirs in enumerate(ranks.all_gather(ours)):
        for each in theirs:
            holders[each].append(rank)
    num_read: dict[int, int] = defaultdict(int)
    copies = []
    for (name, box, dtype), line in holders.items():
        first = min(line, key=lambda rank: num_read[rank])
        num_read[first] += size(box)
        if len(line) > 1 and size(box):
            begin = line.index(first)
            copies.append(_Copies(name, box, dtype, (*line[begin:], *line[:begin])))
    return copies


def _pass_on(same: Sequence[Tensor], line: Sequence[int], rank: int) -> None:
    """Receive from the previous rank and send to the next; all ranks do so in the same order.

    Args:
        same: This rank's tensors with these values: two if its first and last stage share a matrix, for example.
        line: The ranks.
        rank: This rank.
    """
    place, first = line.index(rank), same[0]
    device = device_of_messages(dist.group.WORLD)
    message = (
        first.to(device).contiguous() if place == 0 else torch.empty(first.shape, dtype=first.dtype, device=device)
    )
    if place > 0:
        _exchange(dist.P2POp(dist.irecv, message, line[place - 1]))
        for values in same:
            values.copy_(message)
    if place < len(line) - 1:
        _exchange(dist.P2POp(dist.isend, message, line[place + 1]))


def _exchange(message: dist.P2POp) -> None:
    for work in dist.batch_isend_irecv([message]):
        work.wait()


def _targets(
    views: Mapping[str, View], local: Sequence[tuple[str, LocalShard]]
) -> dict[str, list[tuple[MappedBox, Tensor]]]:
    """Return the parts of each tensor in the files that this rank needs, and their targets."""
    targets: dict[str, list[tuple[MappedBox, Tensor]]] = {}
    for name, shard in local:
        for mapped in views[name].boxes:
            if held := mapped.within(shard.box):
                targets.setdefault(mapped.source, []).append((held, shard.values[held.place_index()]))
    return targets
