"""What replicas that mix are to compute, in one process and plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_d9d.mixing.rounds import Rounds


def mixed_training(
    module: nn.Module,
    rounds: Rounds,
    windows: Sequence[Sequence[Any]],
    loss_of: Callable[[nn.Module, Any], Tensor],
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    clip: float | None = None,
    skips: Callable[[int, int], bool] = lambda step, replica: False,
    first_round: int = 0,
) -> list[list[dict[str, Tensor]]]:
    """Train replicas that mix between backward and update.

    Args:
        module: All begin with its weights.
        rounds: Of these replicas.
        windows: For each step what each replica trains on.
        loss_of: Of a module and what it trains on.
        optimizer_of: Makes an optimizer.
        clip: The most that the norm of a replica's gradients may be.
        skips: Whether a replica leaves a step out.
        first_round: The round behind the first step.

    Returns:
        For each step the weights of each replica.
    """
    replicas = [copy.deepcopy(module) for _ in range(rounds.num_replicas)]
    optimizers = [optimizer_of(each) for each in replicas]
    history: list[list[dict[str, Tensor]]] = []
    for step, batches in enumerate(windows):
        for replica, batch, optimizer in zip(replicas, batches, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(replica, batch).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(replica.parameters(), clip)
        if step > 0:
            mix(replicas, torch.from_numpy(rounds.matrix(first_round + step - 1)))
        for index, optimizer in enumerate(optimizers):
            if not skips(step, index):
                optimizer.step()
        history.append([{name: p.detach().clone() for name, p in replica.named_parameters()} for replica in replicas])
    return history


@torch.no_grad()
def mix(replicas: Sequence[nn.Module], matrix: Tensor) -> None:
    for same in zip(*(replica.parameters() for replica in replicas), strict=True):
        if same[0].requires_grad:
            mixed = torch.einsum("ij,j...->i...", matrix, torch.stack([each.double() for each in same]))
            for parameter, value in zip(same, mixed, strict=True):
                parameter.copy_(value)
