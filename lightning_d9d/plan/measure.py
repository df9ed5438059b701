"""Measures the rates of a machine table on a device: products, attention, copies, launches, and links of ranks.

[Note: rates] Each operation runs alone, several times, and the median counts. Products of projections and of experts
have the shapes of a Qwen3-MoE layer. Their rate is the sum of operations over the sum of times, forward and both parts
of the backward. Attention has a rate for each length of a row. A ring of n ranks sends (n - 1)/n of what it gathers.
The host's time is that of blocks of a tiny model, which launch as many kernels as large ones.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.memory.traffic import share_sent
from lightning_d9d.models.qwen3_moe.config import Qwen3MoeConfig
from lightning_d9d.models.qwen3_moe.model import Qwen3MoeModel
from lightning_d9d.modules.adapters import Adapter, ExpertsAdapter, LinearAdapter
from lightning_d9d.ops import attention, grouped_gemm
from lightning_d9d.parallel import ParallelConfig
from lightning_d9d.parallel.recompute import recompute_activations
from lightning_d9d.peft import LoRA, inject
from lightning_d9d.pipeline.types import StageInfo
from lightning_d9d.plan.machine import AttentionRate, MachineTable, shipped
from lightning_d9d.schedule.layers import ATTENTION_BACKWARD, HOST_SECONDS, HostSeconds

_SOME_LAUNCHES = 200
_SOME_MESSAGES = 4
_FEW_TOKENS = 128
_RATES = (
    *("memory_gib", "peak_flops", "linear_flops", "grouped_flops", "attention_forward_flops"),
    *("attention_backward_flops", "copy_bytes", "node_link_bytes", "network_bytes", "latency", "action_seconds"),
    *("host_share", "wait_seconds", "message_slowdown", *HOST_SECONDS),
)
"""The fields of a table that are rates; a table lists those that were not measured."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the operations: by default those of a layer of `30b-a3b` with four rows of 4,096 tokens."""

    tokens: int = 16384
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    vocabulary: int = 151936
    experts: int = 128
    experts_per_token: int = 8
    expert_hidden: int = 768
    rows: tuple[int, ...] = (4096, 16384, 65536)
    """Lengths of rows for attention; a batch has `tokens` tokens, or one row."""
    copy_bytes: int = 2**30
    message_bytes: int = 2**28
    blocks: int = 4
    """Blocks of a tiny model that the host launches."""
    dtype: torch.dtype = torch.bfloat16
    repeats: int = 10


@dataclass(frozen=True)
class Measured:
    """An operation with its time."""

    name: str
    seconds: float
    flops: float = 0.0
    num_bytes: float = 0.0


