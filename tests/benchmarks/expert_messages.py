"""What links cost messages of experts in a step of all of Qwen3-30B-A3B: every second step writes to own memory.

    python -m tests.benchmarks expert_messages

Routing is even: `EvenRouting` gives each rank's tokens the same choices in each step and layer. The choices of the
second rank are those of the first, with the experts of the other rank instead. So a rank can stand in for the other
one: in steps with own memory, its tokens go to its own experts in place of the other rank's. All kernels run on the
same numbers of rows, and no value is missing.

Such steps wait for the other rank only to share counts, and to sum gradients. The difference of both kinds of steps is
what links cost, with all other waits. What the shared counts cost is read from a profile of the last two steps. Steps
with own memory still write each row that would cross.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_d9d.metrics.profiled import PARTS_OF_PEER_KERNELS, Kernel
from lightning_d9d.ops import peer_exchange
from lightning_d9d.ops.peer_memory import Notes, PeerMemory
from tests.benchmarks import whole_model
from tests.benchmarks.frame import spread
from tests.benchmarks.profile_picture import kernels_of
from tests.benchmarks.whole_model import FIRST_STEPS, ModelCase

MOST_MS = 15.0
"""The most milliseconds that links may add to a step."""
NUM_RANKS = 2
_NOT_TIMED = FIRST_STEPS + FIRST_STEPS % 2
"""The first steps, in pairs."""
LEAST_STEPS = _NOT_TIMED + 4
"""Steps that are not timed, one pair, and two that are profiled."""


def cases(device_type: str, quick: bool, *, layers: int | None = None, steps: int = 48) -> list[ModelCase]:
    """All layers of 30b-a3b, or some, on two GPUs; on a CPU a tiny model. The number of steps is even."""
    if steps % 2 or steps < LEAST_STEPS:
        raise ValueError(f"--steps {steps} must be even, and {LEAST_STEPS} or more: steps are compared in pairs")
    (case,) = whole_model.cases(device_type, quick, layers=layers, gpus=NUM_RANKS, parts=("train",), steps=steps)
    callback = {"class_path": "tests.benchmarks.expert_messages.OwnMemory"}
    return [replace(case, routing="even", expert_dispatch="peer", profile=2, more_callbacks=(callback,))]


def run_case(case: ModelCase, device_type: str) -> dict[str, Any]:
    """Train, and compare steps of both kinds."""
    with tempfile.TemporaryDirectory(prefix="expert_messages") as name:
        folder = Path(name)
        result = whole_model.run_case(replace(case, folder=folder), device_type)
        profile = case.profile_folder(folder) / f"step_{case.steps - 1}"
        traces = [profile / f"rank_{rank}.trace.json.gz" for rank in range(NUM_RANKS)]
        kernels = [kernels_of(trace) for trace in traces] if device_type == "cuda" else []
    seconds = [row["seconds"] for row in result["rows"] if row["what"].startswith("step ")]
    return {"case": case.name, "contenders": {}, "judges": case.judges, **summary(seconds, kernels)}


def summary(seconds: Sequence[float], kernels: Sequence[Sequence[Kernel]]) -> dict[str, Any]:
    """Return milliseconds of both kinds of steps, and of kernels in the last two.

    Args:
        seconds: Of each step; those with even numbers, counted from 1, had own memory.
        kernels: The kernels of the last two steps on each rank; none without a GPU.
    """
    timed = [1e3 * each for each in seconds[_NOT_TIMED:-2]]
    linked, own = timed[::2], timed[1::2]
    differences = [a - b for a, b in zip(linked, own, strict=True)]
    found: dict[str, Any] = {"linked_ms": spread(linked), "own_ms": spread(own), "difference_ms": spread(differences)}
    if kernels:
        found["kernels"] = {name: _of_kinds(name, kernels) for name in PARTS_OF_PEER_KERNELS}
        found["counts_ms"] = sum(map(min, zip(*_instances("_share", kernels)[0], strict=True)))
        found["added_ms"] = statistics.median(differences) + found["counts_ms"]
    return found


def _instances(name: str, kernels: Sequence[Sequence[Kernel]]) -> tuple[list[list[float]], list[list[float]]]:
    """Return the milliseconds of a kernel in a step with links and in one with own memory, for each rank."""
    each = [[(kernel.end - kernel.begin) / 1e3 for kernel in of_rank if kernel.name == name] for of_rank in kernels]
    return [ms[: len(ms) // 2] for ms in each], [ms[len(ms) // 2 :] for ms in each]


def _of_kinds(name: str, kernels: Sequence[Sequence[Kernel]]) -> tuple[float, float]:
    """Return a kernel's milliseconds in either step, the mean of the ranks."""
    linked, own = (statistics.mean(map(sum, ranks)) for ranks in _instances(name, kernels))
    return linked, own


