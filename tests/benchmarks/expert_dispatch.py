"""Tokens to experts on other ranks and back, forward and backward, without the experts' products.

The peer is `all_to_all`, by NCCL or gloo; `peer` writes into the memory of the other ranks. Beside these stand parts of
the second: what crosses the link against a plain copy of as many bytes into a peer's memory, and what the experts' rank
copies against a copy on the device. Each is the median of rounds that take turns in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.modules import AllToAllDispatch, Dispatch
from lightning_d9d.modules.peer_dispatch import PeerDispatch
from lightning_d9d.ops.moe_permute import sort_by_expert
from lightning_d9d.ops.peer_exchange import PeerPlan
from tests.benchmarks.frame import Case, Contender, synchronize
from tests.benchmarks.training import num_gpus

PEER = "all_to_all"
LEAST_OF_LINK = 0.85
LEAST_OF_COPY = 0.85
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


def parts(contenders: Mapping[str, Contender], device: torch.device) -> dict[str, dict[str, Any]]:
    """Milliseconds of parts, and two ratios of rates. Collective; on CUDA alone, since there are kernels."""
    contender = contenders["peer"]
    assert isinstance(contender, Exchanges)
    if device.type != "cuda":
        return {}
    from lightning_d9d.ops.kernels import peer_exchange as kernels

    dispatch = contender.dispatch
    assert isinstance(dispatch, PeerDispatch)
    memory = dispatch.exchange.memory
    assert memory is not None
    layout, x, k = memory.layout, contender.x.detach(), contender.indices.shape[1]
    num_ranks, rank = layout.num_ranks, memory.rank
    tokens = dispatch.dispatch(contender.x, contender.indices, contender.weights)
    assert isinstance(tokens.exchange, PeerPlan)
    places, ranks, table = tokens.exchange
    rows, copies = tokens.x.detach(), tokens.copies.places
    other = (rank + 1) % num_ranks
    row_bytes = x.shape[1] * x.element_size()
    begin, end = [0, *table[2].tolist()][rank : rank + 2]
    come = copies.clone()
    come[begin:end] = len(rows)
    moved = int((come < len(rows)).sum() + table[2, -1] - (end - begin)) * row_bytes
    crossing = int((ranks < num_ranks).sum() - (ranks == rank).sum())
    target = memory.buffers[other][layout.regions_at : layout.regions_at + crossing * row_bytes]
    source = torch.zeros(len(target), dtype=torch.uint8, device=device)
    here, there = (torch.zeros(moved // 2, dtype=torch.uint8, device=device) for _ in range(2))
    sums, plain = torch.empty_like(x), contenders[PEER]
    assert isinstance(plain, Exchanges)
    leaving, staying = (ranks.masked_fill(mask, num_ranks) for mask in (ranks == rank, ranks != rank))
    nothing_comes = table.clone()
    nothing_comes[2] = 0

    def exchange(ranks: Tensor) -> None:
        kernels.exchange(memory, x, places, ranks, nothing_comes, copies, rows, None)

    def gradients() -> None:
        kernels.meet(memory)
        kernels.exchange(memory, x, places, ranks, table, copies, rows, None)
        kernels.meet(memory)
        kernels.take_rest(memory, table, copies, rows, None)

    measured = {
        "peer copy": lambda: target.copy_(source),
        "exchange, to others": lambda: exchange(leaving),
        "exchange, of own tokens": lambda: exchange(staying),
        "device copy": lambda: there.copy_(here),
        "take rest": lambda: kernels.take_rest(memory, table, copies, rows, None),
        "exchange of gradients": gradients,
        "push sums": lambda: kernels.push_sums(memory, rows, copies, table, None),
        "take sums": lambda: kernels.take_sums(memory, places, ranks, sums, None),
        "sort by rank": lambda: sort_by_expert(ranks, num_ranks + 1),
        "sort by expert": lambda: sort_by_expert(contender.indices, dispatch.num_experts),
        "meet": lambda: kernels.meet(memory),
        "peer forward": lambda: _forward(contender),
        "all_to_all forward": lambda: _forward(plain),
    }
    times = _times(measured, device)
    link, copy = times["peer copy"] / times["exchange, to others"], times["device copy"] / times["take rest"]
    return {
        "peer": {
            "milliseconds": times,
            "crossing_bytes": len(target),
            "copied_bytes": moved,
            "copies": int(tokens.offsets[-1]),
            "top_k": k,
            "peer_copy_GB_s": len(target) / times["peer copy"] / 1e6,
            "link": {"ratio": link, "least": LEAST_OF_LINK},
            "spread": {"ratio": copy, "least": LEAST_OF_COPY},
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
    for name in ("link", "spread"):
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
