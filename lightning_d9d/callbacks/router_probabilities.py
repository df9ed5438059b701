"""`RouterProbabilities`: how the probabilities are spread that routers give to experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_d9d.modules import TopKRouter
from lightning_d9d.ops.once import is_repeated
from lightning_d9d.sync.histograms import bin_counts, summed_counts


class RouterProbabilities:
    """Counts probabilities of experts by bins, in forwards with gradient between `begin` and `take`.

    Each token of a step counts once for each expert. Dummy microbatches and recomputations do not count.

    Args:
        routers: Of this rank's stages, by name.
        group: The ranks with other tokens and the same routers; None in one process.
    """

    def __init__(self, routers: Mapping[str, TopKRouter], group: dist.ProcessGroup | None) -> None:
        self._routers = routers
        self._group = group
        self._handles: list[RemovableHandle] = []
        self._counts: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Count from here on, unless that has begun. Local."""
        if self._handles:
            return
        for name, router in self._routers.items():
            empty = torch.empty(0, dtype=torch.float32, device=router.weight.device)
            self._counts[name] = bin_counts(empty)
            router.counts_tokens = True  # type: ignore[assignment]  # see `CountsTokens`: a stage sets it to False
            self._handles.append(router.register_forward_hook(partial(self._count, name)))

    def take(self) -> dict[str, Tensor]:
        """Stop counting. Collective over the group.

        Returns:
            Counts by the router's name, those of all ranks, on the host.
        """
        self.close()
        counts, self._counts = self._counts, {}
        return summed_counts(counts, [] if self._group is None else [self._group])

    def close(self) -> None:
        """Stop counting. Local."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            for router in self._routers.values():
                del router.counts_tokens
        self._handles.clear()

    def _count(self, name: str, router: TopKRouter, inputs: tuple[Tensor], _: Any) -> None:
        if torch.is_grad_enabled() and router.counts_tokens and not is_repeated():
            with torch.no_grad():
                self._counts[name] += bin_counts(router.logits(inputs[0]).softmax(-1))
