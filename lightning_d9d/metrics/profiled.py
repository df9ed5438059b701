"""Sums up a profile of training steps: the time of each part, and when the device was idle.

On a GPU, times are those of kernels, by the operator that launched them and its shapes. If no operator launched a
kernel, as in the optimizer, its own name is used. On a CPU, times are those of operators.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.autograd import DeviceType
from torch.profiler import profile

ATTENTION, PRODUCTS, EXPERTS, HEAD = "attention", "projections and router", "experts' products", "head and loss"
PERMUTES, NORMS = "permute, SwiGLU, unpermute", "norms, rope, residuals"
COPIES, OPTIMIZER, CLIPPING = "copies and fills", "optimizer", "norm of the gradients"
COMMUNICATION, REST = "communication", "all else"
PARTS: tuple[str, ...] = (
    ATTENTION, PRODUCTS, EXPERTS, HEAD, PERMUTES, NORMS, COPIES, OPTIMIZER, CLIPPING, COMMUNICATION, REST
)  # fmt: skip
GAPS = "device waits"
WAIT = "wait for other ranks"
"""The name of ranges in which computation waits; their own time counts as communication."""

_NAMES = (
    (WAIT, COMMUNICATION),
    ("c10d", COMMUNICATION),
    ("nccl", COMMUNICATION),
    ("gloo:", COMMUNICATION),
    ("record_param_comms", COMMUNICATION),
    ("Optimizer", OPTIMIZER),
    ("adamw", OPTIMIZER),
    ("_foreach_norm", CLIPPING),
    ("vector_norm", CLIPPING),
    ("_foreach", OPTIMIZER),
    ("attention", ATTENTION),
    ("FlashAttn", ATTENTION),
    ("grouped", EXPERTS),
    ("cross_entropy", HEAD),
    ("moe_route", REST),
    ("moe_", PERMUTES),
    ("swiglu", PERMUTES),
    ("norm", NORMS),
    ("rope", NORMS),
    ("aten::copy_", COPIES),
    ("aten::cat", COPIES),
    ("aten::fill_", COPIES),
    ("aten::zero_", COPIES),
    ("Memcpy", COPIES),
    ("Memset", COPIES),
)
"""Parts by text: the first text that the name of an operator, range or kernel contains gives its part."""
PARTS_OF_PEER_KERNELS: Mapping[str, str] = {
    **dict.fromkeys(("_share", "_exchange", "_push_sums", "_meet", "_tell", "_hear"), COMMUNICATION),
    **dict.fromkeys(("_take_rest", "_take_sums"), PERMUTES),
}
"""Parts of kernels that exchange tokens or words through the memory of other ranks, by their whole names."""
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear")
_HOST_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
LONG_GAP = 20.0
"""Microseconds."""
_ROUNDING = 1e-3
"""Possible error of sums of times, in microseconds."""
_SHOWN = 10
_NAME = 70
"""Number of characters of a kernel's name that are shown."""


def part_of(name: str, shapes: Sequence[Any] = (), vocab_size: int | None = None) -> str:
    """Return the part of a step to which an operator, range or kernel belongs.

    Args:
        name: Name in the profiler.
        shapes: The shapes of an operator's tensors.
        vocab_size: Products with a dimension of this size belong to the head.
    """
    if name in _PRODUCTS:
        is_head = any(vocab_size in shape for shape in shapes if isinstance(shape, list | tuple))
        return HEAD if is_head else PRODUCTS
    return PARTS_OF_PEER_KERNELS.get(name) or next((part for text, part in _NAMES if text in name), REST)


class Kernel(NamedTuple):
    """A kernel, copy or fill that ran on a device, in microseconds."""

    name: str
    stream: str
    begin: float
    end: float


@dataclass(frozen=True)
class DeviceUse:
    """The times in which a device was in use, in microseconds."""

    num_kernels: int
    busy: float
    """Time in which some stream had a kernel."""
    idle: float
    """Time in which no stream had a kernel, from the first kernel to the last."""
    num_long_gaps: int
    """Number of gaps of more than 20 microseconds without a kernel."""
    communication_alone: float
    """Time in which only communication kernels ran."""
    streams: Mapping[str, float]
    """The time of kernels on each stream."""
    gaps: Sequence[tuple[float, str, str]]
    """The longest gaps: duration, the kernel before, the kernel after."""


def device_use(kernels: Iterable[Kernel]) -> DeviceUse:
    """Return when a device was in use."""
    ordered = sorted(kernels, key=lambda kernel: kernel.begin)
    streams: dict[str, float] = defaultdict(float)
    for kernel in ordered:
        streams[kernel.stream] += kernel.end - kernel.begin
    busy, gaps = _busy_and_gaps(ordered)
    others, _ = _busy_and_gaps([kernel for kernel in ordered if part_of(kernel.name) != COMMUNICATION])
    return DeviceUse(
        num_kernels=len(ordered),
        busy=busy,
        idle=sum(gap[0] for gap in gaps),
        num_long_gaps=sum(gap[0] > LONG_GAP for gap in gaps),
        communication_alone=busy - others,
        streams=dict(streams),
        gaps=sorted(gaps, key=lambda gap: -gap[0])[:_SHOWN],
    )


def _busy_and_gaps(ordered: Sequence[Kernel]) -> tuple[float, list[tuple[float, str, str]]]:
    busy, gaps = 0.0, []
    last: Kernel | None = None
    """The kernel so far that ends last."""
    for kernel in ordered:
        if last is not None and kernel.begin > last.end:
            gaps.append((kernel.begin - last.end, last.name, kernel.name))
        begin = kernel.begin if last is None else max(kernel.begin, last.end)
        busy += max(0.0, kernel.end - begin)
        if last is None or kernel.end > last.end:
            last = kernel
    return busy, gaps


