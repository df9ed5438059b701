"""Tensor parallelism against copies on the same ranks, on as many tokens a rank. What a step is: `training`.

Experts are spread over all ranks in either case, so that their part is the same. Ranks that cut matrices have the rows
of all of them, in slices.

*vocabulary* is the head with its loss alone, forward and backward, without an optimizer: cut over all ranks, with the
tokens of all of them gathered, against a whole one on each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_d9d import MeshConfig
from lightning_d9d.memory.traffic import NUMBERS_OF_A_LOSS, share_sent
from lightning_d9d.mesh import MeshDomains
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig
from lightning_d9d.modules import LMHead
from lightning_d9d.parallel import shard_tensors
from tests.benchmarks.frame import Case
from tests.benchmarks.pipeline import fill_by_name
from tests.benchmarks.training import (
    ON_CPU,
    QUICK,
    Account,
    Steps,
    Way,
    Work,
    account,
    accounts,
    allocated,
    fitting,
    num_gpus,
)
from tests.benchmarks.training import table as table
from tests.benchmarks.training import write as write

PEER = "tp1"
LEAST_OF_PEER = 0.85
"""Tokens/s of two tensor ranks, of those of copies."""
WORK = Work(
    config=replace(Qwen3MoeConfig.preset("30b-a3b"), vocab_size=8192),
    dtype=torch.bfloat16,
    num_rows=4,
    sequence_length=4096,
)
WHOLE, CUT = "whole", "cut"


def ways(num_ranks: int) -> dict[str, Way]:
    """Return the ways of the contenders: two tensor ranks, and all."""

    def way(tp: int) -> Way:
        return Way(MeshConfig(data_parallel_replicate=num_ranks // tp, tensor_parallel=tp, expert_parallel=num_ranks))

    return {PEER: way(1)} | {f"tp{tp}": way(tp) for tp in sorted({2, num_ranks})}


def cases(device_type: str, quick: bool) -> list[Case]:
    """Rows of 4096 tokens and of 16,384, and the vocabulary; on all GPUs up to 8 (a power of two) or two processes."""
    if quick or device_type == "cpu":
        work, head = (QUICK, QUICK_HEAD) if quick else (ON_CPU, replace(QUICK_HEAD, num_tokens=512, vocab_size=4096))
        rounds: dict[str, Any] = dict(warmup_steps=2, block_steps=1, repeats=2 if quick else 12)
        return [case(work, judges=False, **rounds), vocabulary(head, judges=False, **rounds)]
    num_ranks = num_gpus()
    work = fitting(replace(WORK, num_ranks=num_ranks), ways(num_ranks).values())
    long = replace(work, num_rows=1, sequence_length=WORK.num_rows * WORK.sequence_length)
    rounds = dict(judges=True, warmup_steps=3, block_steps=2, repeats=10)
    return [case(work, **rounds), case(long, **rounds), vocabulary(replace(HEAD, num_ranks=num_ranks), **rounds)]


def case(work: Work, judges: bool, **rounds: Any) -> Case:
    """Whole networks."""
    of_ranks = ways(work.num_ranks)
    return Case(
        name=f"{work.num_rows} x {work.sequence_length}",
        contenders={name: partial(Steps, work, way) for name, way in of_ranks.items()},
        peer=PEER,
        limits={"tp2": 1 / LEAST_OF_PEER} if judges else {},
        afterwards=partial(accounts, {name: account(work, way) for name, way in of_ranks.items()}),
        num_processes=work.num_ranks,
        conditions=work.conditions() | {"expert parallel": work.num_ranks},
        **rounds,
    )


@dataclass(frozen=True, kw_only=True)
class Head:
    """What every contender of `vocabulary` computes. Tokens are one rank's in one pass, of which a step has several."""

    vocab_size: int
    hidden_size: int
    num_tokens: int
    dtype: torch.dtype
    num_passes: int
    num_ranks: int = 2

    def account(self, tp: int) -> Account:
        """A whole head keeps log-probabilities in float32, and has two gradients of their size for a while; of a cut
        one both logits and their gradient are as narrow as weights.
        """
        weights = self.vocab_size * self.hidden_size * self.dtype.itemsize // tp
        message = self.num_passes * self.num_tokens * tp * self.hidden_size * self.dtype.itemsize * share_sent(tp)
        logits = self.num_tokens * self.vocab_size
        of_losses = NUMBERS_OF_A_LOSS * max(4, self.dtype.itemsize) * self.num_tokens * tp * (tp - 1)
        hidden = self.num_tokens * self.hidden_size * self.dtype.itemsize
        return Account(
            flops=6 * self.num_passes * self.num_tokens * self.hidden_size * self.vocab_size,
            tokens=self.num_passes * self.num_tokens,
            weights=weights,
            gradients=weights,
            lasting_gradients=0,
            moments=0,
            activations=hidden * tp
            + (3 * max(4, self.dtype.itemsize) if tp == 1 else 2 * self.dtype.itemsize) * logits,
            all_gather=message + self.num_passes * of_losses,
            reduce_scatter=message,
        )


