"""What a training step consists of, and what each part would take with the best kernels of libraries alone.

The step is profiled once, and summed up by `lightning_d9d.metrics.profiled_steps`. The ideal of a part is measured in
the same process: products by themselves, attention by itself, and what moves memory at the rate of a copy that moves
its bytes once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lightning_d9d.metrics.profiled import (
    ATTENTION,
    EXPERTS,
    GAPS,
    HEAD,
    NORMS,
    OPTIMIZER,
    PERMUTES,
    PRODUCTS,
    profiled_steps,
)
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig
from lightning_d9d.ops import attention, grouped_gemm

_COPY_BYTES = 2**31
_CHUNK = 2048
"""Tokens of a chunk of logits."""


def measure(step: Callable[[], None], config: Qwen3MoeConfig, num_rows: int, sequence_length: int) -> dict[str, Any]:
    """Seconds of each part of a step and the ideal ones; operators by their time. The step has run before.

    Returns:
        `parts`, by name: `seconds`, and `ideal` where there is one; `operators`: name, shapes, calls and seconds of the
        ten that take longest; `step_seconds`, under the profiler.
    """
    on_cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    _synchronize()
    with profile(activities=activities, record_shapes=True, acc_events=True) as profiler:
        start = time.perf_counter()
        step()
        _synchronize()
        step_seconds = time.perf_counter() - start
    found = profiled_steps(profiler, step_seconds, vocab_size=config.vocab_size)
    ideal = ideals(config, num_rows, sequence_length)
    parts: dict[str, dict[str, float]] = {name: {"seconds": seconds} for name, seconds in found.parts.items()}
    for name, value in {**ideal, GAPS: 0.0}.items():
        parts[name]["ideal"] = value
    operators = [tuple(each) for each in found.operators]
    return {"parts": parts, "operators": operators, "step_seconds": step_seconds}


def ideals(config: Qwen3MoeConfig, num_rows: int, sequence_length: int) -> dict[str, float]:
    """Seconds of each part, as the best kernels of libraries run by themselves in this process."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    layers, tokens, hidden = config.num_hidden_layers, num_rows * sequence_length, config.hidden_size
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    top_k, inner, experts = config.num_experts_per_tok, config.moe_intermediate_size, config.num_experts
    rows, wide = tokens * top_k, (heads + 2 * kv_heads) * head_dim

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    def product(rows: int, inputs: int, outputs: int) -> float:
        """Forward and both gradients."""
        x, weight, dy = make(rows, inputs), make(outputs, inputs), make(rows, outputs)
        return sum(_time(each) for each in (lambda: x @ weight.t(), lambda: dy @ weight, lambda: dy.t() @ x))

    def both_passes(op: Callable[..., Tensor], *operands: Tensor) -> float:
        leaves = [operand.requires_grad_() for operand in operands]
        out = op(*leaves)
        dy = torch.randn_like(out)
        backward = _time(lambda: torch.autograd.grad(out, leaves, dy, retain_graph=True))
        return _time(lambda: op(*leaves)) + backward

    def grouped(inputs: int, outputs: int) -> float:
        """Return the seconds of experts that get tokens by chance."""
        chosen = torch.rand(tokens, experts, device=device).topk(top_k).indices
        offsets = torch.bincount(chosen.flatten(), minlength=experts).cumsum(0).int()
        x, weight = make(rows, inputs), make(experts, outputs, inputs)
        return both_passes(lambda x, weight: grouped_gemm(x, weight, offsets), x, weight)

    q = make(num_rows, heads, sequence_length, head_dim)
    k, v = (make(num_rows, kv_heads, sequence_length, head_dim) for _ in range(2))
    source = torch.empty(_COPY_BYTES if device == "cuda" else 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    per_byte = _time(lambda: target.copy_(source)) / (2 * source.numel()) * dtype.itemsize
    copies = 2 * (tokens + rows) * hidden * 2 + rows * inner * (3 + 5)
    turned = (heads + kv_heads) * head_dim
    norms = tokens * (2 * (4 + 4) * hidden + (2 + 3) * turned)  # with residuals, forward and backward
    chunks = -(-tokens // _CHUNK)
    logits = 2 * tokens * config.vocab_size
    return {
        ATTENTION: layers * both_passes(attention, q, k, v),
        PRODUCTS: layers
        * (
            product(tokens, hidden, wide) + product(tokens, heads * head_dim, hidden) + product(tokens, hidden, experts)
        ),
        EXPERTS: layers * (grouped(hidden, 2 * inner) + grouped(inner, hidden)),
        HEAD: chunks * product(_CHUNK, hidden, config.vocab_size) + per_byte * logits,
        PERMUTES: layers * per_byte * copies,
        NORMS: layers * per_byte * norms,
        OPTIMIZER: per_byte * 7 * config.num_parameters,
    }


def table(measured: Mapping[str, Any]) -> str:
    """What a person reads, in Markdown."""
    parts = measured["parts"]
    rows = [["part", "ideal ms", "ours ms", "lost ms", "share of the step"], ["---"] * 5]
    for name, values in parts.items():
        ours, ideal = values["seconds"], values.get("ideal")
        ideals = ["", ""] if ideal is None else [f"{1e3 * ideal:.1f}", f"{1e3 * (ours - ideal):.1f}"]
        rows.append([name, ideals[0], f"{1e3 * ours:.1f}", ideals[1], f"{ours / measured['step_seconds']:.1%}"])
    ideal = sum(values.get("ideal", 0) for values in parts.values())
    ours = measured["step_seconds"]
    rows.append(
        ["the step, under the profiler", f"{1e3 * ideal:.1f}", f"{1e3 * ours:.1f}", f"{1e3 * (ours - ideal):.1f}", ""]
    )
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", "| operator | shapes | calls | ms |", "|---|---|---|---|"]
    lines += [f"| {key} | {shapes} | {calls} | {1e3 * s:.2f} |" for key, shapes, calls, s in measured["operators"]]
    return "\n".join(lines)


def _time(run: Callable[[], Any]) -> float:
    """Seconds of a call, the median of some."""
    samples = []
    for _ in range(3 if torch.cuda.is_available() else 1):
        run()
    for _ in range(10 if torch.cuda.is_available() else 1):
        _synchronize()
        start = time.perf_counter()
        run()
        _synchronize()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
