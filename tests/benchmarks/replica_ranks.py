"""Ranks of the benchmarks of decentralised replicas: processes of their own, each perhaps on a node of its own."""

from __future__ import annotations

import ctypes
import json
import math
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.harness import warm
from tests.loop.test_launchers import free_port

NEW_NETWORK = 0x40000000
"""The flag of `setns(2)` for a new network namespace."""


@dataclass(frozen=True)
class Place:
    """The node of a rank: a network namespace, its interface and its address."""

    namespace: str
    interface: str
    address: str


def run_ranks(
    body: Callable[[int], Any],
    num_ranks: int,
    *,
    places: Sequence[Place] = (),
    meanwhile: Callable[[Sequence[BaseProcess]], None] = lambda processes: None,
) -> list[Any]:
    """Call a function as each rank of a job, and return what it returned, by rank.

    Args:
        body: Gets its rank; can be pickled, and returns what JSON takes.
        num_ranks: All of them.
        places: A node for each rank; by default all are on this machine's own network.
        meanwhile: Called while they run.

    Raises:
        RuntimeError: A rank failed.
    """
    address = places[0].address if places else "127.0.0.1"
    port = 29500 if places else free_port(range(25000, 32000))
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(num_ranks):
            node = {"LOCAL_RANK": 0, "GROUP_RANK": rank} if places else {"LOCAL_RANK": rank, "GROUP_RANK": 0}
            values = {"RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_ADDR": address, "MASTER_PORT": port, **node}
            values |= {"TORCHELASTIC_RUN_ID": "replicas", "OMP_NUM_THREADS": 1, "LOCAL_WORLD_SIZE": 1}
            if places:
                values["GLOO_SOCKET_IFNAME"] = places[rank].interface
            place = places[rank] if places else None
            arguments = (body, rank, {name: str(value) for name, value in values.items()}, place, folder)
            processes.append(warm.context().Process(target=_be_rank, args=arguments, daemon=True))
        for process in processes:
            process.start()
        try:
            meanwhile(processes)
            for process in processes:
                process.join()
        finally:
            for process in processes:
                process.kill()
        texts = [Path(folder, f"{rank}.json") for rank in range(num_ranks)]
        results = [json.loads(path.read_text()) if path.exists() else {"failed": "ended"} for path in texts]
    for rank, result in enumerate(results):
        if "failed" in result:
            raise RuntimeError(f"rank {rank}: {result['failed']}")
    return [result["found"] for result in results]


def _be_rank(body: Callable[[int], Any], rank: int, values: dict[str, str], place: Place | None, folder: str) -> None:
    os.environ.update(values)
    torch.set_num_threads(1)
    if place is not None:
        system = ctypes.CDLL(None, use_errno=True)
        with open(Path("/run/netns", place.namespace)) as file:
            if system.setns(file.fileno(), NEW_NETWORK) != 0:
                raise OSError(ctypes.get_errno(), "setns")
    os.chdir(folder)
    try:
        result = {"found": body(rank)}
    except Exception:
        result = {"failed": traceback.format_exc()}
    path = Path(folder, f"{rank}.part")
    path.write_text(json.dumps(result))
    path.rename(Path(folder, f"{rank}.json"))


def pause(seconds: float) -> None:
    """Compute as another device would: the processor is free. Time in which the process is stopped does not count."""
    parts = math.ceil(seconds / _PART_SECONDS)
    for _ in range(parts):
        time.sleep(seconds / parts)


_PART_SECONDS = 0.01


class _Layer(torch.autograd.Function):
    """Takes a time each way, and gives its weight a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward: float, backward: float) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(weight)
        ctx.seconds = backward
        pause(forward)
        return x + weight.detach()[0] * 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        pause(ctx.seconds)
        return gradient, torch.full_like(weight, 0.5), None, None


class Paused(L.LightningModule):
    """Layers with weights that compute for a given time, as on a device beside the processor.

    Args:
        num_parameters: Of all layers.
        forward_seconds: Of all layers.
        backward_seconds: Of all layers.
        num_layers: How many.
    """

    def __init__(
        self, num_parameters: int, forward_seconds: float, backward_seconds: float, num_layers: int = 8
    ) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.zeros(num_parameters // num_layers)) for _ in range(num_layers)]
        )
        self._layer = partial(self._run, forward_seconds / num_layers, backward_seconds / num_layers)

    @staticmethod
    def _run(forward: float, backward: float, x: Tensor, weight: Tensor) -> Tensor:
        return _Layer.apply(x, weight, forward, backward)  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch.mean()
        for weight in self.weights:
            x = self._layer(x, weight)
        return x

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.zeros(4096, 1), 1)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Times(L.Callback):
    """Keeps when batches ended, by the clock that all processes of a machine share."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(time.monotonic())


def trainer_of(strategy: Any, num_ranks: int, *, apart: bool = False, **options: Any) -> L.Trainer:
    """Return a quiet Trainer of all ranks, of which each may be a node."""
    where = {"devices": 1, "num_nodes": num_ranks} if apart else {"devices": num_ranks}
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return L.Trainer(accelerator="cpu", strategy=strategy, num_sanity_val_steps=0, **{**where, **quiet, **options})
