"""Tokens to experts on other ranks and back, forward and backward, without the experts' products.

The peer is `all_to_all`, by NCCL or gloo; `peer` writes into the memory of the other ranks. Beside these stand parts of
the second. What crosses the link is compared with a plain copy of as many bytes into a peer's memory. The exchange of
gradients, with their copies for experts, is compared with that copy and one on the device, one after the other. Each is
the median of rounds that take turns in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.modules import AllToAllDispatch, Dispatch
from lightning_d9d.modules.dispatch import DispatchedTokens
from lightning_d9d.modules.peer_dispatch import PeerDispatch
from lightning_d9d.ops.moe_permute import sort_by_expert
from lightning_d9d.ops.peer_exchange import PeerPlan
from lightning_d9d.ops.peer_memory import PeerMemory
from tests.benchmarks.frame import Case, Contender, synchronize
from tests.benchmarks.training import num_gpus

PEER = "all_to_all"
LEAST_OF_LINK = 0.85
LEAST_OF_COPIES = 0.85
"""Of the rate of both copies, one after the other."""
_ROUNDS = 20
_AHEAD_CYCLES = 4_000_000
"""Clock cycles that the device waits before each timed part, so that its launches do not count."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one rank."""

    tokens: int = 16_384
    hidden: int = 2048
    experts: int = 128
    top_k: int = 8
    dtype: torch.dtype = torch.bfloat16
    num_ranks: int = 2


QUICK = Work(tokens=64, hidden=32, experts=8, top_k=2, dtype=torch.float32)


class Exchanges:
    """A contender: a step is dispatch, a weighting of the copies and combine, forward and backward."""

    def __init__(self, work: Work, kind: str, device: torch.device) -> None:
        assert dist.group.WORLD is not None
        self.dispatch: Dispatch = (AllToAllDispatch if kind == PEER else PeerDispatch)(work.experts, dist.group.WORLD)
        generator = torch.Generator(device).manual_seed(dist.get_rank())
        options: dict[str, Any] = {"generator": generator, "device": device}
        self.x = torch.randn(work.tokens, work.hidden, **options).to(work.dtype).requires_grad_()
        logits = torch.randn(work.tokens, work.experts, **options)
        self.weights, self.indices = logits.softmax(-1).topk(work.top_k)
        self.weights.requires_grad_()
        self.gradient = torch.randn(work.tokens, work.hidden, **options).to(work.dtype)
        self.output = self.x.detach()

    def run(self, steps: int) -> None:
        """Run this number of steps."""
        for _ in range(steps):
            tokens = self.dispatch.dispatch(self.x, self.indices, self.weights)
            results = tokens.x * tokens.weights.unsqueeze(1).to(tokens.x.dtype)
            self.output = self.dispatch.combine(results, tokens)
            torch.autograd.grad(self.output, [self.x, self.weights], self.gradient)

    def loss(self) -> float:
        """The norm of the last output."""
        return self.output.double().norm().item()

    def close(self) -> None:
        """Nothing is left but memory."""
        if isinstance(self.dispatch, PeerDispatch):
            failures = self.dispatch.exchange.failures()
            assert failures is None or failures.item() == 0
            self.dispatch.exchange.close()


class Messages:
    """The kernels of `peer` that write to other ranks, one at a time, with the tokens of one dispatch.

    With `own_memory` they write to the same places of this rank's memory. So the difference is what links cost.
    """

    def __init__(self, memory: PeerMemory, x: Tensor, tokens: DispatchedTokens) -> None:
        assert isinstance(tokens.exchange, PeerPlan)
        self.memory, self.x, self.rows, self.copies = memory, x, tokens.x.detach(), tokens.copies.places
        self.places, self.ranks, self.table = tokens.exchange
        self.sums, none = torch.empty_like(x), memory.layout.num_ranks
        self.is_own = self.ranks == memory.rank
        self.leaving, self.staying = (self.ranks.masked_fill(mask, none) for mask in (self.is_own, ~self.is_own))
        self.crossing = int((self.leaving < none).sum())
        self._nothing_comes, self._to_own = self.table.clone(), self.table.clone()
        self._nothing_comes[2] = 0
        sent = self.ranks[self.ranks < none].bincount(minlength=none)
        self._to_own[0] = self.table[2].roll(1).index_fill(0, sent.new_zeros(1), 0) - (sent.cumsum(0) - sent)
        """What is added to a place to get the row where one from the other rank comes."""
        self._own = torch.full_like(memory.pointers, memory.own.data_ptr())

    def exchange(self, ranks: Tensor, table: Tensor | None = None) -> None:
        """Write tokens to these ranks; without a table, none are expected from others."""
        table = self._nothing_comes if table is None else table
        kernels().exchange(self.memory, self.x, self.places, ranks, table, self.copies, self.rows, None)

    def take_rest(self) -> None:
        """Copy all rows from others for experts."""
        kernels().take_rest(self.memory, self.table, self.copies, self.rows, None)

    def gradients(self, own_memory: bool = False) -> None:
        """The whole exchange of gradients, as in the backward of the combine."""
        kernels().meet(self.memory)
        with self._pointers(own_memory):
            self.exchange(self.ranks, self._to_own if own_memory else self.table)
        kernels().meet(self.memory)
        self.take_rest()

    def push_sums(self, own_memory: bool = False) -> None:
        """Write sums back."""
        with self._pointers(own_memory):
            kernels().push_sums(self.memory, self.rows, self.copies, self.table, None)

    def take_sums(self) -> None:
        """Sum what came back."""
        kernels().take_sums(self.memory, self.places, self.ranks, self.sums, None)

    @contextmanager
    def _pointers(self, own_memory: bool) -> Iterator[None]:
        before = self.memory.pointers
        self.memory.pointers = self._own if own_memory else before
        yield
        self.memory.pointers = before


