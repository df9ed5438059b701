"""Draws one layer of traced steps on a GPU, and prints how long messages ran with no other kernel beside them.

    python -m tests.benchmarks.profile_picture layer.png "all-to-all=before/rank_0.trace.json.gz" "peer=after/..."

The traces are those of `StepProfile`, of a model whose blocks are recomputed. A layer's forward is the time from one
forward of attention to the next, and its backward that from one backward of attention to the next. The layer in the
middle of each is drawn. Times are of the device.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from lightning_d9d.metrics.profiled import COMMUNICATION, PARTS_OF_PEER_KERNELS, Kernel, device_use, part_of

GRADIENTS = ("AllReduce", "ReduceScatter")
"""Texts in the names of kernels that sum gradients over replicas."""
KINDS = {
    "messages of experts": "#d62728",
    "sums of gradients": "#ff9896",
    "attention": "#9467bd",
    "experts' products": "#1f77b4",
    "other products": "#aec7e8",
    "copies of tokens": "#ff7f0e",
    "all else": "#999999",
}
"""Kinds of kernels, with their colours."""
_BY_TEXT = {
    "sdpa": "attention", "flash": "attention", "cutlass": "experts' products", "quack": "experts' products",
    "nvjet": "other products", "gemm": "other products", "moe_": "copies of tokens",
}  # fmt: skip
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def kind_of(name: str) -> str:
    """Return the kind of a kernel."""
    if part_of(name) == COMMUNICATION:
        return "sums of gradients" if any(text in name for text in GRADIENTS) else "messages of experts"
    if name in PARTS_OF_PEER_KERNELS:
        return "copies of tokens"
    return next((kind for text, kind in _BY_TEXT.items() if text in name), "all else")


def kernels_of(trace: Path) -> list[Kernel]:
    """Return the kernels of a trace in the order of their starts, in microseconds."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    found = [
        Kernel(event["name"], str(event["args"]["stream"]), event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in _ON_DEVICE
    ]
    return sorted(found, key=lambda kernel: kernel.begin)


def alone(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Return the milliseconds in which only messages of experts ran, only sums of gradients, and only both."""
    without = {kind: [each for each in kernels if kind_of(each.name) != kind] for kind in list(KINDS)[:2]}
    busy = device_use(kernels).busy
    found = {kind: busy - device_use(others).busy for kind, others in without.items()}
    return {kind: us / 1e3 for kind, us in found.items()} | {"both": device_use(kernels).communication_alone / 1e3}


def layers(kernels: Sequence[Kernel]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return begin and end of a layer's forward, and of a layer's backward.

    Raises:
        ValueError: The trace has no two layers.
    """
    passes = [kernel for kernel in kernels if kind_of(kernel.name) == "attention"]
    is_backward = ["bprop" in kernel.name or "bwd" in kernel.name for kernel in passes]
    pairs = list(zip(passes, passes[1:], is_backward, is_backward[1:], strict=False))
    forwards = [(a.begin, b.begin) for a, b, first, second in pairs if not first and not second]
    starts = [kernel.begin for kernel, backward in zip(passes, is_backward, strict=True) if backward]
    backwards = list(pairwise(starts))
    if not forwards or not backwards:
        raise ValueError("the trace has no two layers with forward and backward: profile more of them")
    return forwards[len(forwards) // 2], backwards[len(backwards) // 2]


def draw(traces: Iterable[tuple[str, Sequence[Kernel]]], path: Path) -> None:
    """Draw a row of two pictures for each trace: the forward and the backward of a layer, a line for each stream."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    traces = list(traces)
    figure = Figure(figsize=(14, 1.9 * len(traces) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(traces), 2, squeeze=False, sharex="col", width_ratios=(1, 3))
    for row, (name, kernels) in zip(axes, traces, strict=True):
        for at, title, (begin, end) in zip(
            row, ("forward", "recomputation and backward"), layers(kernels), strict=True
        ):
            shown = [each for each in kernels if each.end > begin and each.begin < end]
            streams = sorted({each.stream for each in shown}, key=lambda stream: -_busy(shown, stream))
            for each in shown:
                left, right = max(each.begin, begin), min(each.end, end)
                bar = [((left - begin) / 1e3, (right - left) / 1e3)]
                at.broken_barh(bar, (-streams.index(each.stream) - 0.4, 0.8), color=KINDS[kind_of(each.name)])
            at.set_title(f"{name}, {title}: {(end - begin) / 1e3:.2f} ms", fontsize=10, loc="left")
            at.set_yticks([])
            at.spines[["top", "right", "left"]].set_visible(False)
    for at in axes[-1]:
        at.set_xlabel("ms")
        at.set_xlim(left=0)
    patches = [Patch(color=colour, label=kind) for kind, colour in KINDS.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(KINDS), fontsize=9, frameon=False)
    figure.savefig(path, dpi=110)


def _busy(kernels: Iterable[Kernel], stream: str) -> float:
    return sum(kernel.end - kernel.begin for kernel in kernels if kernel.stream == stream)


def main(arguments: Sequence[str]) -> None:
    """Draw, and print what ran alone."""
    path, *pairs = arguments
    traces = [(name, kernels_of(Path(trace))) for name, _, trace in (pair.partition("=") for pair in pairs)]
    for name, kernels in traces:
        parts = ", ".join(f"{kind} {ms:.2f}" for kind, ms in alone(kernels).items())
        print(f"{name}: ms with only messages, of all steps of the trace: {parts}")
    draw(traces, Path(path))


if __name__ == "__main__":
    main(sys.argv[1:])
