"""What data modules ask of a Trainer, without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def run_of(num_ranks: int, rank: int, device: str = "cpu", **more: Any) -> Any:
    """Return the Trainer of a data rank that computes on a device, with further attributes."""
    ranks = {"num_replicas": num_ranks, "rank": rank}
    strategy = SimpleNamespace(root_device=torch.device(device))
    more = {"lightning_module": None, "callbacks": [], **more}
    return SimpleNamespace(distributed_sampler_kwargs=ranks, accumulate_grad_batches=1, strategy=strategy, **more)