def kernels() -> ModuleType:
    """The kernels, which need Triton."""
    from lightning_d9d.ops.kernels import peer_exchange

    return peer_exchange


def parts(contenders: Mapping[str, Contender], device: torch.device) -> dict[str, dict[str, Any]]:
    """Milliseconds of parts, and two ratios of rates. Collective; on CUDA alone, since there are kernels."""
    contender, plain = contenders["peer"], contenders[PEER]
    assert isinstance(contender, Exchanges)
    assert isinstance(plain, Exchanges)
    if device.type != "cuda":
        return {}
    dispatch = contender.dispatch
    assert isinstance(dispatch, PeerDispatch)
    memory = dispatch.exchange.memory
    assert memory is not None
    layout, x = memory.layout, contender.x.detach()
    tokens = dispatch.dispatch(contender.x, contender.indices, contender.weights)
    messages, row_bytes = Messages(memory, x, tokens), x.shape[1] * x.element_size()
    crossing_bytes = messages.crossing * row_bytes
    moved = (int(tokens.offsets[-1]) + int(messages.table[2, -1])) * row_bytes
    other = memory.buffers[(memory.rank + 1) % layout.num_ranks]
    target = other[layout.regions_at : layout.regions_at + crossing_bytes]
    source = torch.zeros(crossing_bytes, dtype=torch.uint8, device=device)
    here, there = (torch.zeros(moved // 2, dtype=torch.uint8, device=device) for _ in range(2))
    measured = {
        "peer copy": lambda: target.copy_(source),
        "exchange, to others": lambda: messages.exchange(messages.leaving),
        "exchange, of own tokens": lambda: messages.exchange(messages.staying),
        "take rest": messages.take_rest,
        "device copy": lambda: there.copy_(here),
        "gradients": messages.gradients,
        "gradients, own memory": lambda: messages.gradients(own_memory=True),
        "push sums": messages.push_sums,
        "push sums, own memory": lambda: messages.push_sums(own_memory=True),
        "take sums": messages.take_sums,
        "sort by rank": lambda: sort_by_expert(messages.ranks, layout.num_ranks + 1),
        "sort by expert": lambda: sort_by_expert(contender.indices, dispatch.num_experts),
        "meet": lambda: kernels().meet(memory),
        "peer forward": lambda: _forward(contender),
        "all_to_all forward": lambda: _forward(plain),
    }
    times = _times(measured, device)
    copies = times["peer copy"] + times["device copy"]
    return {
        "peer": {
            "milliseconds": times,
            "crossing_bytes": crossing_bytes,
            "copied_bytes": moved,
            "copies": int(tokens.offsets[-1]),
            "top_k": layout.top_k,
            "peer_copy_GB_s": crossing_bytes / times["peer copy"] / 1e6,
            "link": {"ratio": times["peer copy"] / times["exchange, to others"], "least": LEAST_OF_LINK},
            "both": {"ratio": copies / times["gradients"], "least": LEAST_OF_COPIES},
        }
    }


def _forward(contender: Exchanges) -> Tensor:
    tokens = contender.dispatch.dispatch(contender.x, contender.indices, contender.weights)
    return contender.dispatch.combine(tokens.x, tokens)


def _times(measured: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    samples: dict[str, list[float]] = {name: [] for name in measured}
    for turn in range(-2, _ROUNDS):
        for name, function in measured.items():
            synchronize(device)
            torch.cuda._sleep(_AHEAD_CYCLES)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            end.synchronize()
            if turn >= 0:
                samples[name].append(begin.elapsed_time(end))
    return {name: statistics.median(each) for name, each in samples.items()}


def table(result: dict[str, Any], device_type: str) -> str:
    """Ratios, and milliseconds of parts."""
    from tests.benchmarks.__main__ import table as ratios

    lines = [ratios(result, device_type)]
    peer = result["contenders"]["peer"]
    for name, value in peer.get("milliseconds", {}).items():
        lines.append(f"  {name:<24}{value:9.4f} ms")
    for name in ("link", "both"):
        if name in peer:
            lines.append(f"  {name}: {peer[name]['ratio']:.3f} of a copy, at least {peer[name]['least']}")
    if "peer_copy_GB_s" in peer:
        lines.append(
            f"  {peer['crossing_bytes'] / 1e6:.1f} MB cross the link, by copy at {peer['peer_copy_GB_s']:.0f} GB/s"
        )
    return "\n".join(lines)


def cases(device_type: str, quick: bool) -> list[Case]:
    """One, on all GPUs up to 8 or on two processes."""
    if quick or device_type == "cpu":
        return [case(QUICK, warmup_steps=1, block_steps=1, repeats=2 if quick else 12)]
    return [case(Work(num_ranks=num_gpus()), warmup_steps=3, block_steps=10, repeats=10)]


def case(work: Work, **rounds: Any) -> Case:
    """Both ways."""
    return Case(
        name=f"{work.num_ranks} ranks",
        contenders={kind: partial(Exchanges, work, kind) for kind in (PEER, "peer")},
        peer=PEER,
        afterwards=parts,
        num_processes=work.num_ranks,
        conditions={
            "tokens of a rank": work.tokens,
            "hidden": work.hidden,
            "experts": work.experts,
            "top_k": work.top_k,
            "dtype": str(work.dtype),
        },
        **rounds,
    )
