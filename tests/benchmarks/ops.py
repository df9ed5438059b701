"""Ops with kernels of their own on one GPU, against torch's, compiled ones, Liger-Kernel's, and what the device can do.

All contenders of a case take turns in one process, as in `frame`, but a block is many calls between two events of the
device. The calls of a block go round several sets of inputs that together are larger than any cache, and are recorded
(CUDA graphs), so that launches cost what they cost in a model whose host is ahead. Long ops are launched by the host.
"""

from __future__ import annotations

import functools
import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.utils._pytree import tree_leaves

from lightning_d9d.ops.backend import Kernels, using_kernels
from lightning_d9d.state.threads import uncollected
from tests.benchmarks.frame import ratio_of_pairs, spread
from tests.benchmarks.op_case import ON_CUDA, QUICK, Inputs, OpCase, Sizes, Work
from tests.benchmarks.op_cases import op_cases
from tests.benchmarks.options import check_choices

OURS = "ours"
LEAST_SHARE = 0.85
"""The least share of the copy bandwidth, for ops that move at least `LEAST_BYTES`. Other ops mostly wait, for launches
and for each other."""
LEAST_BYTES = 64 * 10**6
MOST_OF_PEERS = 1.01
"""Our time over that of any peer. Contenders that run the same kernels have differed by up to 0.5 %."""
MOST_DIFFERENCE = 0.05
"""Relative, of the results of contenders from ours, in the norm."""
SPREAD_BYTES = 256 * 10**6
"""Sets of inputs are so many that they have as much together: several times the cache of an H200."""
MOST_SETS = 32
BLOCK_SECONDS = 1e-3
MOST_CALLS = 64
"""The most calls of a block."""
LEAST_ROUNDS = 6
"""The fewest rounds whose extremes enclose the median with a confidence of 95 %."""
SECONDS = 1.0
"""The time of a contender's pass, unless its fewest rounds take longer."""


def cases(
    device_type: str, quick: bool, ops: Sequence[str] | None = None, sizes: Sequence[float] | None = None
) -> list[OpCase]:
    """Return the cases of the chosen ops, at each of these factors on the shape of Qwen3-30B-A3B. On a CPU they are
    tiny."""
    shape = QUICK if quick or device_type == "cpu" else Sizes()
    chosen = [replace(case, scale=scale) for scale in sizes or [1.0] for case in op_cases(shape.scaled(scale))]
    check_choices("--ops", ops or (), {case.op: case for case in chosen})
    chosen = [case for case in chosen if not ops or case.op in ops]
    return [replace(case, repeats=2) for case in chosen] if quick else chosen


class Contender:
    """One implementation and what it works on.

    Args:
        case: What it is of.
        name: `OURS` or a peer's.
        inputs: Arguments of calls, one set after the other.
        generator: Of the gradients that results get.
    """

    def __init__(self, case: OpCase, name: str, inputs: Sequence[dict[str, Any]], generator: torch.Generator) -> None:
        self.function = case.ours if name == OURS else case.peers[name]
        self.kernels: Kernels = case.kernels if name == OURS else "torch"
        self.inputs, self.generator = inputs, generator
        self.trained = [[t for t in tensors(arguments) if t.requires_grad] for arguments in inputs]
        self.results: list[list[Tensor]] = []
        """The results of each set, with what the backward needs."""
        self.gradients: list[list[Tensor]] = []
        """The gradients of these results."""

    def prepare(self, index: int) -> list[Tensor]:
        """The first call of a set. Returns results and gradients of inputs, if these get any."""
        results = self.forward(index)
        self.results.append(results)
        self.gradients.append([self._gradient(result) for result in results if result.requires_grad])
        return [*results, *(self.backward(index) if self.trained[index] else [])]

    def forward(self, index: int) -> list[Tensor]:
        """The results of a set's call."""
        with using_kernels(self.kernels):
            return tensors(self.function(**self.inputs[index]))

    def backward(self, index: int) -> list[Tensor]:
        """The gradients of a set's inputs, from the results of its first call."""
        differentiable = [result for result in self.results[index] if result.requires_grad]
        return list(torch.autograd.grad(differentiable, self.trained[index], self.gradients[index], retain_graph=True))

    def both(self, index: int) -> list[Tensor]:
        """Results and gradients."""
        results = self.forward(index)
        differentiable = [result for result in results if result.requires_grad]
        return [*results, *torch.autograd.grad(differentiable, self.trained[index], self.gradients[index])]

    def _gradient(self, result: Tensor) -> Tensor:
        """Return a gradient like the inputs, the same for all contenders; for a loss it is 1."""
        if result.dim() == 0:
            return torch.ones_like(result)
        return torch.empty_like(result).normal_(generator=self.generator)


