"""`lightning-d9d doctor`: checks, or with `--measure FILE` the machine table of this GPU."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lightning_d9d import doctor
from lightning_d9d.env import num_cuda_devices
from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.collectives import all_gather_object
from lightning_d9d.paths import make_folder_of

if TYPE_CHECKING:
    from lightning_d9d.plan.measure import Measured, Sizes


def run(given: Namespace) -> int:
    """Checks this machine, or measures it. On the ranks of a job collective.

    Returns:
        The exit code: 1 if something that training needs is broken.

    Raises:
        ConfigError: A GPU is missing, or the file cannot be written.
    """
    if given.measure is None:
        return doctor.main()
    if Path(given.measure).suffix != ".json":
        raise ConfigError(f"--measure {given.measure} must end in .json, as plan --gpu reads it")
    if num_cuda_devices() == 0:
        raise ConfigError(
            "doctor --measure needs a GPU, and torch sees none; plan --gpu takes h100, h200, a100 or b200"
        )
    make_folder_of(given.measure)
    write_table(given.measure, lambda local: torch.device("cuda", local))
    return 0


def write_table(path: str, device_of: Callable[[int], torch.device], sizes: Sizes | None = None) -> None:
    """Measures this rank's device, and links under a launcher; rank 0 writes. Collective over the ranks of a job."""
    from lightning_d9d.plan.measure import measure  # with all that plans need; checks begin without

    launcher = doctor.find_launcher()
    if launcher is None:
        table, rows = measure(device_of(0), sizes)
        table.save(path, "measured")
        sys.stdout.write(_text(rows, path))
        return
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = launcher.main_address, str(launcher.main_port)
    device = device_of(launcher.local_rank())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank, size = launcher.global_rank(), launcher.world_size()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=size, timeout=timedelta(minutes=5)
    )
    try:
        num_nodes = len({*all_gather_object(launcher.node_rank())})
        table, rows = measure(device, sizes, group=dist.group.WORLD, num_nodes=num_nodes)
        if rank == 0:
            table.save(path, "measured")
            sys.stdout.write(_text(rows, path))
    finally:
        dist.destroy_process_group()


def _text(rows: list[Measured], path: str) -> str:
    lines = []
    for each in rows:
        rate = f"{each.flops / each.seconds / 1e12:8.2f} TFLOP/s" if each.flops else ""
        rate = f"{each.num_bytes / each.seconds / 1e9:8.2f} GB/s" if each.num_bytes else rate
        lines.append(f"{each.name:44} {1e6 * each.seconds:12.1f} us  {rate}".rstrip())
    return "\n".join([*lines, f"{path}: give it to `lightning-d9d plan --gpu {path}`"]) + "\n"
