"""What a training step consists of, and what each part would take with the best kernels of libraries alone.

The step is profiled once. Time on the device is that of kernels, by the operator that launched them and its shapes,
or by their own name where there is none, as in the optimizer. The ideal of a part is measured in the same process:
products by themselves, attention by itself, and what moves memory at the rate of a copy that moves its bytes once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig
from lightning_d9d.ops import attention, grouped_gemm

ATTENTION, PROJECTIONS, EXPERTS, HEAD = "attention", "projections and router", "experts' products", "head and loss"
COPIES, NORMS, ADAMW, CLIPPING = (
    "permute, SwiGLU, unpermute",
    "norms, rope, residuals",
    "AdamW",
    "norm of the gradients",
)
REST = "all else"
PARTS = (ATTENTION, PROJECTIONS, EXPERTS, HEAD, COPIES, NORMS, ADAMW, CLIPPING, REST)
GAPS = "device waits"

_OPERATORS = (
    ("Optimizer", ADAMW),
    ("_foreach_norm", CLIPPING),
    ("_foreach", ADAMW),
    ("attention", ATTENTION),
    ("FlashAttn", ATTENTION),
    ("grouped", EXPERTS),
    ("linear_cross_entropy", HEAD),
    ("moe_route", REST),
    ("moe_", COPIES),
    ("swiglu", COPIES),
    ("norm", NORMS),
    ("rope", NORMS),
)
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear")
_COPY_BYTES = 2**31
_CHUNK = 2048
"""Tokens of a chunk of logits."""


def part_of(operator: str, shapes: list[Any], vocab_size: int) -> str:
    """Which part of the step an operator belongs to; `shapes` are those of its tensors."""
    if operator in _PRODUCTS:
        is_head = any(vocab_size in shape for shape in shapes if isinstance(shape, list | tuple))
        return HEAD if is_head else PROJECTIONS
    return next((part for name, part in _OPERATORS if name in operator), REST)


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
    seconds = dict.fromkeys(PARTS, 0.0)
    operators, of_kernels = [], 0.0
    for event in profiler.key_averages(group_by_input_shape=True):
        its_seconds = 1e-6 * (event.self_device_time_total if on_cuda else event.self_cpu_time_total)
        if event.device_type == torch.autograd.DeviceType.CPU:
            seconds[part_of(event.key, event.input_shapes, config.vocab_size)] += its_seconds
            operators.append((event.key, str(event.input_shapes), event.count, its_seconds))
        elif not event.is_user_annotation:
            of_kernels += its_seconds
            if "adamw" in event.key:  # launched by no operator, so nothing else counts them
                seconds[ADAMW] += its_seconds
                operators.append((event.key, "", event.count, its_seconds))
    seconds[REST] += max(0.0, of_kernels - sum(seconds.values()))
    ideal = ideals(config, num_rows, sequence_length)
    parts: dict[str, dict[str, float]] = {name: {"seconds": seconds[name]} for name in PARTS}
    for name, value in ideal.items():
        parts[name]["ideal"] = value
    parts[GAPS] = {"seconds": max(0.0, step_seconds - sum(seconds.values())), "ideal": 0.0}
    operators.sort(key=lambda each: -each[3])
    return {"parts": parts, "operators": operators[:10], "step_seconds": step_seconds}


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
        """Of experts that get tokens by chance."""
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
        PROJECTIONS: layers
        * (
            product(tokens, hidden, wide) + product(tokens, heads * head_dim, hidden) + product(tokens, hidden, experts)
        ),
        EXPERTS: layers * (grouped(hidden, 2 * inner) + grouped(inner, hidden)),
        HEAD: chunks * product(_CHUNK, hidden, config.vocab_size) + per_byte * logits,
        COPIES: layers * per_byte * copies,
        NORMS: layers * per_byte * norms,
        ADAMW: per_byte * 7 * config.num_parameters,
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
