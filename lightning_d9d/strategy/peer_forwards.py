"""Forwards whose tokens do not fit into the memory of experts' ranks run again, so no token is lost.

[Note: forwards that run again] Only the device of a rank knows how many tokens come to the rank (`PeerDispatch`). So
after each forward of a stage the host asks whether a rank with this stage had too many. In that case the forward runs
again by all-to-all. Its results and its loss are those of the second run. Random numbers continue, so dropout draws
others. `ExpertBalance` counts tokens once; hooks on the forward see both runs. A backward needs no more room than its
forward.

The answer is known when the last layer with experts has its counts. On CUDA the question has a stream of its own, which
waits for that point only. While the device computes the rest of the forward, the host launches what comes next.

Later forwards of the batch travel by all-to-all, too: memory grows at the end of the batch, when no backward needs it.
A recomputation takes the way of its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_d9d.log import logger
from lightning_d9d.mesh.collectives import device_of_messages
from lightning_d9d.modules import ExpertBalance
from lightning_d9d.modules.peer_dispatch import peer_exchanges
from lightning_d9d.ops.peer_memory import LATE, OVERFLOW, PeerMemory
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.waits import waiting

T = TypeVar("T")


class PeerForwards:
    """Runs forwards, and runs them again by all-to-all where needed. See [Note: forwards that run again].

    Args:
        module: Module with its stages built.
        device: Device of this rank.
        group: The ranks with the same stages; None for all ranks.
        lacking: As for `PeerExchange.grow`.
        is_optional: Whether all-to-all may replace peer dispatch for good.
    """

    def __init__(
        self,
        module: D9DModule,
        device: torch.device,
        group: dist.ProcessGroup | None,
        lacking: Callable[[float, float, int], int],
        *,
        is_optional: bool = False,
    ) -> None:
        self.num_repeated = 0
        """How many forwards ran again."""
        self._exchanges = peer_exchanges(module.indexed_stages.values())
        for exchange in self._exchanges:
            exchange.is_optional, exchange.is_off = is_optional, False
        self._counters = {
            index: [part.tokens_per_expert for part in stage.modules() if isinstance(part, ExpertBalance)]
            for index, stage in module.indexed_stages.items()
        }
        self._device, self._group, self._lacking = device, group, lacking
        is_cuda = device.type == "cuda"
        # Its small kernels do not wait for a large one to end.
        self._questions = torch.cuda.Stream(device, priority=-1) if is_cuda and self._exchanges else None
        self._is_over = False
        """True if all-to-all has replaced peer dispatch for good on all ranks of the group."""
        self._by_all_to_all: set[tuple[int, int]] = set()
        """Stages and microbatches whose tokens traveled by all-to-all: those of this batch since the first overflow."""

    def begin(self) -> None:
        """Begin a batch. Local."""
        self._by_all_to_all.clear()

    def forward(self, stage: int, microbatch: int, run: Callable[[], T]) -> T:
        """Run a forward, and again by all-to-all if tokens do not fit. Collective over the group; the host waits.

        Raises:
            RuntimeError: A rank did not write its tokens in time.
        """
        if self._is_over:
            return run()
        if not self._by_all_to_all:
            counted = [counter.clone() for counter in self._counters[stage]]
            for memory in self._memories():
                memory.counted = None
            result = run()
            with self._when_counted():
                overflowed = self._overflowed()
            if not overflowed:
                return result
            del result  # with the activations
            self._warn()
            for counter, value in zip(self._counters[stage], counted, strict=True):
                counter.copy_(value)
        self._by_all_to_all.add((stage, microbatch))
        with self.as_forward(stage, microbatch):
            return run()

    @contextmanager
    def as_forward(self, stage: int, microbatch: int) -> Generator[None]:
        """Send tokens the way of a microbatch's forward inside the block. Local."""
        is_off = (stage, microbatch) in self._by_all_to_all
        for exchange in self._exchanges:
            exchange.is_off = is_off
        try:
            yield
        finally:
            for exchange in self._exchanges:
                exchange.is_off = False

    def end(self) -> None:
        """End a batch. If more room was needed, there is more from now on. Collective over the group; the host waits.

        Raises:
            RuntimeError: A rank did not write its tokens in time, or tokens of a backward or a loss had no room.
        """
        if self._is_over:
            return
        if self._overflowed() and not self._by_all_to_all:
            raise RuntimeError(
                "expert_dispatch='peer': tokens had no room outside of a stage's forward, so gradients are wrong. The "
                "loss has experts, or a recomputation chose others than its forward. Use "
                "expert_dispatch='all_to_all', or a larger ParallelConfig.expert_capacity"
            )
        if self._by_all_to_all:
            for exchange in self._exchanges:
                exchange.grow(self._lacking)

    def _memories(self) -> list[PeerMemory]:
        return [memory for exchange in self._exchanges if (memory := exchange.memory) is not None]

    def _when_counted(self) -> AbstractContextManager[Any]:
        """Return a context whose current stream has waited for the counts of the last forward alone, if it can."""
        memories = self._memories()
        points = [memory.counted for memory in memories if memory.counted is not None]
        if self._questions is None or len(points) < len(memories):
            return nullcontext()
        for point in points:
            self._questions.wait_event(point)
        return torch.cuda.stream(self._questions)

    def _overflowed(self) -> bool:
        """Return whether tokens had no room on any rank of the group, and note whether any rank has peers."""
        flags = torch.zeros(3, dtype=torch.int32, device=self._device)
        flags[2] = any(not exchange.is_replaced for exchange in self._exchanges)
        for exchange in self._exchanges:
            if (failures := exchange.failures()) is not None:
                flags[:2] = torch.maximum(flags[:2], torch.stack([failures & OVERFLOW, failures & LATE]))
        message = flags.to(device_of_messages(self._group or dist.group.WORLD))
        with waiting():
            dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self._group)
        overflow, late, has_peers = message.tolist()
        self._is_over = not has_peers
        if late:
            for exchange in self._exchanges:
                if (failures := exchange.failures()) is not None:
                    exchange.check(int(failures))
            raise RuntimeError("expert_dispatch='peer': ranks did not receive the tokens of another rank in time")
        return bool(overflow)

    def _warn(self) -> None:
        if self.num_repeated == 0:
            logger.warning(
                "expert_dispatch='peer': tokens of a forward had no room in the memory of experts' ranks, so it runs "
                "again by all-to-all, and there is more memory from then on; a larger ParallelConfig.expert_capacity, "
                "or a more even load of experts, avoids that"
            )
        self.num_repeated += 1
