"""A mixture of experts with adapters against the same one frozen, forward and backward, on one GPU.

All contenders compute the gradient of their input; with adapters also those of the adapters. "separate" takes the same
adapters as products of their own, which pass over all rows. After the rounds a step of each is profiled.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_d9d.modules import SparseMoE
from lightning_d9d.ops import adapted_experts
from lightning_d9d.peft import LoRA, inject
from tests.benchmarks import __main__ as main
from tests.benchmarks.frame import Case, Contender

PEER = "frozen"
RANKS = {2: 1.15, 16: 1.25}
"""The most time that adapters of each rank may take, as a ratio to the frozen model's."""
KERNELS = 30
"""The number of kernels of a profile that are listed, those that take longest."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every contender computes."""

    hidden_size: int = 2048
    intermediate_size: int = 768
    num_experts: int = 128
    top_k: int = 8
    num_tokens: int = 16_384
    dtype: torch.dtype = torch.bfloat16


QUICK = Work(hidden_size=32, intermediate_size=16, num_experts=4, top_k=2, num_tokens=64, dtype=torch.float32)


def cases(device_type: str, quick: bool) -> list[Case]:
    """One, at the sizes of `30b-a3b`."""
    if quick or device_type == "cpu":
        return [case(QUICK, judges=False, warmup_steps=1, block_steps=1, repeats=2 if quick else 12)]
    return [case(Work(), judges=True, warmup_steps=5, block_steps=20, repeats=12)]


def case(work: Work, judges: bool, **rounds: Any) -> Case:
    """Both ranks, and both as separate products."""
    adapted = {f"rank {rank}": partial(Layer, work, rank) for rank in RANKS}
    separate = {f"rank {rank}, separate": partial(Layer, work, rank, separate=True) for rank in RANKS}
    return Case(
        name="mixture of experts",
        contenders={PEER: partial(Layer, work, None), **adapted, **separate},
        peer=PEER,
        limits={f"rank {rank}": most for rank, most in RANKS.items()} if judges else {},
        afterwards=profiles,
        min_step_seconds=0.0,
        conditions={
            "hidden size": work.hidden_size,
            "intermediate size": work.intermediate_size,
            "experts": f"{work.top_k} of {work.num_experts}",
            "tokens": work.num_tokens,
            "dtype": str(work.dtype).removeprefix("torch."),
        },
        **rounds,
    )


class Layer:
    """One contender; a step is a forward and a backward.

    Args:
        work: What it computes.
        rank: Of adapters; None: there are none.
        device: Where it runs.
        separate: Whether adapters are products of their own.
    """

    def __init__(self, work: Work, rank: int | None, device: torch.device, *, separate: bool = False) -> None:
        torch.manual_seed(0)
        sizes = (work.hidden_size, work.intermediate_size, work.num_experts, work.top_k)
        with device:
            self.module = SparseMoE(*sizes, normalize=True, initializer_range=0.02).to(work.dtype)
        self.module.requires_grad_(False)
        if rank is not None:
            inject(self.module, LoRA(rank, rank_of_experts=rank, targets=["experts"]))
        generator = torch.Generator().manual_seed(1)
        x, self.gradient = (
            torch.randn(work.num_tokens, work.hidden_size, generator=generator).to(device, work.dtype) for _ in range(2)
        )
        self.x = x.requires_grad_()
        self.separate = separate
        self._loss = torch.zeros(())

    def run(self, steps: int) -> None:
        """Forward and backward."""
        for _ in range(steps):
            self.x.grad = None
            self.module.zero_grad()
            with self._products():
                y = self.module(self.x)
                y.backward(self.gradient)
            self._loss = y

    def _products(self) -> AbstractContextManager[Any]:
        return mock.patch.object(adapted_experts, "MOST_RANK", 0) if self.separate else nullcontext()

    def loss(self) -> float:
        """The mean square of the results."""
        return self._loss.detach().float().square().mean().item()

    def close(self) -> None:
        """Nothing is open."""


def profiles(contenders: Mapping[str, Contender], device: torch.device) -> dict[str, dict[str, Any]]:
    """The milliseconds and calls of each kernel, by contender; on a CPU of operators."""
    steps, found = 5, {}
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    for name, contender in contenders.items():
        begin = time.perf_counter()
        contender.run(steps)
        on_host = time.perf_counter() - begin
        with profile(activities=activities, acc_events=True) as profiler:
            contender.run(steps)
            if on_cuda:
                torch.cuda.synchronize()
        kind = torch.autograd.DeviceType.CUDA if on_cuda else torch.autograd.DeviceType.CPU
        kernels = [
            (
                event.key,
                (event.self_device_time_total if on_cuda else event.self_cpu_time_total) / steps / 1e3,
                event.count / steps,
            )
            for event in profiler.key_averages()
            if event.device_type == kind and not event.is_user_annotation
        ]
        kernels.sort(key=lambda kernel: -kernel[1])
        found[name] = {"kernels": kernels, "host_milliseconds": on_host / steps * 1e3}
    return found


def table(result: dict[str, Any], device_type: str) -> str:
    """Ratios, and what each contender's kernels take."""
    lines = [main.table(result, device_type)]
    for name, values in result["contenders"].items():
        total = sum(milliseconds for _, milliseconds, _ in values["kernels"])
        lines.append(f"\n{name}: {total:.3f} ms of kernels, launched in {values['host_milliseconds']:.3f} ms")
        lines += [f"{ms:9.3f} ms {calls:5.1f} x  {key[:100]}" for key, ms, calls in values["kernels"][:KERNELS]]
    return "\n".join(lines)
