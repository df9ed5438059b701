"""Rows from a file of tokens: how fast a loader gives them from a cold disk, and what they cost a step on a GPU.

The file has random ids, so that no file system can store it in less. It is larger than the memory that is left: other
processes hold the rest, unless `--memory free` is given. Before each round the system has forgotten the file
(`posix_fadvise`), and each round reads other rows. `read from disk` is what worker processes have had the disk read, as
a multiple of the bytes of rows: one or more if nothing came from memory.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_d9d import D9DStrategy
from lightning_d9d.data import TokenFileWriter
from lightning_d9d.datamodules import TokenDataModule
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoePretraining
from lightning_d9d.optim import StochasticAdamW
from tests.benchmarks import frame
from tests.benchmarks.frame import Case
from tests.benchmarks.strategy_overhead import PausedFit, Work
from tests.datamodules.runs import run_of

STEP_TOKENS = 88_000
"""Tokens a second that a step of 8 layers of `30b-a3b` takes in on one H100."""
TIMES_STEP = 20
MOST_SECONDS = 1 / 0.97
SYNTHETIC, REAL = "synthetic data", "file of tokens"
NUM_WORKERS = 2
_GIB = 1 << 30
_IDS_AT_A_TIME = 1 << 25
_MOST_TAKEN = 160 * _GIB
_folders: list[tempfile.TemporaryDirectory[str]] = []


@dataclass(frozen=True, kw_only=True)
class LoaderCase:
    """One measurement of a loader alone."""

    name: str
    path: str
    batch_size: int
    sequence_length: int
    num_batches: int
    repeats: int
    is_judged: bool
    fills_memory: bool
    num_processes: int = 1


def cases(device_type: str, quick: bool, file_gib: float | None = None, memory: str | None = None) -> list[Any]:
    """The loader from a file of 40 GiB, or what the disk has room for; on a GPU the step, too."""
    if quick and memory is not None:
        raise ValueError(f"--memory {memory} does nothing with --quick, which holds none")
    path = str(make_file(file_gib, quick))
    size = {"batch_size": 2, "sequence_length": 32} if quick else {"batch_size": 16, "sequence_length": 4096}
    rounds = {"num_batches": 8, "repeats": 2} if quick else {"num_batches": 200, "repeats": 6}
    holds = memory != "free" and not quick
    loader = LoaderCase(name="loader", path=path, is_judged=not quick, fills_memory=holds, **size, **rounds)
    if device_type == "cpu" and not quick:
        return [loader]
    if quick:
        config = replace(Qwen3MoeConfig.preset("tiny"), num_hidden_layers=2)
        work = Work(config=config, precision="bf16-true", batch_size=16, sequence_length=64)
    else:
        # Both contenders hold their states at the same time.
        is_large = torch.cuda.get_device_properties(0).total_memory > 100 * _GIB
        config = replace(Qwen3MoeConfig.preset("30b-a3b"), num_hidden_layers=8 if is_large else 4)
        work = Work(config=config, precision="bf16-true", batch_size=4, sequence_length=4096)
    step = Case(
        name="step",
        contenders={SYNTHETIC: partial(fit, work, None), REAL: partial(fit, work, path)},
        peer=SYNTHETIC,
        limits={} if quick else {REAL: MOST_SECONDS},
        warmup_steps=4,
        block_steps=1 if quick else 8,
        repeats=2 if quick else 10,
        conditions={**work.conditions(), "workers": NUM_WORKERS},
    )
    return [loader, step]


def make_file(file_gib: float | None, quick: bool) -> Path:
    """Documents of about a thousand random ids of two bytes, in a folder that lives as long as this process.

    Raises:
        RuntimeError: The folder for temporary files lies in memory; set `TMPDIR` to one on a disk.
    """
    _folders.append(tempfile.TemporaryDirectory(prefix="data-benchmark"))
    folder = Path(_folders[-1].name)
    if not quick and file_system(folder) in ("tmpfs", "ramfs"):
        raise RuntimeError(f"{folder} lies in memory; set TMPDIR to a folder on a disk")
    status = os.statvfs(folder)
    room = 0.8 * status.f_bavail * status.f_frsize / _GIB
    num_bytes = int((1e-3 if quick else min(40, room) if file_gib is None else file_gib) * _GIB)
    numbers = np.random.default_rng(0)
    writer = TokenFileWriter(folder / "tokens")
    left = num_bytes // 2
    while left:
        count = min(left, _IDS_AT_A_TIME)
        borders = np.append(np.arange(0, count, 1000), count)
        ids = np.frombuffer(numbers.bytes(2 * count), dtype=np.uint16)
        writer.add_joined(ids >> 8 if quick else ids, np.diff(borders))  # the tiny model has 256 tokens
        left -= count
    writer.finish()
    return writer.path


def file_system(path: Path) -> str:
    """The type of file system that a path lies on."""
    lines = [line.split(" - ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    mounts = {left.split()[4]: right.split()[0] for left, right in lines}
    found = [each for each in (path.resolve(), *path.resolve().parents) if str(each) in mounts]
    return mounts[str(found[0])]


def forget(path: Path) -> None:
    """Drop the file from the system's memory."""
    for each in (path, path.with_suffix(".idx")):
        descriptor = os.open(each, os.O_RDONLY)
        os.fsync(descriptor)  # pages that are still to be written are not dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def available_memory() -> int:
    """Bytes that this process and the system's copies of files can take."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    found = int(fields["MemAvailable"].split()[0]) * 1024
    for names in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        limit, used = (Path("/sys/fs/cgroup", name) for name in names)
        if limit.is_file() and (text := limit.read_text().strip()) != "max":
            found = min(found, int(text) - int(used.read_text()))
    return found


_HOLDS = """
import mmap, pathlib, sys
pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
held = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def memory_taken(num_bytes: int) -> Iterator[None]:
    """Other processes hold so many bytes, and are the first that the system ends if they were too many.

    There is one for each processor, since a single one would clear more than 100 GiB for a minute.

    Raises:
        MemoryError: They could not, or one was ended.
    """
    if num_bytes <= 0:
        yield
        return
    num_holders = os.cpu_count() or 1
    command = [sys.executable, "-I", "-c", _HOLDS, str(-(-num_bytes // num_holders))]
    with ExitStack() as stack:
        holders = []
        for _ in range(num_holders):
            holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            holders.append(stack.enter_context(holder))
            stack.callback(holder.kill)
        if any(holder.stdout.readline() != "held\n" for holder in holders):  # type: ignore[union-attr]
            raise MemoryError(f"{num_bytes} bytes of memory could not be held")
        yield
        if any(holder.poll() is not None for holder in holders):
            raise MemoryError(f"the system has ended a process of those that held {num_bytes} bytes")


def rows_of(path: str, device: torch.device, **options: Any) -> DataLoader[Any]:
    """A loader of rows of the file, with worker processes."""
    module = TokenDataModule(path, num_workers=NUM_WORKERS, **options)
    module.trainer = run_of(1, 0, device.type, is_global_zero=False, lightning_module=None)
    module.setup()
    return module.train_dataloader()


@dataclass(frozen=True)
class RealWork(Work):
    """The work with batches of a file. Documents see each other, as those of the synthetic batches do."""

    path: str

    def batches(self, device: torch.device) -> DataLoader[Any]:
        sizes = {"batch_size": self.batch_size, "sequence_length": self.sequence_length}
        return rows_of(self.path, device, borders=False, **sizes)


class _Module(Qwen3MoePretraining):
    def configure_optimizers(self) -> Any:
        return StochasticAdamW(self.parameters(), lr=1e-5)


def fit(work: Work, path: str | None, device: torch.device) -> PausedFit:
    """One fit, which stands still between blocks; without a path on synthetic batches."""
    module = _Module(work.config)
    module.stages.append(work.network(device))
    given: Work = work if path is None else RealWork(**vars(work), path=path)
    return PausedFit(module, D9DStrategy(), given, device, 1, max_norm=None)


def run_case(case: Case | LoaderCase, device_type: str) -> dict[str, Any]:
    """A loader is measured in this process, a step as all benchmarks are."""
    if isinstance(case, Case):
        forget(Path(case.contenders[REAL].args[1]))  # type: ignore[attr-defined]
        return frame.run_case(case, device_type)
    path = Path(case.path)
    size, before = path.stat().st_size, available_memory()
    taken = min(before - size // 2, _MOST_TAKEN) if case.fills_memory else 0
    try:
        with memory_taken(taken):
            left = available_memory()
            rounds = [measure(case, seed) for seed in range(case.repeats)]
    except MemoryError as error:
        print(f"{error}; the file may be smaller than the memory", flush=True)
        left = available_memory()
        rounds = [measure(case, seed) for seed in range(case.repeats)]
    return {
        "case": case.name,
        "file_gib": size / _GIB,
        "memory_left_gib": left / _GIB,
        "file_system": file_system(path),
        "workers": NUM_WORKERS,
        "batch": f"{case.batch_size} x {case.sequence_length} tokens",
        "tokens_per_second": [tokens for tokens, _ in rounds],
        "read_from_disk": [read for _, read in rounds],
        "is_judged": case.is_judged,
    }


def measure(case: LoaderCase, seed: int) -> tuple[float, float]:
    """Tokens a second of one cold round behind its first batches, and bytes read for each byte of its tokens."""
    path = Path(case.path)
    forget(path)
    sizes = {"batch_size": case.batch_size, "sequence_length": case.sequence_length}
    batches: Any = iter(rows_of(case.path, torch.device("cpu"), seed=seed, **sizes))
    ahead = 2 * NUM_WORKERS + 1
    for _ in range(ahead):
        next(batches)
    start = time.perf_counter()
    for _ in range(case.num_batches):
        next(batches)
    seconds = time.perf_counter() - start
    num_read = sum(_num_read(worker.pid) for worker in batches._workers)
    num_tokens = case.batch_size * case.sequence_length
    batches._shutdown_workers()
    return case.num_batches * num_tokens / seconds, num_read / (2 * num_tokens * (case.num_batches + ahead))


def _num_read(pid: int) -> float:
    """Bytes that a process has had a disk read; not a number where the system does not tell."""
    if not Path(f"/proc/{pid}/io").is_file():
        return float("nan")
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.partition(":")[2]) for line in lines if line.startswith("read_bytes"))


def verdicts(result: Mapping[str, Any]) -> list[str | None]:
    """The verdict on the slowest round of the loader, or that on the step."""
    if "tokens_per_second" not in result:
        return [values["ratio"].get("verdict") for values in result["contenders"].values() if "ratio" in values]
    if not result["is_judged"]:
        return [None]
    return ["met" if min(result["tokens_per_second"]) >= TIMES_STEP * STEP_TOKENS else "missed"]


def table(result: dict[str, Any], device_type: str) -> str:
    """What a person reads."""
    if "tokens_per_second" not in result:
        from tests.benchmarks.__main__ import table as of_ratios

        return of_ratios(result, device_type)
    rates, read = result["tokens_per_second"], result["read_from_disk"]
    median = statistics.median(rates)
    is_larger = result["file_gib"] > result["memory_left_gib"]
    lines = [
        f"\ndata, loader: {len(rates)} cold rounds, {result['workers']} workers, batches of {result['batch']}",
        f"  file of {result['file_gib']:.1f} GiB on {result['file_system']}, {result['memory_left_gib']:.1f} GiB of "
        f"memory left; the file is {'larger' if is_larger else 'SMALLER'} than the memory",
        f"  {median:,.0f} tokens/s ({min(rates):,.0f} .. {max(rates):,.0f}), {median / STEP_TOKENS:.1f} times the "
        f"{STEP_TOKENS:,} of a step; at least {TIMES_STEP}: {verdicts(result)[0] or 'not judged'}",
        f"  read from disk: {min(read):.2f} .. {max(read):.2f} bytes a byte of tokens (0 would be from memory)",
    ]
    return "\n".join(lines)