def seconds_of(action: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median seconds of an action, after two that do not count. Local.

    Args:
        action: The action; on CUDA it is timed by events, so that the host may be ahead.
        device: The device that computes.
        repeats: Number of timed calls.
    """
    for _ in range(2):
        action()
    if device.type != "cuda":
        found = []
        for _ in range(repeats):
            start = time.perf_counter()
            action()
            found.append(time.perf_counter() - start)
        return statistics.median(found)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        action()
        event.record()
    torch.cuda.synchronize(device)
    return statistics.median(a.elapsed_time(b) / 1e3 for a, b in pairwise(events))


def products(sizes: Sizes, device: torch.device) -> Iterator[Measured]:
    """Measure projections and the head: forward, gradient of the input, gradient of the weight. Local."""
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    shapes = {
        "queries": (queries, sizes.hidden),
        "keys": (keys, sizes.hidden),
        "results": (sizes.hidden, queries),
        "vocabulary": (sizes.vocabulary, sizes.hidden),
    }
    for name, (num_out, num_in) in shapes.items():
        tokens = sizes.tokens // 4 if name == "vocabulary" else sizes.tokens  # logits come in chunks
        x, weight = _drawn(device, sizes, tokens, num_in), _drawn(device, sizes, num_out, num_in)
        gradient = _drawn(device, sizes, tokens, num_out)
        flops = 2.0 * tokens * num_in * num_out
        for part, action in (
            ("forward", lambda x=x, weight=weight: x @ weight.T),
            ("input", lambda g=gradient, weight=weight: g @ weight),
            ("weight", lambda g=gradient, x=x: g.T @ x),
        ):
            found = seconds_of(action, device, sizes.repeats)
            yield Measured(f"{name}, {part}, {tokens} x {num_in} x {num_out}", found, flops)


def grouped_products(sizes: Sizes, device: torch.device) -> Iterator[Measured]:
    """Measure the experts' products, with as many tokens for each: forward, and all of the backward. Local."""
    copies = sizes.tokens * sizes.experts_per_token // sizes.experts * sizes.experts
    ends = torch.arange(1, sizes.experts + 1, dtype=torch.int32, device=device) * (copies // sizes.experts)
    for name, num_out, num_in in (
        ("gate and up", 2 * sizes.expert_hidden, sizes.hidden),
        ("down", sizes.hidden, sizes.expert_hidden),
    ):
        x = _drawn(device, sizes, copies, num_in).requires_grad_()
        weight = _drawn(device, sizes, sizes.experts, num_out, num_in).requires_grad_()
        gradient = _drawn(device, sizes, copies, num_out)
        flops, shape = 2.0 * copies * num_in * num_out, f"{copies} x {num_in} x {num_out}"

        def forward(x: Tensor = x, weight: Tensor = weight) -> Tensor:
            return grouped_gemm(x, weight, ends)

        result = forward()

        def backward(result: Tensor = result, inputs: Sequence[Tensor] = (x, weight), g: Tensor = gradient) -> None:
            torch.autograd.grad(result, inputs, g, retain_graph=True)

        yield Measured(f"{name}, forward, {shape}", seconds_of(forward, device, sizes.repeats), flops)
        yield Measured(f"{name}, backward, {shape}", seconds_of(backward, device, sizes.repeats), 2 * flops)


def attention_rates(sizes: Sizes, device: torch.device) -> Iterator[tuple[int, Measured, Measured]]:
    """Measure attention's forward and backward for each length of a row. Local."""
    for length in sizes.rows:
        rows = max(1, sizes.tokens // length)
        shape = (rows, sizes.heads, length, sizes.head_dim)
        q = _drawn(device, sizes, *shape).requires_grad_()
        k, v = (_drawn(device, sizes, rows, sizes.kv_heads, length, sizes.head_dim).requires_grad_() for _ in range(2))
        gradient = _drawn(device, sizes, *shape)
        flops = 2.0 * rows * length**2 * sizes.heads * sizes.head_dim  # half of the square, two products
        result = attention(q, k, v)

        def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return attention(q, k, v)

        def backward(result: Tensor = result, inputs: Sequence[Tensor] = (q, k, v), g: Tensor = gradient) -> None:
            torch.autograd.grad(result, inputs, g, retain_graph=True)

        yield (
            length,
            Measured(f"attention, forward, {length}", seconds_of(forward, device, sizes.repeats), flops),
            Measured(
                f"attention, backward, {length}",
                seconds_of(backward, device, sizes.repeats),
                ATTENTION_BACKWARD * flops,
            ),
        )


def copy(sizes: Sizes, device: torch.device) -> Measured:
    """Measure a copy, with the bytes read and written. Local."""
    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found = seconds_of(lambda: target.copy_(source), device, sizes.repeats)
    return Measured("copy", found, num_bytes=2.0 * sizes.copy_bytes)


def launch(device: torch.device) -> Measured:
    """Measure the host's time to launch an empty kernel. Local."""
    value = torch.zeros(1, device=device)
    found = []
    for _ in range(3):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(_SOME_LAUNCHES):
            value.add_(1)
        found.append((time.perf_counter() - start) / _SOME_LAUNCHES)
    return Measured("launch", min(found))


@dataclass(frozen=True)
class HostBlocks:
    """Blocks of a tiny model, which launch as many kernels as those of a large one."""

    preset: Literal["tiny", "tiny-dense"]
    """The model, with experts or without."""
    has_adapters: bool
    """True if all projections and experts have adapters, beside frozen weights."""

    @property
    def name(self) -> str:
        """Its name in tables."""
        return f"{self.preset} with adapters" if self.has_adapters else self.preset

    def build(self, device: torch.device, number: int) -> Qwen3MoeModel:
        """Build so many blocks, without embedding and head."""
        config = Qwen3MoeConfig.preset(self.preset)
        blocks = Qwen3MoeModel(config, StageInfo(1, 3, range(number))).to(device, torch.bfloat16)
        if self.has_adapters:
            inject(blocks, LoRA())
        return blocks

    def num_adapters(self, kind: type[Adapter]) -> int:
        """Return the number of adapters of a kind in a block."""
        return sum(isinstance(part, kind) for part in self.build(torch.device("meta"), 1).modules())


SPARSE, ADAPTED_SPARSE = HostBlocks("tiny", False), HostBlocks("tiny", True)
DENSE, ADAPTED_DENSE = HostBlocks("tiny-dense", False), HostBlocks("tiny-dense", True)


def host_seconds(device: torch.device, repeats: int = 10, blocks: int = 4) -> dict[HostBlocks, dict[str, Measured]]:
    """Measure the host's time to launch forward and backward of a block, by kind of block and recomputation. Local.

    Kernels are so small that the device waits for the host, and the time to wait for the device does not count. The
    kinds take turns: whatever else slows the host then slows all of them alike.

    Args:
        device: The device that computes.
        repeats: Number of timed calls of each; the median counts.
        blocks: Number of blocks in a call.
    """
    built = {of: of.build(device, blocks) for of in (SPARSE, ADAPTED_SPARSE, DENSE, ADAPTED_DENSE)}
    found = {(of, kind): list[float]() for of in built for kind in HostSeconds._fields}
    for _ in range(2 + repeats):
        for (of, kind), seconds in found.items():
            recompute_activations(built[of], ParallelConfig(recompute=kind))
            seconds.append(_launched(built[of], device))
    return {
        of: {
            kind: Measured(f"host, a block of {of.name}, recompute {kind}", statistics.median(found[of, kind][2:]))
            for kind in HostSeconds._fields
        }
        for of in built
    }


def _launched(blocks: Qwen3MoeModel, device: torch.device) -> float:
    """Return the seconds of the host for forward and backward of a block."""
    x = torch.randn(1, _FEW_TOKENS, blocks.config.hidden_size, device=device, dtype=torch.bfloat16, requires_grad=True)
    blocks.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = blocks(hidden_states=x)["hidden_states"]
    torch.autograd.backward(result, torch.ones_like(result))
    return (time.perf_counter() - start) / len(blocks.layers)


def host_fields(measured: Mapping[HostBlocks, Mapping[str, Measured]]) -> dict[str, HostSeconds]:
    """Return the fields of a machine table that `host_seconds` gives. Local.

    An adapter of a linear layer adds its share of the difference between dense blocks. What such adapters do not
    explain of the difference between blocks with experts is shared by the adapters of experts.
    """
    sparse, adapted_sparse, dense, adapted_dense = (
        [measured[of][kind].seconds for kind in HostSeconds._fields]
        for of in (SPARSE, ADAPTED_SPARSE, DENSE, ADAPTED_DENSE)
    )
    num_linear = ADAPTED_DENSE.num_adapters(LinearAdapter)
    linear = [max(0.0, more - less) / num_linear for more, less in zip(adapted_dense, dense, strict=True)]
    others, num_experts = (ADAPTED_SPARSE.num_adapters(kind) for kind in (LinearAdapter, ExpertsAdapter))
    experts = [
        max(0.0, more - less - others * each) / num_experts
        for more, less, each in zip(adapted_sparse, sparse, linear, strict=True)
    ]
    return dict(zip(HOST_SECONDS, map(HostSeconds._make, (sparse, dense, linear, experts)), strict=True))


def links(sizes: Sizes, device: torch.device, group: dist.ProcessGroup | None = None) -> dict[str, Measured]:
    """Measure messages of each kind, and one so small that its time is latency. Collective over the group.

    Returns:
        The time and the bytes that a rank sends, by kind: "all_gather" and "all_to_all" of bytes, "reduce_scatter" and
        "all_reduce" of float32, and "small message".
    """
    size = dist.get_world_size(group)
    own = torch.zeros(sizes.message_bytes // size, dtype=torch.uint8, device=device)
    whole, tiny = own.new_empty(size * len(own)), torch.zeros(1, device=device)
    numbers, part = whole.view(torch.float32).zero_(), own.view(torch.float32)
    other = torch.empty_like(whole)
    sent = len(whole) * share_sent(size)
    actions: dict[str, tuple[Callable[[], object], float]] = {
        "all_gather": (lambda: dist.all_gather_into_tensor(whole, own, group=group), sent),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(part, numbers, group=group), sent),
        "all_reduce": (lambda: dist.all_reduce(numbers, group=group), 2 * sent),
        "all_to_all": (lambda: dist.all_to_all_single(other, whole, group=group), sent),
        "small message": (lambda: dist.all_reduce(tiny, group=group), 0.0),
    }
    return {
        name: Measured(name, seconds_of(action, device, sizes.repeats), num_bytes=num_bytes)
        for name, (action, num_bytes) in actions.items()
    }


def beside(sizes: Sizes, device: torch.device, group: dist.ProcessGroup | None = None) -> list[tuple[float, Measured]]:
    """Measure products and copies beside messages, which take processors and bandwidth. Collective over the group.

    Returns:
        For each computation the time that it loses, as a share of the messages' own time, and its time beside them.
    """
    own = torch.zeros(sizes.message_bytes // dist.get_world_size(group), dtype=torch.uint8, device=device)
    whole = own.new_empty(dist.get_world_size(group) * len(own))
    numbers, part = whole.view(torch.float32).zero_(), own.view(torch.float32)
    x, weight = _drawn(device, sizes, sizes.tokens, sizes.hidden), _drawn(device, sizes, sizes.hidden, sizes.hidden)
    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    computed = {"products": lambda: x @ weight.T, "copies": lambda: target.copy_(source)}
    messages: dict[str, Callable[[], Any]] = {
        "gathers": lambda: dist.all_gather_into_tensor(whole, own, group=group, async_op=True),
        "scattered sums": lambda: dist.reduce_scatter_tensor(part, numbers, group=group, async_op=True),
    }
    found = []
    for what, message in messages.items():
        alone = _SOME_MESSAGES * seconds_of(lambda m=message: m().wait(), device, sizes.repeats)
        for name, action in computed.items():
            times = torch.tensor([2 * alone / seconds_of(action, device, sizes.repeats)], device=device)
            dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
            number = max(1, math.ceil(times.item()))

            def repeated(action: Callable[[], object] = action, number: int = number) -> None:
                for _ in range(number):
                    action()

            def together(message: Callable[[], Any] = message, repeated: Callable[[], None] = repeated) -> None:
                works = [message() for _ in range(_SOME_MESSAGES)]
                repeated()
                for work in works:
                    work.wait()

            base = seconds_of(repeated, device, sizes.repeats)
            both = seconds_of(together, device, sizes.repeats)
            found.append(((both - base) / alone, Measured(f"{name} beside {what}", both)))
    return found


def link_fields(
    sizes: Sizes, device: torch.device, group: dist.ProcessGroup, num_nodes: int = 1
) -> tuple[dict[str, float], list[Measured]]:
    """Measure links, and what messages slow down. Collective over the group, which spans so many nodes.

    Returns:
        Fields of a machine table, and each operation.
    """
    of_kinds = links(sizes, device, group)
    gathered, small = of_kinds["all_gather"], of_kinds["small message"]
    size = dist.get_world_size(group)
    slowed = beside(sizes, device, group)
    values = {
        "network_bytes" if num_nodes > 1 else "node_link_bytes": gathered.num_bytes / gathered.seconds,
        "latency": small.seconds / (2 * (size - 1)),  # a sum goes round twice
        "gpus_per_node": size // num_nodes,
        "message_slowdown": max(0.0, statistics.fmean(share for share, _ in slowed)),
    }
    return values, [*of_kinds.values(), *(replace(each, name=f"{each.name}: {share:.3f}") for share, each in slowed)]


def measure(
    device: torch.device, sizes: Sizes | None = None, *, group: dist.ProcessGroup | None = None, num_nodes: int = 1
) -> tuple[MachineTable, list[Measured]]:
    """Measure a device, and its links where there are several ranks. Collective over the group, if there is one.

    Rates that are not measured are those of the shipped table with the same device name, else the H200's.

    Args:
        device: This rank's device.
        sizes: Sizes of the operations; None: a layer of `30b-a3b`.
        group: The ranks whose links are measured; None: no links.
        num_nodes: The nodes that the group spans.

    Returns:
        The table, and each operation.
    """
    sizes = sizes or Sizes()
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else str(device)
    tables = shipped()
    base = next((table for table in tables.values() if table.device == name), tables["h200"])
    linear, grouped = list(products(sizes, device)), list(grouped_products(sizes, device))
    attended = list(attention_rates(sizes, device))
    copied, launched = copy(sizes, device), launch(device)
    hosted = host_seconds(device, sizes.repeats, sizes.blocks)
    rates = tuple(AttentionRate(length, _rate([f]), _rate([b])) for length, f, b in attended)
    values: dict[str, object] = {
        "device": name,
        "linear_flops": _rate(linear),
        "grouped_flops": _rate(grouped),
        "attention_forward_flops": rates[0].forward_flops,
        "attention_backward_flops": rates[0].backward_flops,
        "attention_by_tokens": rates,
        "copy_bytes": copied.num_bytes / copied.seconds,
        "launch_seconds": launched.seconds,
        **host_fields(hosted),
    }
    if is_gpu:
        values["memory_gib"] = torch.cuda.get_device_properties(device).total_memory / 2**30
    rows = [*linear, *grouped, *(each for _, f, b in attended for each in (f, b)), copied, launched]
    rows += [each for of in hosted.values() for each in of.values()]
    if group is not None:
        of_links, more = link_fields(sizes, device, group, num_nodes)
        values |= of_links
        rows += more
    missing = tuple(each for each in _RATES if each not in values)
    source = f"measured by `lightning-d9d doctor --measure` with torch {torch.__version__}; not measured: {base.source}"
    return replace(base, **values, not_measured=missing, source=source), rows  # type: ignore[arg-type]


def _rate(measured: Sequence[Measured]) -> float:
    return sum(each.flops for each in measured) / sum(each.seconds for each in measured)


def _drawn(device: torch.device, sizes: Sizes, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=sizes.dtype)
