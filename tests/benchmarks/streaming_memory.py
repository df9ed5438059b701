"""Private memory while a model is loaded and exported: `python -m tests.benchmarks.streaming_memory [GB] [PROCESSES]`.

Private is what only this process has in memory and cannot be read again from a file (RssAnon, with shared memory). The
model's share of a process, two tensors of the files and 200 MB are allowed, beyond what the process had before.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_d9d.state import Concatenate, Parallel, Spec, load_tensors, save_tensors

PARTS, ROWS, WIDTH = 4, 512, 4096
GROUP_BYTES = PARTS * ROWS * WIDTH * 2
"""The bytes of one tensor in memory, 17 MB, which is four tensors in the files."""
ALLOWED_BYTES = 200 * 10**6


class PeakMemory:
    """Samples the private memory of this process while it is entered. In `num_bytes`: the most, beyond that before."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._before = _private_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def _sample(self) -> None:
        while not self._over.wait(0.002):
            self.num_bytes = max(self.num_bytes, _private_bytes() - self._before)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()


def _private_bytes() -> int:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return sum(1024 * int(words[1]) for words in lines if words[0] in ("RssAnon:", "RssShmem:"))


def make_files(num_tensors: int, directory: Path) -> None:
    """Files of a model of so many tensors. Collective."""
    part = torch.randn(ROWS, WIDTH).bfloat16()
    names = [f"{i}.{part}" for i in range(num_tensors) for part in range(PARTS)]
    save_tensors(dict.fromkeys(names, part), directory, max_shard_bytes=5 * GROUP_BYTES)


def load_and_export(num_tensors: int, source: Path, target: Path) -> int:
    """Builds the model, of which each rank has a part, loads it and exports it. Collective.

    Returns:
        The most private memory of this process at any time, beyond what it had before.
    """
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    mesh = init_device_mesh("cpu", (num_ranks,)) if num_ranks > 1 else None
    names = [[f"{i}.{part}" for part in range(PARTS)] for i in range(num_tensors)]
    mapper = Parallel(Concatenate(parts, f"{i}") for i, parts in enumerate(names))
    specs = dict.fromkeys(chain.from_iterable(names), Spec((ROWS, WIDTH), torch.bfloat16))
    with PeakMemory() as peak:
        model: dict[str, torch.Tensor] = {}
        for i in range(num_tensors):
            tensor = torch.empty((PARTS * ROWS // num_ranks, WIDTH), dtype=torch.bfloat16)
            model[f"{i}"] = tensor if mesh is None else DTensor.from_local(tensor, mesh, [Shard(0)])
        load_tensors(model, source, mapper, check_finite=True)
        save_tensors(model, target, mapper.inverse(specs), max_shard_bytes=5 * GROUP_BYTES)
    return peak.num_bytes


def _process(rank: int, num_tensors: int, num_processes: int, folder: str) -> None:
    torch.set_num_threads(1)
    if num_processes > 1:
        dist.init_process_group("gloo", f"file://{folder}/ranks", rank=rank, world_size=num_processes)
    peak = load_and_export(num_tensors, Path(folder, "files"), Path(folder, "exported"))
    Path(folder, f"peak.{rank}").write_text(str(peak))
    if num_processes > 1:
        dist.destroy_process_group()


def peaks_of(num_tensors: int, num_processes: int) -> list[int]:
    """What `load_and_export` returns in each of so many new processes."""
    with tempfile.TemporaryDirectory(prefix="streaming_memory") as folder:
        make_files(num_tensors, Path(folder, "files"))
        multiprocessing.spawn(_process, (num_tensors, num_processes, folder), nprocs=num_processes)  # type: ignore[attr-defined]
        return [int(Path(folder, f"peak.{rank}").read_text()) for rank in range(num_processes)]


def main(num_gb: float = 4, num_processes: int = 1) -> int:
    """Prints a line for each process. 1 if one of them needs more than is allowed."""
    num_tensors = round(num_gb * 10**9 / GROUP_BYTES)
    share = num_tensors * GROUP_BYTES // num_processes
    allowed = share + 2 * GROUP_BYTES + ALLOWED_BYTES
    peaks = peaks_of(num_tensors, num_processes)
    for rank, peak in enumerate(peaks):
        figures = f"{peak / 1e6:.0f} MB, share {share / 1e6:.0f}, allowed {allowed / 1e6:.0f}"
        print(f"process {rank} of {num_processes}: {figures}")
    return int(max(peaks) > allowed)


if __name__ == "__main__":
    sys.exit(main(*(kind(text) for kind, text in zip((float, int), sys.argv[1:], strict=False))))