class Operator(NamedTuple):
    """The calls of an operator with the same shapes."""

    name: str
    shapes: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class ProfiledSteps:
    """The parts of training steps on one rank; all seconds are means over the steps."""

    seconds: float
    """Duration of the step, under the profiler."""
    parts: Mapping[str, float]
    """Seconds of each part, by name. On a GPU, parts may run concurrently."""
    operators: Sequence[Operator]
    """The ten operators that take longest, including kernels that no operator launched. Calls are counted over all
    steps."""
    num_steps: int
    host_waits: float
    """Seconds in which the host waited for the device."""
    device: DeviceUse | None
    """The use of the device; None on a CPU. Counts and times cover all steps."""

    def table(self, launched: float | None = None) -> str:
        """Return a readable text in Markdown.

        Args:
            launched: Seconds until the host had launched a step; None if unknown.
        """
        rows = [["part", "ms a step", "share"], ["---"] * 3]
        rows += [
            [name, f"{1e3 * seconds:.2f}", f"{seconds / self.seconds:.1%}"]
            for name, seconds in self.parts.items()
            if seconds > 0
        ]
        rows.append(["the step, under the profiler", f"{1e3 * self.seconds:.2f}", ""])
        lines = [*map(_row, rows), ""]
        if (use := self.device) is not None:
            more = {} if launched is None else {"ms until the host has launched it": 1e3 * launched}
            more["ms in which the host waits for the device"] = 1e3 * self.host_waits
            more["kernels"] = use.num_kernels / self.num_steps
            more["ms with a kernel"] = use.busy / 1e3 / self.num_steps
            more["ms with none but communication"] = use.communication_alone / 1e3 / self.num_steps
            more[f"gaps of more than {LONG_GAP:.0f} us"] = use.num_long_gaps / self.num_steps
            lines += [_row(["a step", ""]), _row(["---"] * 2), *(_row([k, f"{v:.2f}"]) for k, v in more.items()), ""]
        lines += [_row(["operator", "shapes", "calls", "ms"]), _row(["---"] * 4)]
        for name, shapes, calls, seconds in self.operators:
            lines.append(_row([short(name), shapes, f"{calls / self.num_steps:.1f}", f"{1e3 * seconds:.2f}"]))
        if use is not None:
            lines += ["", "Longest gaps:", "", *(f"- {us:.0f} us, {short(a)} -> {short(b)}" for us, a, b in use.gaps)]
        return "\n".join(lines)


def profiled_steps(
    profiler: profile, seconds: float, *, num_steps: int = 1, vocab_size: int | None = None
) -> ProfiledSteps:
    """Sum up a profile. Local.

    Args:
        profiler: Profiler that has been stopped. It must have recorded shapes.
        seconds: Duration of all steps, with all their kernels.
        num_steps: Number of steps.
        vocab_size: As for `part_of`.
    """
    on_cuda = profiler.use_device == "cuda"
    parts = dict.fromkeys(PARTS, 0.0)
    found: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    events = profiler.events() or ()
    kernels = [
        Kernel(event.name, str(event.device_resource_id), event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    unclaimed: dict[str, float] = defaultdict(float)
    """Microseconds of kernels by name, less those that operators have launched."""
    for kernel in kernels:
        unclaimed[kernel.name] += kernel.end - kernel.begin
    host_waits = 0.0
    for event in events:
        if event.device_type == DeviceType.CUDA:
            continue
        if event.name in _HOST_WAITS:
            host_waits += event.time_range.elapsed_us()
        part = part_of(event.name, event.input_shapes or (), vocab_size)
        if event.is_user_annotation and (on_cuda or event.name != WAIT):
            continue  # on a CPU the own time of other ranges is that of Python between operators
        if on_cuda:
            its = 0.0
            for launched in event.kernels:
                claimed = min(launched.duration, unclaimed[launched.name])
                unclaimed[launched.name] -= claimed
                its += claimed
                parts[PARTS_OF_PEER_KERNELS.get(launched.name, part)] += claimed
        else:
            its = event.self_cpu_time_total
            parts[part] += its
        entry = found[event.name, str(event.input_shapes or "")]
        entry[0] += 1
        entry[1] += its
    calls_of_kernels = Counter(kernel.name for kernel in kernels)
    for name, its in unclaimed.items():
        if its > _ROUNDING:
            parts[part_of(name)] += its
            found[name, ""] = [calls_of_kernels[name], its]
    use = device_use(kernels) if on_cuda else None
    busy = sum(parts.values()) if use is None else use.busy
    per_step = {name: 1e-6 * its / num_steps for name, its in parts.items()}
    operators = [Operator(*key, int(calls), 1e-6 * its / num_steps) for key, (calls, its) in found.items()]
    operators.sort(key=lambda each: -each.seconds)
    return ProfiledSteps(
        seconds=seconds / num_steps,
        parts=per_step | {GAPS: max(0.0, seconds - 1e-6 * busy) / num_steps},
        operators=operators[:_SHOWN],
        num_steps=num_steps,
        host_waits=1e-6 * host_waits / num_steps,
        device=use,
    )


def short(name: str) -> str:
    """Return a kernel's name as a cell of a table."""
    return name[:_NAME].replace("|", "/")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
