"""Histograms of tensors that ranks share, with the same bins on all ranks.

Borders of bins are plus and minus 1e-12 * 1.2**k, up to 1e6. So bins of values of any size are a fifth of them
wide, and ranks need not know the extremes of others. The bin in the middle has values closer to 0. NaN and infinite
values are not in any bin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.mesh.collectives import device_of_messages
from lightning_d9d.mesh.sharding import Sharding, local
from lightning_d9d.sync.norm import sharding_groups
from lightning_d9d.waits import waiting

_SMALLEST, _RATIO, _LARGEST = 1e-12, 1.2, 1e6
_POSITIVE = [_SMALLEST * _RATIO**k for k in range(math.ceil(math.log(_LARGEST / _SMALLEST, _RATIO)) + 1)]
BORDERS: tuple[float, ...] = (*(-each for each in reversed(_POSITIVE)), *_POSITIVE)
"""Borders between bins, ascending. The first and the last bin have all values beyond."""
_CHUNK = 1 << 22
"""Number of values that are counted together; a larger number takes more memory."""


def bin_counts(values: Tensor) -> Tensor:
    """Count values by bins: int64 `[len(BORDERS) + 1]`. `BORDERS` are the borders of the bins. Local; the host waits.

    Args:
        values: Floating-point values of any shape.
    """
    borders = torch.tensor(BORDERS, device=values.device, dtype=torch.float64)
    num_bins = len(BORDERS) + 1
    counts = torch.zeros(num_bins + 1, dtype=torch.int64, device=values.device)
    for chunk in values.detach().flatten().split(_CHUNK):
        bins = torch.bucketize(chunk.double(), borders, right=True)
        bins.masked_fill_(~chunk.isfinite(), num_bins)
        counts += torch.bincount(bins, minlength=num_bins + 1)
    return counts[:num_bins]


def whole_counts(parts: Mapping[str, tuple[Sharding | None, Tensor | None]]) -> dict[str, Tensor]:
    """Count the values of tensors that are sharded over ranks, each element once. Collective over those ranks.

    Args:
        parts: Sharding and tensor by name: a DTensor or a plain one, or None for a missing gradient. Ranks that share
            tensors give the same names in the same order.

    Returns:
        Counts by name, int64 `[len(BORDERS) + 1]` on the host.
    """
    by_groups: dict[frozenset[dist.ProcessGroup], tuple[list[dist.ProcessGroup], dict[str, Tensor]]] = {}
    for name, (sharding, tensor) in parts.items():
        groups = sharding_groups(sharding)
        empty = torch.zeros(len(BORDERS) + 1, dtype=torch.int64)
        counts = empty if tensor is None else bin_counts(local(tensor)).cpu()
        by_groups.setdefault(frozenset(groups), (groups, {}))[1][name] = counts
    found: dict[str, Tensor] = {}
    for groups, counts in by_groups.values():
        found |= summed_counts(counts, groups)
    return {name: found[name] for name in parts}


def summed_counts(counts: Mapping[str, Tensor], groups: Sequence[dist.ProcessGroup]) -> dict[str, Tensor]:
    """Return sums of counts over the ranks of all groups, on the host. Collective over each.

    Args:
        counts: Counts by name, int64 `[len(BORDERS) + 1]`; the same names on all ranks.
        groups: Groups of the axes of a mesh along which ranks are summed.
    """
    if not counts:
        return {}
    table = torch.stack([*counts.values()])
    for group in groups:
        message = table.to(device_of_messages(group))
        with waiting():
            dist.all_reduce(message, group=group)
        table = message
    return dict(zip(counts, table.cpu(), strict=True))