def verdicts(result: Mapping[str, Any]) -> list[str]:
    """Return whether links add little enough to a step of the whole model."""
    return ["met" if result["added_ms"] <= MOST_MS else "missed"] if result["judges"] and "added_ms" in result else []


def table(result: Mapping[str, Any], device_type: str) -> str:
    """What a person reads, in Markdown."""
    lines = [f"\nexpert_messages, {result['case']}", "", "| steps | ms | quartiles |", "|---|---|---|"]
    names = {"linked_ms": "with links", "own_ms": "with own memory", "difference_ms": "difference of neighbours"}
    for key, name in names.items():
        low, median, high = result[key]
        lines.append(f"| {name} | {median:.1f} | {low:.1f} .. {high:.1f} |")
    if "kernels" in result:
        lines += ["", "| kernel | ms of a step with links | with own memory |", "|---|---|---|"]
        lines += [f"| `{name}` | {a:.2f} | {b:.2f} |" for name, (a, b) in result["kernels"].items() if a + b > 0]
        lines.append(f"\ncounts, where all ranks are there: {result['counts_ms']:.2f} ms")
        lines.append(f"links add {result['added_ms']:.1f} ms")
    return "\n".join([*lines, f"\n{', '.join(verdicts(result))}"])


class OwnMemory(L.Callback):
    """Lets every second step write to the rank's own memory. All layers and steps have the same choices of experts."""

    def __init__(self) -> None:
        self.is_own = False
        """Whether this step writes to the own memory."""
        self._plans: dict[tuple[str, int], tuple[Tensor, PeerMemory, PeerMemory]] = {}
        self._shifts: Tensor | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Replace the functions of kernels for the rest of the process."""
        functions = peer_exchange._functions
        peer_exchange._functions = lambda triton: self._of_own(functions(triton)) if self.is_own else functions(triton)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Choose the kind of this step."""
        self.is_own = batch_idx % 2 == 1

    def _of_own(self, real: Any) -> SimpleNamespace:
        """Return the functions with writes to the own memory, and waits for nobody."""

        def exchange(memory: PeerMemory, *arguments: Any) -> None:
            x, places, ranks, table, copies, rows, notes = arguments
            own_table, own, _ = self._plan(memory, table)
            if notes is not None:
                notes = notes._replace(shifts=self._own_shifts(memory, notes))
            real.exchange(own, x, places, ranks, own_table, copies, rows, notes)

        def push_sums(memory: PeerMemory, rows: Tensor, places: Tensor, table: Tensor, weights: Tensor | None) -> None:
            own_table, own, _ = self._plan(memory, table)
            real.push_sums(own, rows, places, own_table, weights)

        def meet(memory: PeerMemory) -> None:
            real.meet(self._plan(memory, None)[2])

        parts = {"share_counts": real.share_counts, "take_rest": real.take_rest, "take_sums": real.take_sums}
        return SimpleNamespace(**parts, exchange=exchange, push_sums=push_sums, meet=meet)

    def _plan(self, memory: PeerMemory, table: Tensor | None) -> tuple[Tensor, PeerMemory, PeerMemory]:
        """Return the table of own rows, the memory with this rank's buffer for all, and one for waits alone.

        With equal numbers, rows from the other rank are at the places of those that go there.
        """
        key = (str(memory.own.device), memory.own.data_ptr())
        if key not in self._plans:
            assert table is not None, "an exchange or sums come before the first wait"
            layout, rank = memory.layout, memory.rank
            assert layout.num_ranks == NUM_RANKS
            own_table = table.clone()
            own_table[:2] = 0
            own = PeerMemory([memory.own] * NUM_RANKS, rank, layout, timeout_s=memory.timeout_s)
            flag = memory.own[4 * rank :]
            alone = PeerMemory([flag], 0, layout._replace(num_ranks=1), timeout_s=memory.timeout_s)
            own.state = alone.state = memory.state
            self._plans[key] = (own_table, own, alone)
        return self._plans[key]

    def _own_shifts(self, memory: PeerMemory, notes: Notes) -> Tensor:
        """Return shifts that put copies where those of the other rank's tokens come: behind own ones, or before."""
        if self._shifts is None:
            counts = notes.experts.flatten().bincount(minlength=len(notes.shifts)).to(notes.shifts.dtype)
            behind = counts.roll(memory.layout.num_local) * (1 if memory.rank == 0 else -1)
            is_own = torch.arange(len(counts), device=counts.device) // memory.layout.num_local == memory.rank
            self._shifts = notes.shifts + behind.masked_fill(is_own, 0)
        return self._shifts
