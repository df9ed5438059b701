"""Batches whose tokens do not fit into the memory of experts' ranks are computed again, so no token is lost.

[Note: computed again] Only the device of a rank knows how many tokens come to the rank (`PeerDispatch`). So when the
host has launched all of a batch, it asks once whether a rank had too many. In that case gradients are dropped, and the
batch is run by all-to-all, before any step. Losses and metrics are then those of the second run. Random numbers
continue, so dropout draws others. Tokens of experts are counted only once.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.log import logger
from lightning_d9d.mesh.collectives import device_of_messages
from lightning_d9d.modules import ExpertBalance
from lightning_d9d.modules.peer_dispatch import peer_exchanges
from lightning_d9d.ops.peer_memory import LATE, OVERFLOW
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.waits import waiting


class PeerBatches:
    """Decides whether a batch must be computed again. See [Note: computed again].

    Args:
        module: Module with its stages built.
        device: Device of this rank.
        is_optional: Whether all-to-all may replace peer dispatch, for a batch or for good.
    """

    def __init__(self, module: D9DModule, device: torch.device, *, is_optional: bool = False) -> None:
        self.num_repeated = 0
        """How many batches were computed again."""
        self._is_optional, self._is_off = is_optional, False
        self._exchanges = peer_exchanges(module.indexed_stages.values())
        for exchange in self._exchanges:
            exchange.is_optional = is_optional
        self._counters = [part.tokens_per_expert for part in module.modules() if isinstance(part, ExpertBalance)]
        self._counted: list[Tensor] = []
        self._device = device

    def begin(self, accumulated_batches: int) -> None:
        """Begin a batch. Local.

        Gradients of several batches are summed, so those of one cannot be dropped. Tokens of such a batch travel by
        all-to-all if they may.

        Raises:
            ConfigError: Gradients are accumulated, and all-to-all may not replace peer dispatch.
        """
        self._is_off = accumulated_batches > 1
        if self._is_off and not self._is_optional:
            raise ConfigError(
                f"ParallelConfig.expert_dispatch='peer' with accumulate_grad_batches={accumulated_batches}: a batch "
                "whose tokens do not fit is computed again without its gradients. Use larger batches and "
                "D9DStrategy(microbatch_size=...), or 'all_to_all'"
            )
        for exchange in self._exchanges:
            exchange.is_off = self._is_off
        self._counted = [counter.clone() for counter in self._counters]

    def overflowed(self) -> bool:
        """Return whether tokens of the batch did not fit on any rank. Collective over all ranks; the host waits.

        Raises:
            RuntimeError: A rank did not write its tokens in time.
        """
        if self._is_off:
            return False
        flags = torch.zeros(2, dtype=torch.int32, device=self._device)
        for exchange in self._exchanges:
            if (failures := exchange.failures()) is not None:
                flags = torch.maximum(flags, torch.stack([failures & OVERFLOW, failures & LATE]))
        message = flags.to(device_of_messages(dist.group.WORLD))
        with waiting():
            dist.all_reduce(message, op=dist.ReduceOp.MAX)
        overflow, late = message.tolist()
        if late:
            for exchange in self._exchanges:
                if (failures := exchange.failures()) is not None:
                    exchange.check(int(failures))
            raise RuntimeError("expert_dispatch='peer': ranks did not receive the tokens of another rank in time")
        return bool(overflow)

    @contextmanager
    def by_all_to_all(self) -> Generator[None]:
        """Run a batch by all-to-all inside the block; afterwards there is more memory. Collective over all ranks."""
        if self.num_repeated == 0:
            logger.warning(
                "expert_dispatch='peer': tokens of a batch had no room in the memory of experts' ranks, so it is "
                "computed again by all-to-all, and there is more memory from then on; a larger "
                "ParallelConfig.expert_capacity, or a more even load of experts, avoids that"
            )
        self.num_repeated += 1
        for counter, value in zip(self._counters, self._counted, strict=True):
            counter.copy_(value)
        for exchange in self._exchanges:
            exchange.is_off = True
        try:
            yield
        finally:
            for exchange in self._exchanges:
                exchange.is_off = False
        for exchange in self._exchanges:
            exchange.grow()
