"""Where the steps of contenders differ: kernels, gaps between them, calls of the host that take long, allocations.

Times are of a trace of the device. It has all threads, as a fit runs in one of its own.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_d9d.metrics.profiled import LONG_GAP, Kernel, device_use, short
from lightning_d9d.ops.stochastic_adamw import MultiTensorAdamW
from lightning_d9d.strategy.step_in_backward import StepInBackward
from tests.benchmarks.frame import Contender

STEPS = 3
_TIMED: dict[str, tuple[type, str]] = {
    "parts of a step": (StepInBackward, "_update"),
    "updates of many tensors": (MultiTensorAdamW, "__call__"),
}
"""What the host does that is timed by itself, the second within the first."""
_COUNTS = ("num_device_alloc", "num_device_free", "num_alloc_retries", "num_sync_all_streams")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST = ("cuda_runtime", "cuda_driver")
_SHOWN = 30


def profiles(contenders: Mapping[str, Contender], device: torch.device) -> dict[str, dict[str, Any]]:
    """Profile some steps of each contender. On a CPU only the host is timed. Local."""
    return {name: {"profile": profiled(contender, device)} for name, contender in contenders.items()}


def profiled(contender: Contender, device: torch.device) -> dict[str, Any]:
    """Return milliseconds and counts of a step, as means over `STEPS`."""
    on_cuda = device.type == "cuda"
    before, calls = _allocations(device), dict.fromkeys(_TIMED, 0)
    seconds = dict.fromkeys(_TIMED, 0.0)
    with ExitStack() as stack:
        for name, (owner, method) in _TIMED.items():
            stack.enter_context(patch.object(owner, method, _timed(getattr(owner, method), name, seconds, calls)))
        begin = time.perf_counter()
        contender.run(STEPS)
        launched = time.perf_counter() - begin
        if on_cuda:
            torch.cuda.synchronize(device)
        ended = time.perf_counter() - begin
    found: dict[str, Any] = {
        "host": {name: {"calls": calls[name] / STEPS, "ms": 1e3 * seconds[name] / STEPS} for name in _TIMED},
        "launched_ms": 1e3 * launched / STEPS,
        "step_ms": 1e3 * ended / STEPS,
        "allocations": {name: (count - before[name]) / STEPS for name, count in _allocations(device).items()},
    }
    return found | of_trace(_traced(contender), STEPS) if on_cuda else found


def _timed(method: Any, name: str, seconds: dict[str, float], calls: dict[str, int]) -> Any:
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            seconds[name] += time.perf_counter() - begin
            calls[name] += 1

    return timed


def _allocations(device: torch.device) -> dict[str, int]:
    """Count what the allocator has asked of the device."""
    statistics = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    return {name: statistics.get(name, 0) for name in _COUNTS}


def _traced(contender: Contender) -> list[dict[str, Any]]:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        contender.run(STEPS)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def of_trace(events: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """Sum up a trace by the step.

    Args:
        events: As Chrome's format has them, in microseconds.
        steps: How many there are in it.

    Returns:
        `kernels` and `calls` of the host by name, each with `calls` and `ms`. `streams`: of each `ms` of kernels.
        `idle_ms`: when no stream has any. `launches`: kernels. `gaps`: the longest ones.
    """
    kernels = _by_name((each for each in events if each.get("cat") in _DEVICE), steps)
    calls = _by_name((each for each in events if each.get("cat") in _HOST), steps)
    use = device_use(
        Kernel(each["name"], str(each["args"].get("stream", each["tid"])), each["ts"], each["ts"] + each["dur"])
        for each in events
        if each.get("cat") in _DEVICE
    )
    return {
        "kernels": kernels,
        "calls": calls,
        "streams": {stream: its / steps / 1e3 for stream, its in use.streams.items()},
        "busy_ms": use.busy / steps / 1e3,
        "idle_ms": use.idle / steps / 1e3,
        "long_gaps": use.num_long_gaps / steps,
        "launches": use.num_kernels / steps,
        "gaps": use.gaps,
    }


def _by_name(events: Any, steps: int) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = defaultdict(lambda: {"calls": 0.0, "ms": 0.0})
    for each in events:
        found[each["name"]]["calls"] += 1 / steps
        found[each["name"]]["ms"] += each.get("dur", 0) / steps / 1e3
    return dict(found)


def table(profiles: Mapping[str, Mapping[str, Any]]) -> str:
    """What a person reads, in Markdown: contenders beside each other, and what differs most first."""
    names = [*profiles]
    lines = ["", _row(["a step", *names]), _row(["---"] * (1 + len(names)))]
    first = profiles[names[0]]
    scalars = {"step_ms": "ms", "launched_ms": "ms until the host has launched it"}
    scalars |= {"launches": "kernels", "busy_ms": "ms with a kernel", "idle_ms": "ms without"}
    scalars["long_gaps"] = f"gaps of more than {LONG_GAP:.0f} us"
    for key, text in scalars.items():
        if key in first:
            lines.append(_row([text, *(f"{profiles[name][key]:.2f}" for name in names)]))
    for text in _TIMED:
        of_host = [profiles[name]["host"][text] for name in names]
        lines.append(_row([f"host: {text}", *(f"{each['calls']:.1f} in {each['ms']:.2f} ms" for each in of_host)]))
    for key in first["allocations"]:
        lines.append(_row([key, *(f"{profiles[name]['allocations'][key]:.1f}" for name in names)]))
    for key, head in (("calls", "call of the host"), ("kernels", "kernel")):
        if key in first:
            lines += ["", *_compared({name: profiles[name][key] for name in names}, head)]
    for name in names:
        if "gaps" in profiles[name]:
            of_streams = ", ".join(f"stream {key}: {ms:.2f} ms" for key, ms in profiles[name]["streams"].items())
            lines += ["", f"{name}: {of_streams}. Longest gaps:", ""]
            lines += [f"- {us:.0f} us, {short(last)} -> {short(then)}" for us, last, then in profiles[name]["gaps"]]
    return "\n".join(lines)


def _compared(by_contender: Mapping[str, Mapping[str, Mapping[str, float]]], head: str) -> list[str]:
    names, none = [*by_contender], {"calls": 0.0, "ms": 0.0}
    rows = []
    for key in dict.fromkeys(key for each in by_contender.values() for key in each):
        values = [by_contender[name].get(key, none) for name in names]
        rows.append((max(v["ms"] for v in values) - min(v["ms"] for v in values), key, values))
    rows.sort(key=lambda row: -row[0])
    lines = [_row([head, *(f"{name}, ms" for name in names), *(f"{name}, calls" for name in names)])]
    lines.append(_row(["---"] * (1 + 2 * len(names))))
    for _, key, values in rows[:_SHOWN]:
        numbers = [f"{each['ms']:.3f}" for each in values] + [f"{each['calls']:.1f}" for each in values]
        lines.append(_row([short(key), *numbers]))
    total = [f"{sum(each['ms'] for each in by_contender[name].values()):.3f}" for name in names]
    return [*lines, _row(["all", *total, *[""] * len(names)])]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