def tensors(tree: Any) -> list[Tensor]:
    """Return the floating tensors in a tree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def run_case(case: OpCase, device_type: str) -> dict[str, Any]:
    """Runs a case and returns what it measured, ready for JSON."""
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device(device_type)
    ceilings = measured_ceilings(device)
    torch.compiler.reset()  # else it compiles an op for any size, once it has seen two
    stream = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
    with stream, functorch_config.patch(donated_buffer=False):  # for backwards that run again
        measured = _measured(case, device)
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    passes = {name: _judged(case, name, contenders, ceilings) for name, contenders in measured.items()}
    if device.type == "cpu":  # Triton's interpreter is for tests
        for of_pass in passes.values():
            of_pass["targets"] = [target for target in of_pass["targets"] if target["name"] == "runs"]
    return {"case": case.name, "scale": case.scale, "note": case.note, "ceilings": ceilings, "passes": passes}


def _measured(case: OpCase, device: torch.device) -> dict[str, dict[str, dict[str, Any]]]:
    """Measure each pass of each contender: return the seconds of a call in each round, or why there are none."""
    num_sets = _num_sets(case, device)
    names = [OURS, *(name for name in case.peers if device.type == "cuda" or name not in ON_CUDA)]
    measured: dict[str, dict[str, dict[str, Any]]] = {each: {name: {} for name in names} for each in case.work}
    ready: dict[str, Contender] = {}
    shared: list[dict[str, Any]] = []
    expected: list[Tensor] = []
    for name in names:
        try:
            generator = torch.Generator(device).manual_seed(0)
            make = Inputs(device, case.dtype, generator)
            inputs = shared if case.shares_inputs and shared else [case.inputs(make) for _ in range(num_sets)]
            shared = inputs
            contender = Contender(case, name, inputs, generator.manual_seed(1))
            first = [value.detach() for value in contender.prepare(0)]
            if name == OURS:
                expected = first
            elif OURS in ready and name not in case.limits:
                _compare(first, expected)
            del first
            for index in range(1, num_sets):
                contender.prepare(index)
            if "backward" not in case.work:
                contender.results.clear()
            ready[name] = contender
        except Exception as error:  # a peer that is not there or cannot do it is a row of the table
            for contenders in measured.values():
                contenders[name]["error"] = _reason(error)
    del shared, expected
    for pass_name, work in case.work.items():
        _measure(case, pass_name, work, ready, measured[pass_name], device)
    return measured


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _compare(values: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for index, (value, ours) in enumerate(zip(values, expected, strict=True)):
        difference = torch.linalg.vector_norm(value - ours, dtype=torch.float32)
        share = (difference / torch.linalg.vector_norm(ours, dtype=torch.float32)).item()
        if not share <= MOST_DIFFERENCE:
            raise ValueError(f"result or gradient {index} differs from ours by {share:.1%}")


def _num_sets(case: OpCase, device: torch.device) -> int:
    least = min(work.bytes for work in case.work.values())
    if device.type == "cpu" or least == 0:  # products are large, and bound by what they compute
        return 1
    return min(MOST_SETS, math.ceil(SPREAD_BYTES / least))


def _measure(
    case: OpCase,
    pass_name: str,
    work: Work,
    contenders: Mapping[str, Contender],
    measured: dict[str, dict[str, Any]],
    device: torch.device,
) -> None:
    """Adds to `measured`, by contender, the seconds of a call, and the bytes that one takes beside its results."""
    blocks: dict[str, Callable[[], Any]] = {}
    rounds: dict[str, int] = {}
    ceilings = measured_ceilings(device)
    floor = max(work.bytes / ceilings["bytes_per_second"], work.flops / ceilings["flops_per_second"])
    for name, contender in contenders.items():
        try:
            run = getattr(contender, pass_name)
            num_sets = len(contender.inputs)
            seconds, measured[name]["extra_bytes"] = _first_call(run, device)
            calls = min(MOST_CALLS, math.ceil(BLOCK_SECONDS / floor)) if device.type == "cuda" else 1
            calls = math.ceil(calls / num_sets) * num_sets
            graphed = case.graphed and device.type == "cuda"
            block = functools.partial(_repeat, run, calls, num_sets)
            blocks[name] = _recorded(block) if graphed else block
            rounds[name] = min(case.repeats, max(LEAST_ROUNDS, int(SECONDS / (seconds * calls))))
            measured[name] |= {"calls": calls, "seconds": []}
        except Exception as error:
            blocks.pop(name, None)
            measured[name]["error"] = _reason(error)
    for round_index in range(-1, case.repeats):  # the first round only warms up
        names = [name for name in blocks if round_index < rounds[name]]
        ends = [(name, _timed(blocks[name], device)) for name in (names if round_index % 2 else reversed(names))]
        for name, seconds_of in ends:
            if round_index >= 0:
                measured[name]["seconds"].append(seconds_of)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for name in blocks:
        measured[name]["seconds"] = [seconds() / measured[name]["calls"] for seconds in measured[name]["seconds"]]


def _first_call(run: Callable[[int], Any], device: torch.device) -> tuple[float, int | None]:
    """Seconds, with the host's, and the bytes that a call needs beside what it returns."""
    if device.type == "cpu":
        return _timed(functools.partial(run, 0), device)(), None
    run(0)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    results = run(0)
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    of_results = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in results}
    extra = torch.cuda.max_memory_allocated(device) - before - sum(of_results.values())
    return seconds, max(0, extra)  # of what overwrites its inputs the results are not new


