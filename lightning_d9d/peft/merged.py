"""Weights whose adapters are added while they are read, so that no merged model is ever in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_d9d.modules.adapters import Adapter
from lightning_d9d.peft.inject import adapted_sites, with_product
from lightning_d9d.peft.sites import Site
from lightning_d9d.state import Box, Index, LocalShard, View, whole_box
from lightning_d9d.state.boxes import Readable
from lightning_d9d.state.views import assembled


class MergedWeight:
    """A weight that adds to each slice its part of an adapter's product when it is read.

    Args:
        values: The weight, or a shard of it.
        box: The place of `values` in the weight.
        adapter: Adapter with whole matrices.
        file_dtype: Dtype of the file, if it is known. A sum in a wider dtype than the weight's is not rounded to that.
    """

    def __init__(self, values: Readable, box: Box, adapter: Adapter, file_dtype: torch.dtype | None = None) -> None:
        self._values, self._box, self._adapter = values, box, adapter
        self.shape, self.dtype = values.shape, torch.promote_types(values.dtype, file_dtype or values.dtype)

    def __getitem__(self, index: Index) -> Tensor:
        places = tuple(_shifted(each, dim.start) for each, dim in zip(index, self._box, strict=True))
        values = self._values[index]
        return with_product(values, self._adapter.product(places).to(values.device), self.dtype)


@torch.no_grad()
def with_adapters(
    stages: Iterable[nn.Module], local: Mapping[str, LocalShard], file_dtype: torch.dtype | None = None
) -> dict[str, LocalShard]:
    """Make shards of weights readable with their adapters. Collective over the ranks that share adapters.

    Adapters are gathered, so each rank holds all adapters of its stages; weights are not moved. The values that are
    read equal the result of `merge`, bit for bit, unless the file has a wider dtype.

    Args:
        stages: This rank's.
        local: The shards of their parameters, by name.
        file_dtype: As for `MergedWeight`.
    """
    merged = dict(local)
    for stage in stages:
        for site, adapter in adapted_sites(stage):
            if not adapter.is_merged:
                values, box = local[site.parameter]
                merged[site.parameter] = LocalShard(MergedWeight(values, box, adapter.whole(), file_dtype), box)
    return merged


class ViewedWeight:
    """A weight that is assembled from tensors of files, slice by slice, when it is read.

    Args:
        view: The source tensors and their places.
        sources: These tensors.
    """

    def __init__(self, view: View, sources: Mapping[str, Readable]) -> None:
        self._view = view
        self._sources = {box.source: sources[box.source] for box in view.boxes}
        self.shape = view.shape
        self.dtype = view.dtype or next(iter(self._sources.values())).dtype

    def __getitem__(self, index: Index) -> Tensor:
        box = tuple(
            range(each, each + 1) if isinstance(each, int) else range(*each.indices(length))
            for each, length in zip(index, self.shape, strict=True)
        )
        whole = assembled(self._view, box, self._sources, self.dtype)
        return whole[tuple(0 if isinstance(each, int) else slice(None) for each in index)]


def merged_weights(
    weights: Mapping[str, Readable],
    model: nn.Module,
    matrices: Callable[[Site], tuple[Tensor, Tensor]],
    file_dtype: torch.dtype | None = None,
) -> dict[str, Readable]:
    """Make weights in files readable with adapters, one slice after the other. Local.

    Args:
        weights: Weights by the names of the model's parameters.
        model: The whole model, with adapters, on the meta device.
        matrices: Called for each adapter: returns its whole `a` and `b`.
        file_dtype: As for `MergedWeight`.
    """
    merged = dict(weights)
    for site, adapter in adapted_sites(model):
        weight = weights[site.parameter]
        whole = adapter.with_matrices(*matrices(site))
        merged[site.parameter] = MergedWeight(weight, whole_box(weight.shape), whole, file_dtype)
    return merged


def _shifted(index: int | slice, start: int) -> Any:
    """Convert an index into a shard to one into the whole."""
    return index + start if isinstance(index, int) else slice(index.start + start, index.stop + start)