HEAD = Head(vocab_size=151_936, hidden_size=2048, num_tokens=16_384, dtype=torch.bfloat16, num_passes=2)
QUICK_HEAD = Head(vocab_size=64, hidden_size=32, num_tokens=8, dtype=torch.float32, num_passes=2)


class Heads:
    """A contender: passes of a head with its loss, cut or whole. Collective, as are its methods."""

    def __init__(self, head: Head, tp: int, device: torch.device) -> None:
        self.head, self.device = head, device
        self.allocated_before = allocated(device)
        replicate = head.num_ranks // tp
        self.mesh = MeshDomains.build(MeshConfig(data_parallel_replicate=replicate, tensor_parallel=tp), device.type)
        with torch.device("meta"):
            self.module = LMHead(head.vocab_size, head.hidden_size, initializer_range=0.02).to(head.dtype)
        shard_tensors(self.module, self.mesh)
        self.module.to_empty(device=device)
        fill_by_name(self.module, device)
        rank = self.mesh.coordinates["dp"] * tp + self.mesh.coordinates["tp"]
        labels = [part[1] for part in self._tokens(range(rank - rank % tp, rank - rank % tp + tp))]
        ((self.x, _),) = self._tokens([rank])
        self.x.requires_grad_()
        self.labels = torch.cat(labels, dim=1)
        self.last_loss: Tensor | None = None
        self.memory: dict[str, int] | None = None
        """The memory of the warm-up."""

    def _tokens(self, ranks: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Make hidden states and labels for each rank."""
        for rank in ranks:
            generator = torch.Generator(self.device).manual_seed(rank)
            ids = torch.randint(
                self.head.vocab_size, (1, self.head.num_tokens), generator=generator, device=self.device
            )
            x = torch.randn(1, self.head.num_tokens, self.head.hidden_size, generator=generator, device=self.device)
            yield x.to(self.head.dtype), ids

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.forget_gradients()
            for _ in range(self.head.num_passes):
                loss = self.module(self.x, self.labels, reduction="sum")
                (loss / self.labels.numel()).backward()
                self.last_loss = loss.detach()
                self.x.grad = None
        if self.memory is None and self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) - self.allocated_before
            self.memory = {"held_bytes": allocated(self.device) - self.allocated_before, "peak_bytes": peak}

    def forget_gradients(self) -> None:
        self.x.grad = self.module.get_parameter("weight").grad = None

    def loss(self) -> float:
        """The mean over the tokens whose losses this rank has."""
        assert self.last_loss is not None
        return self.last_loss.item() / self.labels.numel()

    def close(self) -> None:
        pass


def vocabulary(head: Head, judges: bool, **rounds: Any) -> Case:
    """A whole head on each rank against one over all."""
    degrees = {WHOLE: 1, CUT: head.num_ranks}
    conditions = {"vocabulary": head.vocab_size, "hidden size": head.hidden_size}
    conditions |= {"batch": f"{head.num_passes} times {head.num_tokens} tokens a rank"}
    return Case(
        name="vocabulary",
        contenders={name: partial(Heads, head, tp) for name, tp in degrees.items()},
        peer=WHOLE,
        limits={CUT: 1.0} if judges else {},
        afterwards=partial(accounts, {name: head.account(tp) for name, tp in degrees.items()}),
        num_processes=head.num_ranks,
        conditions=conditions | {"dtype": str(head.dtype).removeprefix("torch.")},
        **rounds,
    )