def _repeat(run: Callable[[int], Any], calls: int, num_sets: int) -> None:
    """Calls, of whose results the latest of each set are kept, so that none is written where the last one was."""
    kept: list[Any] = [None] * num_sets
    for call in range(calls):
        kept[call % num_sets] = None
        kept[call % num_sets] = run(call % num_sets)


def _recorded(block: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as nccl's, may ask for events meanwhile.
    with uncollected(), torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        block()
    return graph.replay


def _timed(block: Callable[[], Any], device: torch.device) -> Callable[[], float]:
    """Starts a block; what is returned tells its seconds, when the device is through."""
    if device.type == "cpu":
        start = time.perf_counter()
        block()
        seconds = time.perf_counter() - start
        return lambda: seconds
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    block()
    end.record()
    return lambda: begin.elapsed_time(end) / 1e3


@functools.cache
def measured_ceilings(device: torch.device) -> dict[str, float]:
    """What this device does: bytes read and written by a copy of 4 GiB, and operations of a product of 8192."""
    on_cuda = device.type == "cuda"
    source = torch.ones(2**32 if on_cuda else 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    size = 8192 if on_cuda else 64
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    times = {}
    for name, block in (("copy", lambda: target.copy_(source)), ("product", lambda: torch.mm(a, b, out=out))):
        seconds = [_timed(block, device) for _ in range(13)][3:]
        if on_cuda:
            torch.cuda.synchronize(device)
        times[name] = spread([each() for each in seconds])[1]
    return {"bytes_per_second": 2 * source.numel() / times["copy"], "flops_per_second": 2 * size**3 / times["product"]}


def _judged(
    case: OpCase, pass_name: str, contenders: dict[str, dict[str, Any]], ceilings: Mapping[str, float]
) -> dict[str, Any]:
    """Medians, shares of the ceiling, ratios of our time to others', and verdicts: "met", "missed" or "undecided"."""
    work = case.work[pass_name]
    floor = work.bytes / ceilings["bytes_per_second"] or work.flops / ceilings["flops_per_second"]
    for values in contenders.values():
        if "seconds" in values:
            low, median, high = spread(values["seconds"])
            values |= {"median_seconds": median, "quartiles_seconds": [low, high], "share": floor / median}
    ours = contenders[OURS]
    judged = asdict(work) | {"contenders": contenders, "targets": []}
    if "seconds" not in ours:
        return judged | {"targets": [{"name": "runs", "verdict": "missed"}]}
    targets, samples = judged["targets"], ours["seconds"]
    for name, values in contenders.items():
        if name != OURS and "seconds" in values:
            rounds = min(len(samples), len(values["seconds"]))
            ratio = ratio_of_pairs(samples[:rounds], values["seconds"][:rounds])
            limit = case.limits.get(name, MOST_OF_PEERS)
            values["ratio"] = asdict(ratio)
            targets.append({"name": f"time of {name}", "limit": limit, "verdict": ratio.verdict(limit)})
    if work.bytes >= LEAST_BYTES:
        limit = 1 / LEAST_SHARE
        verdict = ratio_of_pairs(samples, [floor] * len(samples)).verdict(limit)
        targets.append({"name": "share of copy bandwidth", "limit": LEAST_SHARE, "verdict": verdict})
    if work.least_rate is not None:
        verdict = ratio_of_pairs(samples, [work.flops / work.least_rate] * len(samples)).verdict(1.0)
        targets.append({"name": "operations a second", "limit": work.least_rate, "verdict": verdict})
    if case.most_extra is not None and ours["extra_bytes"] is not None:
        verdict = "met" if ours["extra_bytes"] <= case.most_extra else "missed"
        targets.append({"name": "bytes beside results", "limit": case.most_extra, "verdict": verdict})
    return judged


def verdicts(result: dict[str, Any]) -> list[str]:
    """Return the verdicts of all targets of a case."""
    return [target["verdict"] for of_pass in result["passes"].values() for target in of_pass["targets"]]


def table(result: dict[str, Any], device_type: str) -> str:
    """What a person reads, in Markdown."""
    header = ["pass", "", "us", "quartiles", "rate", "share", "ours / it", "interval", "extra MiB", "targets"]
    rows = [header, ["---"] * len(header)]
    for name, of_pass in result["passes"].items():
        missed = [f"{target['name']}: {target['verdict']}" for target in of_pass["targets"]]
        for contender, values in of_pass["contenders"].items():
            if "seconds" not in values:
                rows.append([name, contender, values["error"], *[""] * 7])
                continue
            seconds = values["median_seconds"]
            rate = f"{of_pass['bytes'] / seconds / 1e12:.2f} TB/s" if of_pass["bytes"] else ""
            rate = rate or f"{of_pass['flops'] / seconds / 1e12:.0f} TFLOP/s"
            ratio = values.get("ratio")
            extra = values["extra_bytes"]
            rows.append(
                [
                    name,
                    contender,
                    f"{1e6 * seconds:.1f}",
                    " .. ".join(f"{1e6 * each:.1f}" for each in values["quartiles_seconds"]),
                    rate,
                    f"{values['share']:.1%}",
                    f"{ratio['median']:.3f}" if ratio else "",
                    f"{ratio['low']:.3f} .. {ratio['high']:.3f}" if ratio else "",
                    "" if extra is None else f"{extra / 2**20:.0f}",
                    "; ".join(missed) if contender == OURS else "",
                ]
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    ceilings = result["ceilings"]
    of_device = f"copies at {ceilings['bytes_per_second'] / 1e12:.2f} TB/s, products at "
    of_device += f"{ceilings['flops_per_second'] / 1e12:.0f} TFLOP/s"
    note = f"; {result['note']}" if result["note"] else ""
    return "\n".join([f"\n{result['case']}, {result['scale']:g} times the shape: {of_device}{note}\n", *lines])
