"""Forces the choice of experts, so that each has about as many tokens in each layer and step."""

from __future__ import annotations

import lightning as L
import numpy as np
import torch
from torch import Tensor

from lightning_d9d.modules.moe import TopKRouter


def even_choices(num_tokens: int, num_experts: int, top_k: int, rank: int = 0, num_ranks: int = 1) -> Tensor:
    """Return different experts for each token, `[num_tokens, top_k]`.

    Each rank has the choices of the first one, turned by its share of the experts. So all ranks send and receive the
    same numbers of tokens.
    """
    # Not by torch: the first forward calls this, and a selective recomputation would miss the operators.
    choices = np.random.default_rng(0).random((num_tokens, num_experts)).argpartition(top_k)[:, :top_k]
    return torch.from_numpy((choices + rank * num_experts // num_ranks) % num_experts)


class EvenRouting(L.Callback):
    """Replaces the choices of all routers for the rest of the process. Weights stay those of the routers' choices."""

    def __init__(self) -> None:
        self._choices: dict[tuple[int, ...], Tensor] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Replace the forward of routers."""
        natural = TopKRouter.forward

        def forward(router: TopKRouter, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
            indices, weights, loss = natural(router, x)
            key = (len(router.weight), *indices.shape)
            if key not in self._choices:
                made = even_choices(len(indices), *key[::2], trainer.global_rank, trainer.world_size)
                self._choices[key] = made.to(indices)
            return self._choices[key], weights, loss

        TopKRouter.forward = forward  # type: ignore[method-assign]
