"""Weights from files: `load_tensors` against a plain read with safetensors. `streaming_memory` has the memory.

A step is a load of all bytes into tensors that are there. Cold: the system has forgotten the files before each step, so
that the disk is read. Warm: it has them in memory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from lightning_d9d.state import load_tensors, save_tensors
from tests.benchmarks.frame import Case, Contender

PLAIN, OURS, VERIFIED = "safetensors", "load_tensors", "load_tensors, checksums"
SHAPE = (1024, 4096)
"""The shape of each tensor, 8 MB in bfloat16."""
_folders: list[tempfile.TemporaryDirectory[str]] = []


def cases(device_type: str, quick: bool) -> list[Case]:
    """8 GB in one process and 2 GB on four that hold all of it each, cold and warm; with `quick` 17 MB."""
    sizes = {1: 2, 2: 2} if quick else {1: 954, 4: 238}
    found = []
    for num_processes, num_tensors in sizes.items():
        directory = make_files(num_tensors)
        for cold in (True, False):
            options = {"directory": str(directory), "num_tensors": num_tensors, "cold": cold}
            found.append(
                Case(
                    name=f"{'cold' if cold else 'warm'}, {num_processes} processes",
                    contenders={
                        PLAIN: partial(Plain, **options),
                        OURS: partial(Ours, **options, verify=False),
                        VERIFIED: partial(Ours, **options, verify=True),
                    },
                    peer=PLAIN,
                    limits={OURS: 1 / 0.9} if num_processes == 1 and not quick else {},
                    afterwards=read_from_disk,
                    num_processes=num_processes,
                    warmup_steps=1,
                    block_steps=1,
                    repeats=2 if quick else 6,
                    conditions={"tensors": num_tensors, "shape": SHAPE, "dtype": "bfloat16", "cold": cold},
                )
            )
    return found


def make_files(num_tensors: int) -> Path:
    """A directory that lives as long as this process."""
    _folders.append(tempfile.TemporaryDirectory(prefix="streaming"))
    directory = Path(_folders[-1].name, "model")
    tensor = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_tensors({f"layers.{i}.weight": tensor for i in range(num_tensors)}, directory, max_shard_bytes=10**9)
    return directory


@cache
def make_tensors(num_tensors: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The same for all contenders, which take turns."""
    return {f"layers.{i}.weight": torch.zeros(SHAPE, dtype=torch.bfloat16, device=device) for i in range(num_tensors)}


class Plain:
    """Each process copies each tensor from the mapped file."""

    def __init__(self, device: torch.device, directory: str, num_tensors: int, cold: bool) -> None:
        self._directory, self._cold = Path(directory), cold
        self.tensors = make_tensors(num_tensors, device)
        for tensor in self.tensors.values():
            tensor.zero_()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self._cold:
                self._forget()
            self.load(self._directory)

    def load(self, directory: Path) -> None:
        """All of it."""
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    self.tensors[name].copy_(file.get_tensor(name))

    def loss(self) -> float:
        """Equal where the tensors are."""
        return sum(float(tensor[::64].float().square().mean()) for tensor in self.tensors.values())

    def close(self) -> None:
        pass

    def _forget(self) -> None:
        if dist.is_initialized():
            dist.barrier()
        for path in self._directory.iterdir():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        if dist.is_initialized():
            dist.barrier()


class Ours(Plain):
    """Each process reads a part, and they pass it on."""

    def __init__(self, device: torch.device, verify: bool, **options: Any) -> None:
        super().__init__(device, **options)
        self._verify = verify

    def load(self, directory: Path) -> None:
        load_tensors(self.tensors, directory, verify=self._verify)


def read_from_disk(contenders: Mapping[str, Contender], device: torch.device) -> Mapping[str, dict[str, Any]]:
    """What all processes together have the disk read in one more step, as a fraction of the files."""
    measured = {}
    for name, contender in contenders.items():
        before = _num_read()
        contender.run(1)
        read = torch.tensor(float(_num_read() - before))
        if dist.is_initialized():
            dist.all_reduce(read)
        size = sum(tensor.nbytes for tensor in contender.tensors.values())  # type: ignore[attr-defined]
        measured[name] = {"read_from_disk": read.item() / size}
    return measured


def _num_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.partition(":")[2]) for line in lines if line.startswith("read_bytes"))
